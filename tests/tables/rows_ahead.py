"""Models with an embedding table whose rows are asked for ahead, and the rows on the servers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import steepest
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.modules.embedding import EmbeddingBag
from steepest.tables.rows.initial import Constant
from steepest.tables.rows.row_optimizers import SGD
from steepest.tables.rows.table import Table
from steepest.testing import InProcessCluster

IDS = torch.arange(240).reshape(-1, 2) % 31
TARGETS = torch.linspace(-1, 1, len(IDS))[:, None]


class Net(nn.Module):
    """A bag of rows, noise, and a layer."""

    def __init__(self, noise: bool = True) -> None:
        super().__init__()
        self.bag = EmbeddingBag(Table(name="t", dim=3, optimizer=SGD(lr=0.1)), mode="sum")
        self.drop = nn.Dropout(0.5 if noise else 0.0)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns scores."""
        return self.out(self.drop(self.bag(ids)))


def creator(net: Any = Net, **options: Any) -> Any:
    def create(worker: int, device: int) -> steepest.TorchModel:
        return steepest.TorchModel(
            net(),
            loss=nn.functional.mse_loss,
            data=(IDS, TARGETS),
            batch_size=4,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
            **options,
        )

    return create


def shards(cluster: InProcessCluster) -> list[TableChunk]:
    chunks = (held for server in cluster.servers for held in server.chunks.values())
    return [held for held in chunks if isinstance(held, TableChunk)]


class Falling(nn.Module):
    """One id in every sample, whose row falls by one with each update."""

    def __init__(self) -> None:
        super().__init__()
        table = Table(name="t", dim=1, optimizer=SGD(lr=1.0), initial=Constant(0.0))
        self.bag = EmbeddingBag(table, mode="sum")
        self.bias = nn.Parameter(torch.zeros(1))
        self.seen: list[float] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the row."""
        rows = self.bag(torch.zeros_like(ids[:, :1]))
        self.seen.append(float(rows[0, 0].detach()))
        return rows + 0 * self.bias


def falling(
    staleness: int | None, workers: int = 2, **options: Any
) -> tuple[InProcessCluster, list[Falling]]:
    """A job of two workers, and their modules."""
    modules = []

    def create(worker: int, device: int) -> steepest.TorchModel:
        modules.append(Falling())
        return steepest.TorchModel(
            modules[-1],
            loss=lambda output, target: output.mean(),
            data=(IDS, TARGETS),
            table_ids=lambda batch: torch.zeros_like(batch[0][:, :1]),
            batch_size=4,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        )

    strategy = ParameterServerStrategy(num_servers=2, table_staleness=staleness)
    options.setdefault("strategy", strategy)
    return InProcessCluster(create, num_workers=workers, **options), modules


def row_of(cluster: InProcessCluster) -> float:
    (held,) = (held for held in shards(cluster) if len(held.rows))
    return float(held.rows.pull([0], [0])[0, 0])
