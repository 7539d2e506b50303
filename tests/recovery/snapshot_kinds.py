"""Jobs with buffers and with compression, of which snapshots are taken."""

from __future__ import annotations

import torch
from torch import nn

from steepest.core.config.compression import Int8, PowerSGD, TopK
from steepest.core.strategies.strategy import Strategy
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from tests.reference import Task, samples, sgd


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2)).double()


def wide() -> nn.Module:
    """In float32, and large enough for compression to make it smaller."""
    return nn.Sequential(
        nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 2)
    )


BUFFERS = Task(normalised, sgd(momentum=0.9), samples(48))
WIDE = Task(wide, sgd(momentum=0.9), samples(40, dtype=torch.float32))
KINDS: dict[str, tuple[Task, Strategy]] = {
    "buffers": (BUFFERS, ParameterServerStrategy(num_servers=2, chunk_bytes=64)),
    "buffers, no servers": (BUFFERS, AllreduceStrategy(chunk_bytes=64)),
    "topk": (WIDE, AllreduceStrategy(compression=TopK(0.1))),
    "int8": (WIDE, ParameterServerStrategy(num_servers=2, compression=Int8(16), transport="tcp")),
    "powersgd": (WIDE, AllreduceStrategy(compression=PowerSGD(2))),
    "local": (BUFFERS, LocalStrategy(sync_every=2, outer_lr=0.7, outer_momentum=0.9)),
}
