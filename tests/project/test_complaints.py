"""What users of other libraries' loops complain of year after year, each as a test of a loop of one's own here.

The words of each are those of the complaint; the issues in its first line are where it was made. Where it can be, what
was complained of is computed too, and is found wrong: the test would not pass with it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import steepest
from steepest import FailureConfig, ParameterServerStrategy
from tests.own_loops import BATCH, Parts, Script, Whole, plain
from tests.reference import Weights, difference, perceptron, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def run(
    script: Any, workers: int, **settings: Any
) -> tuple[Weights, list[dict[str, Any]], list[dict[str, float]]]:
    """The weights, the rows of steps and the reports of a run."""
    with Simulation(seed=3).running():
        found = steepest.run(
            script, num_workers=workers, progress=False, **{"run_config": run_config(), **settings}
        )
        return dict(found.state_dict), list(found.history.steps), found.reports


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_scheduler_ticks_once_per_process(workers: int) -> None:
    """Of accelerate 843, 1398, 2142, 3797: here it ticks once per step of the job, on any number of processes."""
    halving = Script(plain, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5))
    _, rows, _ = run(halving, workers)
    rates = [row["learning_rate"][0] for row in rows]
    assert rates == [0.1 * 0.5 ** (step // 3) for step in range(len(rows))]
    theirs = [0.1 * 0.5 ** (step * workers // 3) for step in range(len(rows))]
    assert (rates == theirs) == (workers == 1)


READ: Counter[int] = Counter()


class Counted(Dataset[Any]):
    """Samples that count how often each is read."""

    def __init__(self) -> None:
        self.columns = samples(16)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        READ[index] += 1
        return tuple(column[index] for column in self.columns)


def counted() -> None:
    """One epoch over data that count."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(Counted(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = steepest.prepare(model, optimizer, loader)
    for _ in steepest.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()


class StoppedError(Exception):
    """The program was interrupted."""


class Stops(steepest.Callback):
    """Interrupts the program after two steps."""

    def after_step(self, sgd: Any, result: steepest.StepResult) -> None:
        if result.step == 2:
            raise StoppedError


def test_mid_epoch_resume_is_wrong_or_takes_hours_of_skipping(tmp_path: Path) -> None:
    """Of accelerate 2016 and 1451, transformers 21934: here none that was seen is read again, and none is missing."""
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    READ.clear()
    with pytest.raises(StoppedError):
        run(counted, 2, checkpoints=checkpoints, callbacks=[Stops()])
    before = Counter(READ)
    READ.clear()
    _, rows, _ = run(counted, 2, checkpoints=checkpoints)
    assert len(rows) == 4
    assert sum(before.values()) == 8 == sum(READ.values())
    assert before + READ == Counter(range(16))


def test_a_resume_that_skips_reads_what_was_seen() -> None:
    """Their way: a loader like the one before, of which batches are thrown away."""
    READ.clear()
    torch.manual_seed(0)
    loader = DataLoader(Counted(), batch_size=2 * BATCH, shuffle=True)
    assert len(list(itertools.islice(loader, 2, None))) == 2
    assert sum(READ.values()) == 16
    shuffled_anew = [
        index for batch in itertools.islice(loader.batch_sampler, 2, None) for index in batch
    ]
    seen = [index for batch in itertools.islice(loader.batch_sampler, 2) for index in batch]
    assert set(shuffled_anew) & set(seen)


def judging(parts: Parts, epochs: int) -> None:
    """Reports the mean error over all samples of an epoch, counted by samples."""
    for _ in steepest.epochs(epochs):
        errors = []
        for x, y in parts.loader:
            errors.append(steepest.gather((parts.model(x) - y).square().mean(dim=1).detach()))
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
        steepest.report(error=torch.cat(errors).mean(), samples=len(torch.cat(errors)))


@pytest.mark.parametrize("workers", [2, 3])
def test_metrics_of_the_last_batch_are_wrong(workers: int) -> None:
    """Of accelerate 575, 952, 1234 and 2007, trl 7010: here no sample of the last batch counts twice, or not at all."""
    still = Script(judging, optimizer=sgd(lr=0.0), data=samples(13), epochs=1)
    weights, _, ((row),) = run(still, workers)
    model = perceptron()
    model.load_state_dict(weights)
    x, y = still.data
    errors = (model(x) - y).square().mean(dim=1).detach()
    assert row["error"] == pytest.approx(errors.mean().item(), rel=1e-12)
    shares = [
        list(DistributedSampler(still.data[0], workers, rank, shuffle=False))
        for rank in range(workers)
    ]
    padded = sum(errors[share].mean() for share in shares) / workers
    last = errors[-1:].mean()
    for theirs in (padded, last):
        assert row["error"] != pytest.approx(float(theirs), rel=1e-3)


def over_tokens(parts: Parts, epochs: int) -> None:
    """Two batches for a step, whose samples have different numbers of tokens; the loss is the mean over all tokens."""
    for _ in steepest.epochs(epochs):
        batches: list[Any] = []
        for x, y in parts.loader:
            batches.append((x, y, (y > 0).double()))
            if len(batches) == 2:
                own = sum(mask.sum().item() for _, _, mask in batches)
                tokens = float(torch.as_tensor(steepest.gather(own)).sum())
                for x, y, mask in batches:
                    ((parts.model(x) - y).square() * mask).sum().div(max(tokens, 1.0)).backward()
                parts.optimizer.step()
                parts.optimizer.zero_grad()
                batches.clear()


