"""A layer that was frozen at first is trained from the step on before which it was unfrozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
)
from steepest.core.data.sampler import SamplePlan
from steepest.errors import ConfigurationError, ModelError
from steepest.testing import replay
from tests.reference import OptimizerFactory, Task, Weights, difference, samples, sgd, snapshot
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config

STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    AllreduceStrategy(chunk_bytes=32),
    LocalStrategy(sync_every=1),
    "simple",
]


def half_frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    net[0].requires_grad_(requires_grad=False)
    return net


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05)


def only_trained(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], 0.1, momentum=0.9)


TASK = Task(half_frozen, adam, samples(24), batch_size=3)


def unfreeze(model: Any) -> None:
    model.module[0].requires_grad_(requires_grad=True)


def serial(workers: int, before: int, after: int, optimizer: OptimizerFactory = adam) -> Weights:
    """Plain PyTorch; the optimizer is the same one before and after."""
    torch.manual_seed(0)
    net = half_frozen()
    chosen = optimizer(net)
    plan = SamplePlan(24, workers * 3, 0)
    for step in range(before + after):
        if step == before:
            net[0].requires_grad_(requires_grad=True)
            if optimizer is only_trained:
                chosen.add_param_group({"params": list(net[0].parameters())})
        index = torch.from_numpy(plan.share(step, 0, 1))
        chosen.zero_grad()
        nn.functional.mse_loss(net(TASK.data[0][index]), TASK.data[1][index]).backward()
        chosen.step()
    return snapshot(net)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(3)
@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("workers", [1, 3])
def test_an_unfrozen_layer_is_trained(workers: int, strategy: Any) -> None:
    """Weights are those of plain PyTorch, so that the other layers' optimizer state is kept."""
    local = isinstance(strategy, LocalStrategy)  # whose mean of workers is linear in gradients
    task = Task(half_frozen, sgd(momentum=0.9) if local else adam, TASK.data, batch_size=3)
    with (
        Simulation().running(),
        DistributedSGD(
            task.creator(), workers, strategy=strategy, run_config=run_config()
        ) as trainer,
    ):
        trainer.fit(steps=4, progress=False)
        trainer.foreach_model(unfreeze)
        trainer.fit(steps=6, progress=False)
        expected = serial(workers, 4, 6, task.optimizer)
        assert difference(trainer.weights(), expected) < 1e-12


def test_the_optimizer_is_asked_again() -> None:
    task = Task(half_frozen, only_trained, TASK.data, batch_size=3)
    with (
        Simulation().running(),
        DistributedSGD(task.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=4, progress=False)
        trainer.for_model(unfreeze)  # on one replica; the other one follows
        trainer.fit(steps=6, progress=False)
        assert difference(trainer.weights(), serial(2, 4, 6, only_trained)) < 1e-12


def test_what_the_optimizer_leaves_out_is_refused() -> None:
    def last_layer(module: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(module[2].parameters(), lr=0.1)

    task = Task(half_frozen, last_layer, TASK.data, batch_size=3)
    with (
        Simulation().running(),
        DistributedSGD(task.creator(), 2, run_config=run_config()) as trainer,
    ):
        before = trainer.weights()
        with pytest.raises(ModelError, match="'0.bias' was unfrozen, but optimizer= leaves it out"):
            trainer.foreach_model(unfreeze)
        trainer.fit(steps=2, progress=False)
        assert torch.equal(trainer.weights()["0.weight"], before["0.weight"])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["worker 1", "server 0"])
def test_a_successor_trains_it_too(name: str) -> None:
    """After a death, also one that sets the job back, nothing is frozen again."""
    simulation = Simulation()
    config = run_config(failure=FailureConfig(snapshot_every=1000))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, run_config=config) as trainer,
    ):
        trainer.fit(steps=4, progress=False)
        trainer.foreach_model(unfreeze)
        trainer.fit(steps=3, progress=False)
        (victim,) = (each for each in simulation.living() if name in str(each))
        simulation.world.kill(victim, "it was killed. connection error code 2.")
        trainer.fit(steps=3, progress=False)
        trainer.set_strategy("allreduce")
        assert trainer.stats().step == 10
        assert difference(trainer.weights(), serial(3, 4, 6)) < 1e-12
        assert trainer.stats().replaced == 1


def test_a_restored_trainer_goes_on_with_it(tmp_path: Path) -> None:
    """The checkpoint tells what was unfrozen: a resumed program does not come by that line again."""
    with Simulation().running():
        with DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer:
            trainer.fit(steps=4, progress=False)
            trainer.foreach_model(unfreeze)
            trainer.fit(steps=3, progress=False)
            trainer.save(tmp_path / "saved")
        with DistributedSGD(TASK.creator(), 3, run_config=run_config()) as trainer:
            trainer.restore(tmp_path / "saved")
            trainer.resize(2)
            trainer.fit(steps=3, progress=False)
            assert difference(trainer.weights(), serial(2, 4, 6)) < 1e-12


def test_a_log_over_an_unfreezing_is_not_replayed() -> None:
    task = Task(half_frozen, sgd(lr=0.1), TASK.data, batch_size=3)
    with (
        Simulation().running(),
        DistributedSGD(task.creator(), 2, run_config=run_config(keep_log=True)) as trainer,
    ):
        trainer.step()
        trainer.foreach_model(unfreeze)
        trainer.step()
        log = trainer.log()
    with pytest.raises(ConfigurationError):
        replay(log, task.creator())


def test_values_that_the_model_has_written_are_trained_on() -> None:
    """A momentum encoder that becomes trainable begins with what the model made of it."""

    def double(model: Any) -> None:
        with torch.no_grad():
            model.module[0].weight.mul_(2)

    with (
        Simulation().running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        before = trainer.weights()["0.weight"]
        trainer.foreach_model(double)
        trainer.foreach_model(unfreeze)
        assert torch.equal(trainer.weights()["0.weight"], 2 * before)
        trainer.step()
        assert not torch.equal(trainer.weights()["0.weight"], 2 * before)
