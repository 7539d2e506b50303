"""Gradients go through what loops of users' own gather; and nobody waits for a worker that does not come by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import DeadlineConfig
from steepest.errors import DeadlineError
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import Parts, Script
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import pause, run_config


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def contrastive(parts: Parts, epochs: int) -> None:
    """Each sample is compared with all of the whole batch, as SimCLR does; then all with all."""
    scale = parts.model[0].weight
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            pause(1e-3)
            own = parts.model(x)
            found = steepest.gather({"all": own, "targets": y, "mean": own.mean() * len(x)})
            everything, targets = found["all"], found["targets"]
            errors = own @ everything.T - y @ targets.T
            mean = found["mean"].sum() / (len(everything) * own.shape[1])
            loss = errors.square().mean() + everything.std(dim=0, correction=0).sum() * mean
            (loss + 0.1 * scale.square().sum()).backward()
            parts.optimizer.step()


def several(parts: Parts, epochs: int) -> None:
    """The same with two steps for a batch, and weights by hand."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            for _ in range(2):
                parts.optimizer.zero_grad()
                own = parts.model(x)
                steepest.weight(3.0 * len(x))
                everything, targets = steepest.gather((own, y))
                (own @ everything.T - y @ targets.T).square().mean().backward()
                parts.optimizer.step()


CONTRASTIVE = Script(contrastive, optimizer=sgd(lr=0.02, momentum=0.5))
SEVERAL = Script(several, optimizer=sgd(lr=0.02, momentum=0.5), any_steps=True, data=samples(12))


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("script", [CONTRASTIVE, SEVERAL], ids=["one step", "several"])
def test_gradients_are_those_of_one_process(script: Script, workers: int) -> None:
    """The last batch is not full: a worker has fewer samples, or none."""
    assert difference(run(script, workers).weights, script.alone(workers)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
def test_a_worker_dies(strategy: str) -> None:
    script = Script(contrastive, optimizer=sgd(lr=0.02, momentum=0.5), epochs=5)
    found = without(script, 3, 1, 6, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(3)) < 1e-12


def test_what_needs_no_gradient_has_none() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert steepest.gather(x) is x
    with torch.no_grad():
        assert not steepest.gather(x).requires_grad
    assert not steepest.gather(x.detach()).requires_grad


def now_and_then(parts: Parts, epochs: int) -> None:
    """Gathers in the last step of epochs alone, which not all workers see; later in all steps."""
    for epoch in steepest.epochs(epochs):
        seen = 0
        for number, (x, y) in enumerate(parts.loader):
            parts.optimizer.zero_grad()
            loss = nn.functional.mse_loss(parts.model(x), y)
            if number == 3 or epoch == 2:
                seen += len(steepest.gather(y))
            loss.backward()
            parts.optimizer.step()
            if number == 3:
                seen += int(steepest.gather(len(x)).sum())
        # where worker 1 sees that step, its samples count after it alone
        assert seen in ([0, 2] if epoch == 0 else [2, 4] if epoch == 1 else [14, 16])


def test_a_worker_that_misses_a_step_is_not_awaited() -> None:
    script = Script(now_and_then)
    assert difference(run(script, 2).weights, script.alone(2)) < 1e-12


def by_one(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            if steepest.rank() == 0:
                steepest.gather(len(x))
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


def test_a_worker_that_gathers_alone_is_named_with_its_line() -> None:
    late: Any = run_config(deadlines=DeadlineConfig(step=20.0))
    with pytest.raises(DeadlineError, match="still waiting for worker 0") as raised:
        run(Script(by_one), 2, run_config=late)
    assert "steepest.gather(len(x))" in str(raised.value.__cause__)
