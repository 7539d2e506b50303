"""Tasks whose training must equal one process with the whole batch, and the run to compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from steepest.testing import InProcessCluster
from tests.reference import Task, samples, sgd


def two_groups(module: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in module.parameters() if p.ndim > 1]
    biases = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}]
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)


TASKS = {
    "sgd": Task(),
    "momentum": Task(optimizer=sgd(momentum=0.9, weight_decay=0.01)),
    "nesterov": Task(optimizer=sgd(lr=0.05, momentum=0.9, nesterov=True)),
    "adam": Task(optimizer=lambda module: torch.optim.Adam(module.parameters(), lr=0.01)),
    "adamw-groups-schedule": Task(optimizer=two_groups, lr_scheduler=cosine),
    "learning-rate-function": Task(
        optimizer=sgd(momentum=0.9), learning_rate=lambda step: 0.1 / (1 + step)
    ),
}


def run(
    task: Task, steps: int, workers: int = 1, devices: int = 1, **settings: Any
) -> InProcessCluster:
    cluster = InProcessCluster(
        task.creator(), num_workers=workers, devices_per_worker=devices, **settings
    )
    results = cluster.step(steps)
    assert [result.version for result in results] == list(range(1, steps + 1))
    return cluster


def weighted_mse(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The target's last column weighs the samples."""
    weight = target[:, -1]
    losses = ((output - target[:, :-1]) ** 2).mean(dim=1)
    return (losses * weight).sum() / weight.sum(), float(weight.sum())


def weighted_samples(weights: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = samples(len(weights))
    return x, torch.cat([y, torch.tensor(weights, dtype=torch.float64)[:, None]], dim=1)


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double()


class Sometimes(nn.Module):
    """`extra` is used by samples with a large first feature, `never` by none, `frozen` and `fixed` by all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2).double()
        self.extra = nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.fixed = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.empty = nn.Parameter(torch.ones(0, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x) * self.frozen + self.fixed + self.empty.sum()
        chosen = x[:, 0] > 0.9
        return output + (x * chosen[:, None]) @ self.extra if chosen.any() else output


def all_but_fixed(kind: Any, **settings: Any) -> Any:
    return lambda module: kind(
        [p for name, p in module.named_parameters() if name != "fixed"], **settings
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3).double()
        self.decode = nn.Linear(3, 3).double()
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decode(torch.tanh(self.encode(x))))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def states(cluster: InProcessCluster) -> list[dict[str, torch.Tensor]]:
    futures = [
        worker.at_version(
            0, cluster.coordinator.version, lambda replicas: [m.state() for m in replicas.models]
        )
        for worker in cluster.workers
    ]
    return [state for future in futures for state in cluster.wait(future, "the buffers")]
