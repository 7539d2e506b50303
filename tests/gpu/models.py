"""Models for the tests of GPUs, which worker processes import, and what these tests share."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from steepest.core.models.torch import TorchModel
from tests.gpu import strict_device

_STANDS_FOR_ONE = not torch.cuda.is_available() and strict_device.CAN_BE_MADE
#: Where the tests compute: on a GPU, where there is none on the device that stands for one; "cpu" tries the tests out.
DEVICE = os.environ.get("STEEPEST_GPU_TESTS", strict_device.NAME if _STANDS_FOR_ONE else "cuda")
if DEVICE == strict_device.NAME:
    strict_device.load()
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
    given = {"data": (x.to(next(net.parameters()).dtype), y), "loss": F.cross_entropy, **settings}
    return TorchModel(
        net, batch_size=8,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), **given,
    )  # fmt: skip


def classifier(worker: int, device: int) -> TorchModel:
    """Return a model in double precision."""
    return model(plain())


def small(worker: int, device: int) -> TorchModel:
    """Return a model of few weights, in double precision."""
    return model(_few())


def _few() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def poor(worker: int, device: int) -> TorchModel:
    """Return `small`, of data among which one sample is not finite."""
    x, y = data()
    x[7] = float("nan")
    return model(_few(), data=(x.double(), y))


def noisy(worker: int, device: int) -> TorchModel:
    """Return a model with a dropout and buffers."""
    return model(network())
