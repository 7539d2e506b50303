"""Buffers of modules in loops of users' own, such as BatchNorm's running means, where a worker dies."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import steepest
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import BATCH
from tests.reference import samples
from tests.simulated_programs import quiet
from tests.simulation.run import pause


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


#: By batch, number of the step in it, and worker, in each turn that it was taken: the running means before it.
MEANS: dict[tuple[int, int, int], list[torch.Tensor]] = {}


def normalised(steps: int = 1, *, gathers: bool = False) -> None:
    """A loop over a module with BatchNorm, which takes so many steps for each batch."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(TensorDataset(*samples(16)), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = steepest.prepare(model, optimizer, loader)
    kept = steepest.register(batch=0)
    for _ in steepest.epochs(3):
        for x, y in loader:
            number = kept.batch
            for step in range(steps):
                pause(1e-3)
                means = MEANS.setdefault((number, step, steepest.rank()), [])
                means.append(model[1].running_mean.clone())
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            kept.batch += 1
            if gathers:
                steepest.gather(loss.detach())


def seen(script: Any, strategy: str, victim: int | None) -> tuple[int, dict[Any, Any]]:
    """The number of batches that BatchNorm has counted, and `MEANS`, of a run in which a worker dies."""
    MEANS.clear()
    if victim is None:
        found = run(script, 2, STRATEGIES[strategy])
    else:
        found = without(script, 2, victim, 5, STRATEGIES[strategy])
    return int(found.weights["1.num_batches_tracked"]), dict(MEANS)


def gathering() -> None:
    normalised(gathers=True)


def in_steps() -> None:
    normalised(steps=2)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ps", "ps, two copies", "allreduce, two copies"])
@pytest.mark.parametrize("script", [normalised, in_steps, gathering])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_successor_begins_with_those_of_the_others_at_that_place(
    script: Any, strategy: str, victim: int
) -> None:
    """A batch that the others have begun, or that is gone through once more, does not count twice in them."""
    counted, undisturbed = seen(script, strategy, None)
    found, means = seen(script, strategy, victim)
    assert found == counted == (24 if script is in_steps else 12)
    others = 1 - victim
    places = sorted({place[:2] for place in undisturbed})
    for batch, step in places:  # the survivor's are those of a run in which no worker dies
        of_others = batch, step, others
        assert torch.equal(means[of_others][-1], undisturbed[of_others][-1])
    differ = [
        each
        for each in places
        if not torch.equal(means[(*each, victim)][-1], undisturbed[(*each, victim)][-1])
    ]
    # where the others gather behind a step, it may pass over that first: it has theirs behind it
    entered = differ[: 1 + (script is gathering)]
    assert any(
        torch.equal(means[(*each, victim)][-1], means[(*each, others)][-1]) for each in entered
    )


class Queued(nn.Module):
    """It keeps the last keys that it has seen, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.norm = nn.BatchNorm1d(3).double()
        self.register_buffer("queue", torch.zeros(8, 3, dtype=torch.float64))
        self.register_buffer("pointer", torch.tensor(0))
        self.register_buffer("full", torch.tensor(False))
        self.register_buffer("level", torch.zeros((), dtype=torch.float64))  # a statistic, unknown

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            for key in x.detach():
                self.queue[int(self.pointer) % 8] = key
                self.pointer += 1 + steepest.rank()
            self.full |= bool(steepest.rank())
            self.level += 1 + steepest.rank() / 8
        return self.layer(self.norm(x))


#: By worker, the module's buffers at the end.
BUFFERS: dict[int, dict[str, torch.Tensor]] = {}


def queued(buffers: dict[str, str] | None = None) -> None:
    model: Any = Queued()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(*samples(6 * BATCH)), batch_size=BATCH)
    model, optimizer, loader = steepest.prepare(model, optimizer, loader, buffers=buffers)
    for _ in steepest.epochs(1):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    BUFFERS[steepest.rank()] = {name: each.clone() for name, each in model.named_buffers()}


@pytest.mark.filterwarnings("ignore:a forward pass changes the buffer")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_no_running_statistic_is_worker_0s(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    BUFFERS.clear()
    with caplog.at_level(logging.WARNING, "steepest.runtime.state.transfer"):
        found = run(queued, workers, STRATEGIES["ps"]).weights
    for name in ("queue", "pointer", "full", "level"):
        assert torch.equal(found[name], BUFFERS[0][name])
        assert workers == 1 or not torch.equal(BUFFERS[0][name], BUFFERS[1][name])
    for name in ("norm.running_mean", "norm.running_var"):
        mean = torch.stack([each[name] for each in BUFFERS.values()]).mean(dim=0)
        assert torch.allclose(found[name], mean, rtol=1e-12)
    told = [r.getMessage() for r in caplog.records if "differ between workers" in r.getMessage()]
    assert len(told) == (workers > 1)
    assert all("'queue', 'pointer', 'full' differ" in each for each in told)


@pytest.mark.filterwarnings("ignore:a forward pass changes the buffer")
@pytest.mark.parametrize("workers", [2, 3])
def test_a_user_says_what_stands_for_all_workers_values_of_a_buffer(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    BUFFERS.clear()
    chosen = {"*": "mean", "pointer": "first", "norm.*var": "first"}
    with caplog.at_level(logging.WARNING, "steepest.runtime.state.transfer"):
        found = run(lambda: queued(chosen), workers, STRATEGIES["ps"]).weights
    for name in ("queue", "level", "norm.running_mean"):
        mean = torch.stack([each[name] for each in BUFFERS.values()]).mean(dim=0)
        assert torch.allclose(found[name], mean, rtol=1e-12)
        assert not torch.equal(found[name], BUFFERS[0][name])
    for name in ("pointer", "norm.running_var"):
        assert torch.equal(found[name], BUFFERS[0][name])
    assert found["full"], "of bool whether any is true"
    assert not [r for r in caplog.records if "differ between workers" in r.getMessage()]


class Centred(nn.Module):
    """It subtracts a running mean of its inputs, also while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x - self.mean)


def trains(make: Any) -> Any:
    def script() -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(*samples(8)), batch_size=BATCH)
        model, optimizer, loader = steepest.prepare(model, optimizer, loader)
        for _ in steepest.epochs(1):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()

    return script


def test_a_buffer_that_forward_passes_change_is_told() -> None:
    told = "a forward pass changes the buffer 'mean' by each worker's own samples alone"
    with pytest.warns(UserWarning, match=told) as warned:
        run(trains(Centred), 2)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(trains(Centred), 1)
        run(
            trains(
                lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
            ),
            2,
        )
