"""Parameters that a user's own loop freezes and unfreezes while it trains, as in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import FailureConfig
from steepest.core.tensors.layout import ChunkSpec
from steepest.loop.model import LoopModel
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import Parts, Script
from tests.reference import difference, perceptron, samples
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def half_frozen() -> nn.Module:
    net = perceptron()
    next(net.children()).requires_grad_(requires_grad=False)
    return net


def by_turns(parts: Parts, epochs: int) -> None:
    """The first layer is trained from epoch 1 on, and the last one not in epoch 2; both changes once only."""
    layers = list(parts.model.children())
    for epoch in steepest.epochs(epochs):
        if epoch in (1, 2):
            layers[0].requires_grad_(requires_grad=True)
            layers[-1].requires_grad_(requires_grad=epoch == 1)
        for x, y in parts.loader:
            pause(1e-3)
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


def amid_an_epoch(parts: Parts, epochs: int) -> None:
    """The first layer is trained from the second batch of epoch 1 on, and not in epoch 2."""
    layers = list(parts.model.children())
    for epoch in steepest.epochs(epochs):
        layers[0].requires_grad_(requires_grad=epoch > 2)
        for number, (x, y) in enumerate(parts.loader):
            pause(1e-3)
            parts.optimizer.zero_grad()
            if epoch == 1 and number == 1:
                layers[0].requires_grad_(requires_grad=True)
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()


SCRIPTS = {
    "by turns": Script(by_turns, half_frozen, adam, data=samples(24), epochs=4),
    "amid an epoch": Script(amid_an_epoch, half_frozen, adam, data=samples(24), epochs=4),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_layers_are_frozen_and_unfrozen(script: str, workers: int) -> None:
    found = run(SCRIPTS[script], workers)
    assert difference(found.weights, SCRIPTS[script].alone(workers)) < 1e-12


@pytest.mark.parametrize("strategy", ["allreduce", "simple"])
def test_with_other_strategies(strategy: str) -> None:
    script = SCRIPTS["by turns"]
    assert difference(run(script, 2, strategy).weights, script.alone(2)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("step", [6, 13])
def test_a_successor_trains_the_same(strategy: str, step: int) -> None:
    """Also where it begins behind the lines that freeze."""
    script = SCRIPTS["by turns"]
    found = without(script, 3, 1, step, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(3)) < 1e-12


def struck(
    strategy: str,
    died: str,
    patch: Callable[[pytest.MonkeyPatch, Callable[[], None]], None],
    patience: float = math.inf,
) -> None:
    """Run a script that unfreezes layers, of which a process dies, when `patch` says, and compare with one process."""
    script, simulation = SCRIPTS["by turns"], Simulation(seed=1)
    struck: list[bool] = []

    def strike() -> None:
        if not struck:
            struck.append(True)
            (victim,) = (each for each in simulation.living() if died in str(each))
            simulation.world.kill(victim, "it was killed. connection error code 2.")

    with pytest.MonkeyPatch.context() as patched, simulation.running():
        patch(patched, strike)
        found = steepest.run(
            script,
            num_workers=3,
            strategy=STRATEGIES[strategy],
            run_config=run_config(failure=FailureConfig(patience=patience, snapshot_every=3)),
            progress=False,
        )
        assert struck
        weights = dict(found.state_dict)
    assert difference(weights, script.alone(3)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("died", ["worker 1", "worker 2"])
def test_a_worker_dies_while_what_is_unfrozen_becomes_trained(died: str, strategy: str) -> None:
    look = LoopModel.unfrozen

    def patch(patched: pytest.MonkeyPatch, strike: Callable[[], None]) -> None:
        def striking(model: LoopModel) -> frozenset[str]:
            found = look(model)
            if found:
                strike()
            return found

        patched.setattr(LoopModel, "unfrozen", striking)

    struck(strategy, died, patch)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("died", ["worker 0", "worker 1"])
def test_a_worker_dies_while_models_begin_to_train_it(died: str, strategy: str) -> None:
    """The job goes on as it was, with models that train more than before: successors do, too."""
    relayout = LoopModel.relayout

    def patch(patched: pytest.MonkeyPatch, strike: Callable[[], None]) -> None:
        def striking(model: LoopModel, cut: ChunkSpec) -> None:
            relayout(model, cut)
            if cut.unfrozen:
                strike()

        patched.setattr(LoopModel, "relayout", striking)

    struck(strategy, died, patch, patience=1.0)


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("step", [7, 20])
def test_a_checkpoint_tells_what_is_frozen(step: int, tmp_path: Any) -> None:
    script, checkpoints = SCRIPTS["by turns"], steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(script, 2, checkpoints=checkpoints, callbacks=[Interrupts(step)])
    assert difference(run(script, 2, checkpoints=checkpoints).weights, script.alone(2)) < 1e-12
