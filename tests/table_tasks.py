"""What the tests of jobs with embedding tables share: models with rows on servers, and torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steepest.checkpoint.files import assemble
from steepest.models.embedding import Embedding, EmbeddingBag
from steepest.tables.row_optimizers import SGD
from steepest.tables.table import Table
from steepest.testing import InProcessCluster
from tests.reference import Task, same_bits, samples, sgd

ROWS, DIM = 20, 3  # ids are below ROWS
BAG = 4  # items of a sample


def described(name: str, dim: int = DIM, **settings: Any) -> Table:
    """A table of float64 rows."""
    return Table(**({"optimizer": SGD(lr=0.1), "dtype": "float64"} | settings), name=name, dim=dim)


def clicks(count: int = 13, rows: int = ROWS) -> tuple[Tensor, ...]:
    """Fixed random users, bags of items, and targets; some ids are in many samples."""
    generator = torch.Generator().manual_seed(2)
    numbers = torch.rand(count, 1 + BAG, generator=generator) ** 2 * rows
    users, *items = numbers.long().unbind(1)
    return users, torch.stack(items, 1), samples(count)[1]


class Clicks(nn.Module):
    """A user, the mean of a bag of items, and a dense layer.

    Args:
        users: looks ids (B,) up: (B, DIM).
        items: looks ids (B, BAG) up: (B, 2).
    """

    def __init__(self, users: nn.Module, items: nn.Module) -> None:
        super().__init__()
        self.users, self.items = users, items
        self.head = nn.Linear(DIM + 2, 2, dtype=torch.float64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return (B, 2)."""
        return self.head(torch.tanh(torch.cat([self.users(users), self.items(items)], 1)))


def with_tables(**settings: Any) -> nn.Module:
    """The model with rows of two tables, in two groups."""
    return Clicks(
        Embedding(described("users", **settings)), EmbeddingBag(described("items", 2, **settings))
    )


def table_task(optimizer: Any = None, data: Any = None, batch_size: int = 2, **tables: Any) -> Task:
    """The task of that model; keywords of both tables."""
    optimizer = optimizer or sgd(momentum=0.9)
    data = clicks() if data is None else data
    return Task(lambda: with_tables(**tables), optimizer, data, batch_size=batch_size)


def rows_of(cluster: InProcessCluster) -> dict[str, Tensor]:
    """All that servers know of rows, by "shard/array": what a checkpoint has of them."""
    layout = cluster.job.description.layout
    records = cluster.snapshot("state").records
    return {
        name: value for name, value in assemble(layout, records)[0].items() if "tables/" in name
    }


def same_rows(rows: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether two jobs know the same of rows, to the bit."""
    return len(rows) > 0 and same_bits(rows, expected)
