"""Loaders of users' own loops with samplers of their own: what they draw is dealt out, each draw once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import steepest
from steepest.data.drawn import DrawnSource
from steepest.errors import ConfigurationError, ModelRaisedError
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import Parts, Script, plain, several_passes
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import pause


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def weighted(count: int) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + number % 3 for number in range(count)], count + 2)


def replacing(count: int) -> RandomSampler:
    return RandomSampler(range(count), replacement=True, generator=torch.Generator())


def a_part(count: int) -> SubsetRandomSampler:
    return SubsetRandomSampler(range(0, count, 2))


def batches(count: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(count)), 3, drop_last=False)


class Growing:
    """Batches that grow from epoch to epoch, and within each: a batch size that changes while training."""

    batch_size = None

    def __init__(self, count: int) -> None:
        self._count, self._epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self._count).tolist()
        for number in range(5):
            yield [order.pop() for _ in range(1 + (number + self._epoch) // 3)]


SAMPLERS = {
    "weighted": weighted,
    "replacing": replacing,
    "a part": a_part,
    "batches": batches,
    "growing": Growing,
}


def script(name: str, loop: Any = plain, **more: Any) -> Script:
    return Script(loop, optimizer=sgd(momentum=0.9), sampler=SAMPLERS[name], **more)


@pytest.mark.few(4)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_are_dealt_out(name: str, workers: int) -> None:
    mine = script(name)
    found = run(mine, workers)
    assert difference(found.weights, mine.alone(workers)) < 1e-12


@pytest.mark.parametrize("name", ["weighted", "growing"])
def test_where_a_batch_has_several_steps(name: str) -> None:
    mine = script(name, several_passes)
    assert difference(run(mine, 2).weights, mine.alone(2)) < 1e-12


def test_the_history_counts_the_samples_of_batches() -> None:
    found = run(script("growing", epochs=2), 2)
    assert [row["samples"] for row in found.steps] == [2, 3, 2, 2, 4, 2]


def slow(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            pause(1e-3)
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("name", ["weighted", "growing"])
def test_a_successor_draws_the_same(name: str, strategy: str) -> None:
    mine = script(name, slow, epochs=5)
    found = without(mine, 3, 1, 4, STRATEGIES[strategy])
    assert difference(found.weights, mine.alone(3)) < 1e-12


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["weighted", "growing"])
def test_a_resumed_program_goes_on_in_the_middle(name: str, tmp_path: Path) -> None:
    mine, checkpoints = script(name, slow), steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(mine, 2, checkpoints=checkpoints, callbacks=[Interrupts(5)])
    assert difference(run(mine, 2, checkpoints=checkpoints).weights, mine.alone(2)) < 1e-12


def test_each_draw_is_seen_once_and_generators_stay() -> None:
    data = TensorDataset(*samples(12))
    loader = DataLoader(data, batch_size=2, sampler=weighted(12))
    source, before = DrawnSource(loader, 3), torch.get_rng_state()
    drawn = [list(next(source.open([np.arange(14) + 14 * e])).batch[0][:, 0]) for e in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    assert Counter(map(float, drawn[0])) != Counter(map(float, drawn[1]))
    again = DrawnSource(DataLoader(data, batch_size=2, sampler=weighted(12)), 3)
    parts = [next(again.open([np.arange(a, b) + 28])) for a, b in ((0, 5), (5, 14))]
    assert [each.samples for each in parts] == [5, 9]
    assert [float(v) for each in parts for v in each.batch[0][:, 0]] == list(map(float, drawn[2]))


def endless(count: int) -> RandomSampler:
    return RandomSampler(range(count), replacement=True, num_samples=10**10)


def test_a_long_epoch_is_drawn_when_it_is_needed() -> None:
    """One epoch for ever, as some loops have it, is left by break."""

    def some(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for number, (x, y) in enumerate(parts.loader):
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
                if number == 3:
                    break

    mine = Script(some, sampler=endless, optimizer=sgd(), epochs=1)
    assert difference(run(mine, 2).weights, mine.alone(2)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("own", [False, True])
def test_draws_do_not_depend_on_what_is_asked_for_before(own: bool) -> None:
    """Parts of an epoch that is drawn piece by piece are the same in any order, after other epochs, and again."""
    size = 140_000
    generator = torch.Generator() if own else None
    sampler = RandomSampler(range(10**6), replacement=True, num_samples=size, generator=generator)
    loader = DataLoader(TensorDataset(torch.arange(10**6)), batch_size=2, sampler=sampler)

    def draws(source: DrawnSource, begin: int) -> list[int]:
        batch = next(source.open([np.arange(begin, begin + 100)])).batch
        return cast(list[int], batch[0].tolist())

    source = DrawnSource(loader, 3)
    for begin in (0, 130_000, 65_500, 10):
        torch.rand(7)
        alone = draws(DrawnSource(loader, 3), begin)
        assert draws(source, begin) == alone != draws(source, size + begin)


class Uneven(Growing):
    def __len__(self) -> int:
        return 4


def test_a_sampler_that_draws_more_than_it_says_is_refused() -> None:
    mine = Script(plain, sampler=Uneven)
    with pytest.raises(
        (ModelRaisedError, ConfigurationError), match="4 draws in an epoch, and has more"
    ):
        run(mine, 2)


def test_the_size_of_all_batches_is_the_batch_samplers() -> None:
    with pytest.raises(ConfigurationError, match="leave global_batch_size out"):
        run(script("batches"), 2, global_batch_size=8)
