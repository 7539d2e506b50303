"""Iterable data sets of users' own loops: each sample is one worker's, whether their number is known or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import steepest
from steepest.core.data.sampler import step_seed
from steepest.errors import ConfigurationError, ModelRaisedError, SteepestError
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import BATCH, Parts, Script
from tests.reference import Weights, difference, perceptron, samples, snapshot
from tests.simulated_programs import quiet
from tests.simulation.run import pause

SAMPLES = 13


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


class Records(IterableDataset[Any]):
    """Samples that are shuffled in a small buffer, in another way in each pass."""

    def __init__(self) -> None:
        self._x, self._y = samples(SAMPLES)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None
        buffer: list[int] = []
        for number in range(SAMPLES):
            buffer.append((number + self._epoch) % SAMPLES)
            if len(buffer) == 4:
                at = buffer.pop(int(torch.randint(4, ()) + random.randrange(4)) % 4)
                yield self._x[at], self._y[at]
        for at in buffer:
            yield self._x[at], self._y[at]


class Numbered(Records):
    def __len__(self) -> int:
        return SAMPLES


class Batched(Records):
    """Batches of several sizes, of which each is one worker's."""

    def __iter__(self) -> Iterator[Any]:
        begin = 0
        for size in (1, 2, 3, 3, 4):
            yield self._x[begin : begin + size], self._y[begin : begin + size]
            begin += size


class BatchedInNumber(Batched):
    def __len__(self) -> int:
        return 5


class Streamed(Script):
    """A script whose data are iterable."""

    data_set: Any = Records
    size: int | None = BATCH

    def __call__(self) -> None:
        model = self.model()
        loader: Any = DataLoader(self.data_set(), batch_size=self.size)
        parts = Parts(model, self.optimizer(model), loader)
        found = steepest.prepare(parts.model, parts.optimizer, loader)
        self.loop(Parts(*found), self.epochs)

    def alone(self, workers: int, seed: int = 0) -> Weights:
        torch.manual_seed(seed)
        model = self.model()
        loader = Wholes(self.data_set(), workers, self.size, seed)
        self.loop(Parts(model, self.optimizer(model), loader), self.epochs)
        return snapshot(model)


class Wholes:
    """Whole batches of all workers, in the order in which a data set that is read alone has them."""

    def __init__(self, data: Any, workers: int, size: int | None, seed: int) -> None:
        self._data, self._whole, self._seed, self._epoch = data, workers * (size or 1), seed, 0
        self._cat = torch.stack if size else torch.cat

    def __iter__(self) -> Iterator[Any]:
        before, python = torch.get_rng_state(), random.getstate()
        seed = step_seed(self._seed, self._epoch, (1 << 32) - 1)
        torch.manual_seed(seed)
        random.seed(seed)
        self._data.set_epoch(self._epoch)
        found = list(self._data)
        torch.set_rng_state(before)
        random.setstate(python)
        for begin in range(0, len(found), self._whole):
            some = found[begin : begin + self._whole]
            yield [self._cat([each[at] for each in some]) for at in range(2)]
        self._epoch += 1


def loop(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            pause(1e-3)
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.02)


def streamed(data_set: Any, **more: Any) -> Streamed:
    script = Streamed(**({"loop": loop, "model": perceptron, "optimizer": adam} | more))
    script.__dict__["data_set"] = data_set
    if issubclass(data_set, Batched):
        script.__dict__["size"] = None
    return script


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("data_set", [Records, Numbered, Batched])
def test_each_sample_is_one_workers(data_set: Any, workers: int) -> None:
    script = streamed(data_set)
    assert difference(run(script, workers).weights, script.alone(workers)) < 1e-12


def adding_up(parts: Parts, epochs: int) -> None:
    """A step for two batches, also over an epoch's end."""
    kept = steepest.register(batches=0)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            pause(1e-3)
            (nn.functional.mse_loss(parts.model(x), y) / 2).backward()
            kept.batches += 1
            if kept.batches % 2 == 0:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


@pytest.mark.parametrize("data_set", [Batched, BatchedInNumber])
def test_gradients_of_batches_of_several_sizes_are_added_up(data_set: Any) -> None:
    script = streamed(data_set, loop=adding_up)
    right = script.alone(3)
    assert difference(run(script, 3).weights, right) < 1e-12
    assert difference(without(script, 3, 1, 1).weights, right) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("data_set", [Records, Numbered])
def test_a_successor_enters_in_the_middle(data_set: Any, strategy: str) -> None:
    script = streamed(data_set, epochs=5)
    found = without(script, 3, 1, 5, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(3)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("step", [3, 4])
@pytest.mark.parametrize("data_set", [Records, Numbered])
def test_a_resumed_program_goes_on_in_the_middle(data_set: Any, step: int, tmp_path: Path) -> None:
    """Also at the end of a pass."""
    script, checkpoints = streamed(data_set), steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(script, 2, checkpoints=checkpoints, callbacks=[Interrupts(step)])
    found = run(script, 2, checkpoints=checkpoints)
    assert difference(found.weights, script.alone(2)) < 1e-12


@pytest.mark.parametrize("step", [2, 4])
def test_a_batch_in_which_a_program_ended_is_read_again_and_trained_once(
    step: int, tmp_path: Path
) -> None:
    """Its step is committed, and it may have further ones."""
    read: list[list[float]] = []

    def ends(at: int) -> Streamed:
        def loop(parts: Parts, epochs: int) -> None:
            taken = 0
            for _ in steepest.epochs(epochs):
                for x, y in parts.loader:
                    if steepest.rank() == 0:
                        read.append(x[:, 0].tolist())
                    parts.optimizer.zero_grad()
                    nn.functional.mse_loss(parts.model(x), y).backward()
                    parts.optimizer.step()
                    taken += 1
                    if taken == at:
                        raise InterruptedRunError

        return Streamed(loop, perceptron, adam)

    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(ModelRaisedError):
        run(ends(step), 2, checkpoints=checkpoints)
    found = run(ends(0), 2, checkpoints=checkpoints)
    assert difference(found.weights, streamed(Records).alone(2)) < 1e-12
    assert len(read) == 3 * 4 + 1
    assert read[step] == read[step - 1]


class Lying(Records):
    """Says that it has fewer samples than it yields."""

    def __len__(self) -> int:
        return SAMPLES - 1


class Dividing(Records):
    """Divides its samples itself."""

    def __iter__(self) -> Iterator[Any]:
        assert (steepest.rank(), steepest.size()) == (0, 1), "it is read as a whole"
        return super().__iter__()


def test_a_length_that_is_none_is_refused() -> None:
    with pytest.raises(
        (ModelRaisedError, ConfigurationError), match="says that it has 12 samples, and yields more"
    ):
        run(streamed(Lying), 2)


def test_a_data_set_sees_no_workers() -> None:
    script = streamed(Dividing)
    assert difference(run(script, 2).weights, streamed(Records).alone(2)) < 1e-12


def test_workers_that_do_not_wait_need_a_length() -> None:
    with pytest.raises(
        SteepestError, match="an iterable data set without __len__ where workers do not"
    ):
        run(streamed(Records), 2, "async")
    assert run(streamed(Numbered), 2, "async").steps[-1]["epoch"] == 2