def dividing(parts: Parts, epochs: int) -> None:
    """The same, divided by a worker's own tokens behind the backward passes, each of which counts by its weight."""
    for _ in steepest.epochs(epochs):
        tokens = 0.0
        for number, (x, y) in enumerate(parts.loader):
            mask = (y > 0).double()
            tokens += mask.sum().item()
            steepest.weight(mask.sum().item())
            ((parts.model(x) - y).square() * mask).sum().backward()
            if number % 2:
                for parameter in parts.model.parameters():
                    assert parameter.grad is not None
                    parameter.grad /= max(tokens, 1.0)
                parts.optimizer.step()
                parts.optimizer.zero_grad()
                tokens = 0.0


def over_batches(parts: Parts, epochs: int) -> None:
    """Their way: the mean over a batch's tokens, and then over batches and workers."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            mask = (y > 0).double()
            errors = (parts.model(x) - y).square() * mask
            (errors.sum() / mask.sum().clamp_min(1.0) / 2).backward()
            if number % 2:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 3])
def test_token_weights_over_accumulation_and_ranks_are_wrong(workers: int) -> None:
    """Of transformers 34191 and 34242: here a token weighs the same in whichever batch, on whichever worker it is."""
    script = Script(
        over_tokens, optimizer=sgd(momentum=0.9), data=samples(24), epochs=3, reduction="sum"
    )
    found, _, _ = run(script, workers)
    expected = script.alone(workers)
    assert difference(found, expected) < 1e-12
    with pytest.warns(UserWarning, match="a mean over other numbers than samples"):
        theirs, _, _ = run(replace(script, loop=over_batches, reduction="mean"), workers)
    assert difference(theirs, expected) > 1e-3
    with pytest.warns(UserWarning, match="gradients of several batches that have said"):
        run(replace(script, loop=dividing, reduction="mean"), workers)


STARTS: list[int] = []


def starting(parts: Parts, epochs: int) -> None:
    """Notes each beginning of the function."""
    STARTS.append(steepest.rank())
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            pause(0.01)
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


class Kills(steepest.Callback):
    """Kills worker 1 after the fourth step, and notes when steps were over."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def on_fit_begin(self, sgd: Any, steps: int) -> None:
        self._pids = sgd.foreach_worker(lambda view: view.pid)

    def on_step(self, sgd: Any, result: steepest.StepResult) -> None:
        if result.step == 4:
            (victim,) = [p for p in self._simulation.living() if p.pid == self._pids[1]]
            self._simulation.world.kill(victim, "it was killed. connection error code 2.")


def struck() -> tuple[Script, Weights, list[dict[str, Any]], set[str]]:
    """A run in which worker 1 of three is killed: the script, its weights, rows of steps, kinds of events."""
    STARTS.clear()
    script = Script(starting, optimizer=sgd(momentum=0.9), data=samples(18), epochs=4)
    simulation = Simulation(seed=5)
    with simulation.running():
        found = steepest.run(
            script,
            num_workers=3,
            strategy=ParameterServerStrategy(num_servers=1),
            run_config=run_config(failure=FailureConfig(patience=math.inf)),
            callbacks=[Kills(simulation)],
            progress=False,
        )
        events = {event["event"] for event in found.history.events}
        return script, dict(found.state_dict), list(found.history.steps), events


def test_one_death_restarts_everyone() -> None:
    """Of ray 20647 and 61475: here the successor alone runs the function again."""
    _, _, _, events = struck()
    assert events == {"replaced"}
    assert Counter(STARTS) == {0: 1, 1: 2, 2: 1}


def test_a_restart_from_a_checkpoint_restarts_everyone(tmp_path: Path) -> None:
    """Their way: the whole job is started again, from its newest checkpoint."""
    STARTS.clear()
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=2)
    script = Script(starting, data=samples(18), epochs=1)
    with pytest.raises(StoppedError):
        run(script, 3, checkpoints=checkpoints, callbacks=[Stops()])
    run(script, 3, checkpoints=checkpoints)
    assert Counter(STARTS) == {0: 2, 1: 2, 2: 2}


class Lossy(Whole):
    """Their way: what the dead worker had of the fifth step is in no update."""

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            lost = self.epoch == 1 and number == 1
            yield [c[:-BATCH] for c in batch] if lost else batch


def test_data_is_lost_or_doubled_after_recovery() -> None:
    """Of torchft 309, 58 and 37: here the weights are those of an epoch that visits each sample once."""
    script, weights, rows, _ = struck()
    assert difference(weights, script.alone(3)) < 1e-12
    theirs = script.alone(3, loader=Lossy(script.data, 3 * BATCH))
    assert difference(weights, theirs) > 1e-3
    assert Counter(row["epoch"] for row in rows for _ in range(row["samples"])) == dict.fromkeys(
        range(4), 18
    )


def test_recovery_is_slow() -> None:
    """Of torchft 329, where it took 948 seconds: here the longest step is over within a few, on the simulated clock."""
    _, _, rows, _ = struck()
    pauses = [b["time"] - a["time"] for a, b in itertools.pairwise(rows)]
    assert 0.01 < max(pauses) < 10
