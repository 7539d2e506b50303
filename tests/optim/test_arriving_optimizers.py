"""Optimizers that arrive with state, as of `load_state_dict`, go on from it under every strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    LocalStrategy,
    ParameterServerStrategy,
    SimpleStrategy,
)
from steepest.core.data.sampler import SamplePlan
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster
from steepest.testing.log_replay import replay
from tests.reference import Task, Weights, difference, same_bits, samples, snapshot
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.unusual_optimizers import Preconditioned, Prodigy

STRATEGIES: list[tuple[Any, int]] = [
    (ParameterServerStrategy(num_servers=1), 2),
    (ParameterServerStrategy(num_servers=3, chunk_bytes=64), 2),
    (AllreduceStrategy(chunk_bytes=64), 3),
    (ParameterServerStrategy(mode="async", num_servers=2, chunk_bytes=64), 1),
    (LocalStrategy(sync_every=1, chunk_bytes=64), 1),
    (SimpleStrategy(), 2),
]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def adam(module: Any) -> torch.optim.Optimizer:
    groups = [{"params": module[2].parameters(), "lr": 0.02}, {"params": module[0].parameters()}]
    return torch.optim.Adam(groups, lr=0.05, amsgrad=True)


def two(module: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD(module[0].parameters(), 0.1, momentum=0.9, nesterov=True),
        Preconditioned(module[2].parameters()),
    ]


KINDS: dict[str, Callable[[Any], Any]] = {
    "adam": adam,
    "muon": lambda m: torch.optim.Muon([m[0].weight, m[2].weight], lr=0.02),
    "prodigy": lambda m: Prodigy(m.parameters()),
    "two": two,
}


@dataclass
class Continued:
    """Ten steps of plain torch, as a task that goes on from them, and what it comes to."""

    task: Task
    expected: Weights


def continued(make: Callable[[Any], Any], steps: int, batch: int) -> Continued:
    """A task that loads what ten steps of plain torch left, and its weights after more steps."""
    torch.manual_seed(3)
    data, module = samples(24), network()
    made = make(module)
    optimizers = made if isinstance(made, list) else [made]
    x, y = data

    def step(index: torch.Tensor) -> None:
        module.zero_grad()
        nn.functional.mse_loss(module(x[index]), y[index]).backward()
        for each in optimizers:
            each.step()

    for _ in range(10):
        step(torch.randperm(24)[:6])
    saved = copy.deepcopy((module.state_dict(), [each.state_dict() for each in optimizers]))
    attributes = [getattr(each, "steps", None) for each in optimizers]

    def again() -> nn.Module:
        new = network()
        new.load_state_dict(saved[0])
        return new

    def factory(new: nn.Module) -> Any:
        found = make(new)
        several = found if isinstance(found, list) else [found]
        for each, state, count in zip(several, saved[1], attributes, strict=True):
            each.load_state_dict(copy.deepcopy(state))
            if count is not None:
                each.steps = count
        return found

    task = Task(again, factory, data, batch_size=batch)
    plan = SamplePlan(24, 6, 0)
    for at in range(steps):
        step(torch.from_numpy(plan.share(at, 0, 1)))
    return Continued(task, snapshot(module))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", KINDS)
def test_they_go_on_as_in_one_process(name: str) -> None:
    for strategy, workers in STRATEGIES:
        job = continued(KINDS[name], 5, 6 // workers)
        cluster = InProcessCluster(job.task.creator(), num_workers=workers, strategy=strategy)
        cluster.step(5)
        assert difference(cluster.weights(), job.expected) < 1e-12, strategy


@pytest.mark.long
def test_their_state_is_taken_over_once(tmp_path: Path) -> None:
    """On whole jobs: the state is in checkpoints, and none of it comes back after a change."""
    job = continued(two, 9, 6)
    with quiet(), Simulation().running():
        for strategy, workers in (STRATEGIES[1], STRATEGIES[2], *STRATEGIES[-2:]):
            config = replace(run_config(), keep_log=True)
            with DistributedSGD(
                job.task.creator(),
                workers,
                strategy=strategy,
                global_batch_size=6,
                run_config=config,
            ) as trainer:
                trainer.save(tmp_path / "begun")
                trainer.fit(steps=3, progress=False)
                if workers > 1:
                    trainer.resize(workers + 1)
                trainer.fit(steps=2, progress=False)
                trainer.set_strategy(AllreduceStrategy(chunk_bytes=32))
                trainer.fit(steps=4, progress=False)
                assert difference(trainer.weights(), job.expected) < 1e-12, strategy
        with DistributedSGD(
            job.task.creator(), 2, global_batch_size=6, run_config=run_config()
        ) as trainer:
            trainer.fit(steps=1, progress=False)
            trainer.restore(tmp_path / "begun")
            trainer.fit(steps=9, progress=False)
            assert difference(trainer.weights(), job.expected) < 1e-12


def test_a_replay_begins_with_their_state() -> None:
    job = continued(adam, 4, 3)
    cluster = InProcessCluster(job.task.creator(), num_workers=2, keep_log=True)
    cluster.step(4)
    assert same_bits(replay(cluster.log(), job.task.creator()), cluster.weights())


def test_state_of_frozen_parameters_is_left_out() -> None:
    def frozen() -> nn.Module:
        module = again()
        module[0].requires_grad_(False)  # type: ignore[index]
        return module

    job = continued(adam, 0, 6)
    again = job.task.module
    model = replace(job.task, module=frozen).creator()(0, 0)
    assert {name.partition("/")[0] for name in model.optimizer_state.state} == {
        "2.weight",
        "2.bias",
    }


def test_state_of_other_parameters_is_refused() -> None:
    def mixed_up(module: Any) -> torch.optim.Optimizer:
        first = torch.optim.Adam([module[0].weight])
        module[0].weight.grad = torch.ones_like(module[0].weight)
        first.step()
        second = torch.optim.Adam([module[2].weight])
        second.load_state_dict(first.state_dict())
        return second

    with pytest.raises(ConfigurationError, match=r"Adam arrives with 'exp_avg' of '2.weight', of"):
        Task(network, mixed_up).creator()(0, 0)
