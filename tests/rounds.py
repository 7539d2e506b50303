"""Jobs whose workers train by themselves, and what they are compared with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from steepest import DistributedSGD, FailureConfig
from steepest.core.engine.commit_log import CommitLog
from steepest.core.messages.driver import Result
from steepest.strategies.local import LocalStrategy
from steepest.testing import InProcessCluster
from tests.reference import OptimizerFactory, Task, Weights, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "momentum": sgd(momentum=0.9, nesterov=True),
    "adam": lambda module: torch.optim.Adam(module.parameters(), lr=0.01),
}
#: The fragments of `deep`, in the order in which they are exchanged.
FRAGMENTS = {
    1: [["6.bias", "6.weight", "4.bias", "4.weight", "2.bias", "2.weight", "0.bias", "0.weight"]],
    2: [
        ["6.bias", "6.weight", "4.bias", "4.weight"],
        ["2.bias", "2.weight", "0.bias", "0.weight"],
    ],
    3: [
        ["6.bias", "6.weight"],
        ["4.bias", "4.weight", "2.bias", "2.weight"],
        ["0.bias", "0.weight"],
    ],
    4: [
        ["6.bias", "6.weight"],
        ["4.bias", "4.weight"],
        ["2.bias", "2.weight"],
        ["0.bias", "0.weight"],
    ],
}


def deep() -> nn.Module:
    """Four layers of equally many parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def deep_task(optimizer: str, count: int = 50) -> Task:
    data = samples(count, outputs=3)
    return Task(deep, OPTIMIZERS[optimizer], data, batch_size=2)


class Outer:
    """The outer optimizer, as the paper of delayed Nesterov writes it or torch's SGD."""

    def __init__(self, module: nn.Module, strategy: LocalStrategy) -> None:
        self.parameters, self.strategy = list(module.parameters()), strategy
        momentum, nesterov = strategy.outer_momentum, strategy.nesterov
        self.sgd = torch.optim.SGD(
            module.parameters(), strategy.outer_lr, momentum=momentum, nesterov=nesterov
        )
        self.updates = 0
        self.buffered = [torch.zeros_like(p) for p in self.parameters]
        self.moved = [torch.zeros_like(p) for p in self.parameters]

    @torch.no_grad()
    def step(self, changes: list[torch.Tensor]) -> None:
        every, rate = self.strategy.delayed_nesterov, self.strategy.outer_lr
        if every is None:
            for p, change in zip(self.parameters, changes, strict=True):
                p.grad = change
            self.sgd.step()
            return
        self.updates += 1
        for at, (p, change) in enumerate(zip(self.parameters, changes, strict=True)):
            self.buffered[at] += change
            update = change / every
            if self.updates % every == 0:
                self.moved[at] = (
                    self.strategy.outer_momentum * self.moved[at] + self.buffered[at] / every
                )
                update = update + self.strategy.outer_momentum * self.moved[at]
                self.buffered[at].zero_()
            p -= rate * update


def run_rounds(
    task: Task, workers: int, steps: int, strategy: LocalStrategy, **options: Any
) -> InProcessCluster:
    options = {"keep_log": True, **options}
    cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=strategy, **options)
    results = cluster.step(steps)
    assert [type(result) for result in results] == [Result] * steps
    assert [result.step for result in results] == list(range(1, steps + 1))
    return cluster


def simulated(
    task: Task,
    workers: int,
    strategy: LocalStrategy,
    act: Callable[[DistributedSGD, Simulation], object],
    creator: Any = None,
    seed: int = 1,
) -> tuple[Weights, CommitLog]:
    """The weights and the log after what a user does, on virtual time."""
    simulation = Simulation(seed)
    config = run_config(keep_log=True, failure=FailureConfig(patience=math.inf))
    with (
        quiet(),
        simulation.running(),
        DistributedSGD(
            creator or task.creator(), workers, strategy=strategy, run_config=config
        ) as trainer,
    ):
        act(trainer, simulation)
        return trainer.weights(), trainer.log()


def timed(task: Task, seconds: Sequence[float], clock: Callable[[], float]) -> Any:
    """A model creator whose worker i takes so long for a batch, and by worker when each batch has ended."""
    ends: list[list[float]] = [[] for _ in seconds]

    def create(worker_index: int, device_index: int) -> Any:
        def take_time(*_: Any) -> None:
            pause(seconds[worker_index])
            ends[worker_index].append(clock())

        model = task.creator()(worker_index, device_index)
        model.module.register_forward_hook(take_time)
        return model

    return create, ends
