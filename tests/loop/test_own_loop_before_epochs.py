"""What a script sets between `prepare` and its epochs is what it trains with, in each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import LocalStrategy
from tests.own_loop_runs import STRATEGIES, Found, InterruptedRunError, Interrupts, run, without
from tests.own_loops import Parts, Script, plain
from tests.reference import Weights, difference, perceptron, samples
from tests.simulated_programs import quiet

WORKERS = 3
ROUNDS = LocalStrategy(sync_every=7)


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


class Scaled(nn.Module):
    """A perceptron whose outputs a buffer multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the perceptron does, multiplied."""
        found: torch.Tensor = self.layers(x) * self.scale
        return found


def groups(module: nn.Module) -> torch.optim.Optimizer:
    first, *others = module.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": others, "lr": 0.05}], lr=0.1)


def rates(parts: Parts) -> None:
    parts.optimizer.param_groups[1]["lr"] *= 0.1
    parts.optimizer.param_groups[0].update(momentum=0.5, weight_decay=0.1)


def freezes(parts: Parts) -> None:
    next(parts.model.parameters()).requires_grad_(requires_grad=False)


def fills_a_buffer(parts: Parts) -> None:
    parts.model.scale.fill_(0.5)  # type: ignore[operator, union-attr]


def steps_a_schedule(parts: Parts) -> None:
    vars(parts.optimizer)["_opt_called"] = True  # else torch would warn
    parts.schedulers[0].step()


def setting(change: Callable[[Parts], None], **more: Any) -> Script:
    def loop(parts: Parts, epochs: int) -> None:
        change(parts)
        plain(parts, epochs)

    return Script(loop, Scaled, groups, data=samples(13), epochs=2, **more)


def apart(found: Found, right: Weights) -> float:
    """How far a run's weights are from those of one process."""
    return difference({name: found.weights[name] for name in right}, right)


SCRIPTS = {
    "rates": setting(rates),
    "frozen": setting(freezes),
    "a buffer": setting(fills_a_buffer),
    "a schedule": setting(
        steps_a_schedule, schedule=lambda own: torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_set_before_the_epochs_counts(name: str, tmp_path: Path) -> None:
    script, strategy = SCRIPTS[name], STRATEGIES["ps"]
    right = script.alone(WORKERS)
    assert apart(run(script, WORKERS, strategy), right) < 1e-12
    assert apart(without(script, WORKERS, 1, 2, strategy), right) < 1e-12
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(script, WORKERS, strategy, checkpoints=checkpoints, callbacks=[Interrupts(2)])
    found = run(script, WORKERS, strategy, checkpoints=checkpoints)
    assert apart(found, right) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["allreduce", STRATEGIES["groups"], "simple", "async", ROUNDS])
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_counts_under_each_strategy(name: str, strategy: Any) -> None:
    """With one worker each of them is one process."""
    script = SCRIPTS[name]
    found = run(script, 1, strategy)
    assert apart(found, script.alone(1)) < 1e-12
