"""A task whose checkpoints are kept, the steps of those kept, and the weights of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from steepest.checkpoint.directory import CheckpointDirectory
from steepest.strategies.named import as_strategy
from steepest.testing import InProcessCluster
from tests.reference import Task, samples

#: with momentum, random state and epochs of 4 steps, of which the last is shorter, for two workers
TASK = Task(
    lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)).double(),
    lambda module: torch.optim.Adam(module.parameters(), lr=0.01),
    samples(13),
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99),
)


def kept(path: Path) -> list[int]:
    """The steps of the checkpoints there, the oldest first."""
    return [int(found.name.rpartition("-")[2]) for found in CheckpointDirectory(path, 1).paths()]


def undisturbed(steps: int, workers: int = 1, strategy: str = "ps") -> dict[str, torch.Tensor]:
    cluster = InProcessCluster(TASK.creator(), num_workers=workers, strategy=as_strategy(strategy))
    cluster.step(steps)
    return cluster.weights()
