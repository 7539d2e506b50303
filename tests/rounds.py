"""Jobs whose workers train by themselves, and what they are compared with."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from steepest import DistributedSGD, FailureConfig
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import CommitLog
from steepest.core.messages.driver import Result
from steepest.core.tensors.layout import ParameterLayout
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


def deep(width: int = 3, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Four layers of equally many parameters."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)


def deep_task(optimizer: str, count: int = 50) -> Task:
    data = samples(count, outputs=3)
    return Task(deep, OPTIMIZERS[optimizer], data, batch_size=2)


def wide_task(optimizer: str, count: int = 50) -> Task:
    """The same in float32 and with as many weights in a layer as are worth compressing."""
    data = samples(count, inputs=24, outputs=24, dtype=torch.float32)
    return Task(lambda: deep(24, torch.float32), OPTIMIZERS[optimizer], data, batch_size=2)


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
    def step(self, changes: Sequence[torch.Tensor | None]) -> None:
        """Take each parameter's mean change; None: it is of no fragment that was exchanged."""
        every, rate = self.strategy.delayed_nesterov, self.strategy.outer_lr
        if every is None:
            for p, change in zip(self.parameters, changes, strict=True):
                p.grad = change
            self.sgd.step()
            return
        self.updates += 1
        for at, (p, change) in enumerate(zip(self.parameters, changes, strict=True)):
            assert change is not None
            self.buffered[at] += change
            update = change / every
            if self.updates % every == 0:
                self.moved[at] = (
                    self.strategy.outer_momentum * self.moved[at] + self.buffered[at] / every
                )
                update = update + self.strategy.outer_momentum * self.moved[at]
                self.buffered[at].zero_()
            p -= rate * update


class Life:
    """One life of a worker: its weights, what it began from, and the samples since it pushed each fragment."""

    def __init__(self, task: Task, weights: list[torch.Tensor], fragments: int) -> None:
        self.module = task.module()
        self.optimizer = task.optimizer(self.module)
        self.since, self.sent = [0] * fragments, -1
        self.base = weights
        with torch.no_grad():
            for p, value in zip(self.module.parameters(), weights, strict=True):
                p.copy_(value)

    @torch.no_grad()
    def take_in(self, now: list[torch.Tensor], parts_of: list[int], blend: float) -> None:
        """Go on with what became of what was pushed, and with what others have changed of the rest."""
        for p, old, new, of in zip(self.module.parameters(), self.base, now, parts_of, strict=True):
            p.copy_(new + (p - new) * blend if of == self.sent else p + (new - old))
        self.base = now


class Sent:
    """What all workers have been sent of the weights: the changes, in the form of a codec."""

    def __init__(self, layout: ParameterLayout, strategy: LocalStrategy, weights: Weights) -> None:
        codec = strategy.pull_codec
        assert codec is not None
        self.layout, self.codec, self.flat = layout, codec, layout.allocate()
        layout.write(self.flat, weights)

    def after(self, weights: Weights, fragments: set[int]) -> Weights:
        new = self.layout.allocate()
        self.layout.write(new, weights)
        for chunk in self.layout.chunks:
            if chunk.fragment in fragments:
                old, now = (
                    self.layout.chunk_view(vector, chunk.index).view(torch.float32)
                    for vector in (self.flat, new)
                )
                packed = torch.empty(self.codec.size(self.layout, chunk), dtype=torch.uint8)
                self.codec.pack(self.layout, chunk, now - old, packed, {})
                self.codec.add(self.layout, chunk, [(packed, 1.0)], old)
        return self.layout.named(self.flat)


def by_hand(
    task: Task, log: CommitLog, strategy: LocalStrategy, layout: ParameterLayout | None = None
) -> Weights:
    """The rounds of a log in plain torch, one change after the other; a worker's later lives begin anew.

    Where weights are compressed, workers are sent the changes in the chunks of `layout`.
    """
    workers, devices = log.num_workers, log.devices_per_worker
    every, count = strategy.sync_every // strategy.fragments, strategy.fragments
    torch.manual_seed(0)
    shared = task.module()
    outer = Outer(shared, strategy)
    names = [name for name, _ in shared.named_parameters()]
    found_of = [names] if count == 1 else FRAGMENTS[count]
    part_of = {name: part for part, found in enumerate(found_of) for name in found}
    parts_of = [part_of[name] for name in names]
    weights = [p.detach().clone() for p in shared.parameters()]
    history = {log.start: weights}
    sent = (
        None if layout is None else Sent(layout, strategy, dict(zip(names, weights, strict=True)))
    )
    lives: dict[tuple[int, int], Life] = {}
    parts = workers * devices * every
    of_step = workers * every if strategy.pace == "speed" else workers  # shares
    of_share = 1 if strategy.pace == "speed" else every  # updates
    plan = SamplePlan(len(task.data[0]), parts * task.batch_size, 0)
    for commit in log.commits:
        if commit.skipped:
            history[commit.version] = weights
            continue
        changes, totals = [torch.zeros_like(p) for p in shared.parameters()], [0.0] * count
        for push in commit.pushes:
            now = history[push.pulled]
            life = lives.setdefault(push[:2], Life(task, now, count))  # type: ignore[arg-type]
            takes_in_at = strategy.delay
            if strategy.pace == "speed":  # in proportion
                takes_in_at = min(-(-strategy.delay * push.length // every), push.length - 1)
            for at, (share, update) in enumerate(itertools.product(push.shares, range(of_share))):
                if at == takes_in_at:
                    life.take_in(now, parts_of, strategy.blend)
                step, place = divmod(share, of_step)
                index = [
                    plan.share(step, (place * devices + device) * of_share + update, parts)
                    for device in range(devices)
                ]
                samples = sum(map(len, index))
                if not samples:
                    continue
                if task.learning_rate is not None:  # of as many updates as each worker makes
                    at = step * every + (place // workers if of_share == 1 else update)
                    life.optimizer.param_groups[0]["lr"] = task.learning_rate(at)
                life.optimizer.zero_grad()
                for some in filter(len, index):
                    x, y = (column[torch.from_numpy(some.copy())] for column in task.data)
                    (task.loss(life.module(x), y) * (len(some) / samples)).backward()
                life.optimizer.step()
                life.since = [each + samples for each in life.since]
            part = push.fragment
            for change, p, base, of in zip(
                changes, life.module.parameters(), now, parts_of, strict=True
            ):
                if of == part:
                    change += (base - p.detach()) * life.since[part]
            totals[part] += life.since[part]
            life.since[part], life.sent = 0, part
        if any(totals):
            outer.step(
                [
                    change / totals[of] if totals[of] else None
                    for change, of in zip(changes, parts_of, strict=True)
                ]
            )
        weights = [p.detach().clone() for p in shared.parameters()]
        history[commit.version] = weights
        if sent is not None:
            changed = {push.fragment for push in commit.pushes}
            found = sent.after(dict(zip(names, weights, strict=True)), changed)
            history[commit.version] = [found[name].clone() for name in names]
    return dict(zip(names, weights, strict=True))


def check_samples(log: CommitLog) -> None:
    seen = Counter(at for part in log.samples() for at in [(part[0], n) for n in range(*part[1:])])
    assert set(seen.values()) == {1}


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
