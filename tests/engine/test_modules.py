"""What users' modules do, under a parameter server as under allreduce, equals one process with the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steepest.core.engine.replica_states import mean_states
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster
from tests.engine.equivalence_tasks import Sometimes, all_but_fixed, batch_norm, states
from tests.modes import check, trained
from tests.reference import Task, Weights, difference, perceptron, same_bits, samples, sgd, snapshot

STEPS = 20
BOTH = pytest.mark.parametrize(
    "strategy",
    [ParameterServerStrategy(num_servers=2, chunk_bytes=64), AllreduceStrategy(chunk_bytes=64)],
    ids=["ps", "allreduce"],
)
WORKERS = pytest.mark.parametrize("workers", [2, 3])


def train(
    task: Task, strategy: ParameterServerStrategy | AllreduceStrategy, workers: int
) -> InProcessCluster:
    cluster = InProcessCluster(
        task.creator(), num_workers=workers, strategy=strategy, keep_log=True
    )
    trained(cluster, STEPS)
    check(cluster, task)
    return cluster


@pytest.mark.few(1)
@BOTH
@WORKERS
@pytest.mark.parametrize("count", [7, 13, 14, 19])
def test_uneven_inputs_at_the_end_of_an_epoch(
    strategy: ParameterServerStrategy | AllreduceStrategy, workers: int, count: int
) -> None:
    """Some workers have a smaller last batch, or none."""
    task = Task(
        optimizer=sgd(momentum=0.9),
        data=samples(count),
        metrics={"first": lambda output, target: target[:, 0].mean()},
    )
    cluster = InProcessCluster(task.creator(), num_workers=workers, strategy=strategy)
    plan = cluster.job.plan()
    assert plan is not None
    results = trained(cluster, STEPS)
    trace = task.trace(workers, STEPS)
    module = task.module()
    sizes = set()
    for step, result in enumerate(results):
        x, y = (column[torch.from_numpy(plan.share(step, 0, 1))] for column in task.data)
        module.load_state_dict(trace[step])
        assert result.samples == len(x)
        assert result.loss == pytest.approx(float(task.loss(module(x), y).detach()), abs=1e-12)
        assert result.metrics["first"] == pytest.approx(float(y[:, 0].mean()), abs=1e-12)
        sizes.add(len(x))
    assert len(sizes) == 2
    assert difference(cluster.weights(), trace[-1]) < 1e-12


def by_replica(
    task: Task, cluster: InProcessCluster
) -> tuple[Weights, list[dict[str, torch.Tensor]]]:
    """Serial training with a module for each worker, which has normalised its own share; their buffers."""
    workers, plan = len(cluster.workers), cluster.job.plan()
    assert plan is not None
    modules = []
    for _ in range(workers):
        torch.manual_seed(0)
        modules.append(task.module())
    optimizer = task.optimizer(modules[0])
    for step in range(STEPS):
        optimizer.zero_grad()
        whole = len(plan.share(step, 0, 1))
        for worker, module in enumerate(modules):
            module.load_state_dict({**module.state_dict(), **snapshot(modules[0])})
            index = torch.from_numpy(plan.share(step, worker, workers))
            x, y = (column[index] for column in task.data)
            loss = task.loss(module(x), y) * (len(index) / whole)
            own = list(module.parameters())
            for parameter, gradient in zip(
                modules[0].parameters(), torch.autograd.grad(loss, own), strict=True
            ):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.step()
    return snapshot(modules[0]), [dict(module.named_buffers()) for module in modules]


@pytest.mark.few(1)
@BOTH
@WORKERS
def test_buffers_are_each_replicas_own_until_they_are_averaged(
    strategy: ParameterServerStrategy | AllreduceStrategy, workers: int
) -> None:
    task = Task(batch_norm, sgd(momentum=0.9), samples(22), batch_size=4)
    cluster = train(task, strategy, workers)
    weights, buffers = by_replica(task, cluster)
    assert difference(cluster.weights(), weights) < 1e-12
    found = states(cluster)
    for mine, expected in zip(found, buffers, strict=True):
        assert mine.keys() == expected.keys()
        assert all(
            torch.allclose(mine[name], value, rtol=1e-12, atol=1e-14)
            for name, value in expected.items()
        )
    merged = mean_states(found, [1.0] * workers)
    for name in ("1.running_mean", "1.running_var"):
        assert not torch.equal(found[0][name], found[1][name])
        mean = torch.stack([buffer[name] for buffer in buffers]).mean(dim=0)
        assert torch.allclose(merged[name], mean, rtol=1e-12, atol=1e-14)
    assert merged["1.num_batches_tracked"] == STEPS


@pytest.mark.long
@BOTH
@WORKERS
def test_unused_and_frozen_parameters(
    strategy: ParameterServerStrategy | AllreduceStrategy, workers: int
) -> None:
    task = Task(
        Sometimes, all_but_fixed(torch.optim.AdamW, lr=0.01, weight_decay=0.1), batch_size=1
    )
    weights = train(task, strategy, workers).weights()
    trace = task.trace(workers, STEPS)
    assert difference(weights, trace[-1]) < 1e-12
    for name in ("never", "frozen", "fixed", "empty"):
        assert torch.equal(weights[name], trace[0][name]), name


class Saving(nn.Module):
    """Two parts whose activations are computed again in the backward pass, random numbers included."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part(), part()])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = nn.functional.pad(checkpoint(part, x, use_reentrant=False), (0, 1))
        return x[:, :2]


def compiled() -> nn.Module:
    return torch.compile(perceptron(), backend="eager")  # type: ignore[return-value]


@pytest.mark.long
@pytest.mark.few(1)
@BOTH
@WORKERS
@pytest.mark.parametrize(
    "module",
    [compiled, lambda: Saving(perceptron)],
    ids=["torch.compile", "activation checkpointing"],
)
def test_modules_that_run_in_other_ways(
    strategy: ParameterServerStrategy | AllreduceStrategy,
    workers: int,
    module: Callable[[], nn.Module],
) -> None:
    task = Task(module, sgd(momentum=0.9))
    cluster = train(task, strategy, workers)
    serial = task.train(workers, STEPS).items()
    plain = {name.replace("_orig_mod.", ""): value for name, value in serial}
    assert difference(cluster.weights(), plain) < 1e-12


@pytest.mark.long
@pytest.mark.few(1)
@BOTH
@WORKERS
def test_dropout_in_a_checkpointed_part_is_computed_again_alike(
    strategy: ParameterServerStrategy | AllreduceStrategy, workers: int
) -> None:
    def part() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))

    class Plain(Saving):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.parts:
                x = nn.functional.pad(layer(x), (0, 1))
            return x[:, :2]

    task = Task(lambda: Saving(part), lambda module: torch.optim.Adam(module.parameters(), lr=0.01))
    saving = train(task, strategy, workers)
    plain = train(replace(task, module=lambda: Plain(part)), strategy, workers)
    assert same_bits(saving.weights(), plain.weights())
