"""Optimizers whose step evaluates the loss several times, in loops of users' own: as in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest.errors import ConfigurationError, ModelRaisedError
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import Parts, Script
from tests.reference import Weights, difference, samples
from tests.simulated_programs import quiet
from tests.simulation.run import pause


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


LOSSES: list[float] = []


def loop(parts: Parts, epochs: int) -> None:
    """Several evaluations for each step, by the loss of the whole batch."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                pause(1e-4)
                parts.optimizer.zero_grad()
                loss = nn.functional.mse_loss(parts.model(x), y)
                loss.backward()
                return loss

            LOSSES.append(torch.as_tensor(parts.optimizer.step(closure)).item())
            for scheduler in parts.schedulers:
                scheduler.step()


def lbfgs(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        module.parameters(), lr=0.5, max_iter=4, history_size=5, line_search_fn="strong_wolfe"
    )


def without_search(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3, history_size=3)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


SCRIPTS = {
    "strong wolfe": Script(loop, optimizer=lbfgs, schedule=falling, epochs=2),
    "fixed": Script(loop, optimizer=without_search, schedule=falling, epochs=2),
    "several steps": Script(loop, optimizer=without_search, epochs=2, data=samples(12)),
}
TOLERANCE = 1e-7  # a rounding grows with each evaluation


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", SCRIPTS)
def test_steps_are_those_of_one_process(name: str, workers: int) -> None:
    """With batches that are not full too, where a worker has fewer samples, or none."""
    script = SCRIPTS[name]
    expected = script.alone(workers)
    losses = LOSSES[:]
    LOSSES.clear()
    assert difference(run(script, workers).weights, expected) < TOLERANCE
    assert {round(each, 6) for each in LOSSES} <= {round(each, 6) for each in losses}
    LOSSES.clear()


@pytest.mark.parametrize("strategy", ["allreduce", "simple"])
def test_with_other_strategies(strategy: str) -> None:
    script = SCRIPTS["fixed"]
    assert difference(run(script, 2, strategy).weights, script.alone(2)) < TOLERANCE


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("step", [2, 4])
def test_a_successor_has_the_same_history(strategy: str, step: int) -> None:
    script = Script(loop, optimizer=without_search, schedule=falling, epochs=3)
    found = without(script, 3, 1, step, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(3)) < TOLERANCE


@pytest.mark.full
def test_a_resumed_program_goes_on_with_its_history(tmp_path: Path) -> None:
    script, checkpoints = SCRIPTS["fixed"], steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(script, 2, checkpoints=checkpoints, callbacks=[Interrupts(3)])
    found: Weights = run(script, 2, checkpoints=checkpoints).weights
    assert difference(found, script.alone(2)) < TOLERANCE


def clipping(parts: Parts, epochs: int) -> None:
    for _ in steepest.epochs(epochs):
        for _ in parts.loader:
            steepest.clip_grad_norm_(parts.model.parameters(), 1.0)


def test_what_cannot_be_is_told_in_words() -> None:
    with pytest.raises(ModelRaisedError, match="an optimizer whose step.. needs a closure"):
        run(Script(clipping, optimizer=lbfgs), 2)
    with pytest.raises((ModelRaisedError, ConfigurationError), match="LBFGS, whose step.. needs a"):
        run(SCRIPTS["fixed"], 2, "async")
