"""What the tests of tables share."""

from __future__ import annotations

from typing import Any

import numpy as np

from steepest.tables.rows.row_optimizers import SGD, RowOptimizer
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.state import TableState
from steepest.tables.rows.table import Table


def table(name: str = "t", dim: int = 4, **settings: Any) -> Table:
    """A table whose pushes of ones subtract one, if nothing else is said."""
    optimizer: RowOptimizer = settings.pop("optimizer", SGD(lr=1.0))
    return Table(name=name, dim=dim, optimizer=optimizer, **settings)


def push(shard: TableShard, ids: Any, version: int, gradient: float = 1.0, **others: Any) -> None:
    """Push the same gradient for ids of the first table, or of `tables`."""
    ids = np.asarray(ids, np.int64)
    tables = others.pop("tables", np.zeros(len(ids), np.int32))
    gradients = np.full((len(ids), shard.dim), gradient, shard.dtype)
    shard.push(tables, ids, gradients, version, **others)


def ids_of(shard: TableShard) -> list[int]:
    """The ids that have rows."""
    ids: list[int] = shard.export().ids.tolist()
    return ids


def same(state: TableState, other: TableState) -> bool:
    """Whether two states are the same bits."""
    pairs = [(vars(state)[name], vars(other)[name]) for name in vars(state)]
    return all(
        a.tobytes() == b.tobytes() and a.dtype == b.dtype and a.shape == b.shape
        if isinstance(a, np.ndarray)
        else repr(a) == repr(b)
        for a, b in pairs
    )
