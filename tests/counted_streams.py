"""Streams of numbered samples, and a model whose weights count how often each sample was committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from steepest import TorchModel
from steepest.core.engine.job import ModelCreator
from tests.reference import sgd

LENGTH = 24  # divides by the samples of a step of 1, 2 or 3 workers
BATCH = 4


class Recorded:
    """Makes streams of (number, zero), and tells where they were begun and what was read."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.begun: list[int] = []
        self.read: list[int] = []

    def __call__(self, start: int) -> Iterator[tuple[int, int]]:
        self.begun.append(start)
        for number in range(start, self.length):
            self.read.append(number)
            yield number, 0


class Visits(nn.Module):
    """With a learning rate of as many samples as an update has, a sample's weight counts how often it was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = nn.Parameter(torch.zeros(LENGTH, dtype=torch.float64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.visits[numbers]


def negative_mean(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -output.mean()


def counting(data: Callable[[], Any], samples: int) -> ModelCreator:
    """Models that count visits in updates of so many samples."""

    def create(worker_index: int, device_index: int) -> TorchModel:
        optimizer = sgd(lr=samples)
        return TorchModel(
            Visits(), loss=negative_mean, data=data(), batch_size=BATCH, optimizer=optimizer
        )

    return create
