"""Models for the tests of GPUs, which plain processes import, and what these tests share."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steepest.core.models.torch import TorchModel

#: Where the tests compute: on a GPU, or on the CPU where STEEPEST_GPU_TESTS=cpu tries the tests themselves out.
DEVICE = os.environ.get("STEEPEST_GPU_TESTS", "cuda")
WIDTH = 700  # several chunks of half a megabyte


def data(count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs (count, 20) and classes (count,), on the CPU."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(count, 20, generator=generator)
    return x, (x.sum(1) > 0).long()


def network() -> nn.Module:
    """Return a network in single precision, with a dropout and buffers."""
    return nn.Sequential(
        nn.Linear(20, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH),
        nn.Tanh(), nn.Linear(WIDTH, 2),
    )  # fmt: skip


def plain() -> nn.Module:
    """Return a network in double precision, without chance and buffers."""
    return nn.Sequential(nn.Linear(20, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()


def model(net: nn.Module, **settings: Any) -> TorchModel:
    """Return a model of `data`."""
    x, y = data()
    x = x.to(next(net.parameters()).dtype)
    return TorchModel(
        net, loss=F.cross_entropy, data=(x, y), batch_size=8,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), **settings,
    )  # fmt: skip


def classifier(worker: int, device: int) -> TorchModel:
    """Return a model in double precision."""
    return model(plain())


def noisy(worker: int, device: int) -> TorchModel:
    """Return a model with a dropout and buffers."""
    return model(network())
