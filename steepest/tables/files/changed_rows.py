"""Rows of embedding tables that a function of the user's changes on their way from a checkpoint into a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steepest.errors import ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.rows.state import TableState
    from steepest.tables.rows.table import Table

_KNOWN = ("written", "sightings", "until", "scores")


@dataclass(frozen=True, eq=False)
class TableRows:
    """Some rows of one embedding table; ``rows[mask]`` are some of these, in the same order or another.

    Attributes:
        ids: (n,) int64.
        values: (n, dim), of the dtype in which the table's pushes compute.
        slots: (n, k), the numbers that the table's optimizer keeps beside each row.
        known: (n, 4) int64: the update that wrote each row last, how often its id was in a batch, when its time to
            live ends, and its score.

    Example:
        >>> rows = TableRows(torch.tensor([3, 8]), torch.ones(2, 1), torch.ones(2, 0), torch.zeros(2, 4).long())
        >>> rows[rows.ids > 5].ids
        tensor([8])
    """

    ids: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    known: torch.Tensor

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    def __getitem__(self, which: Any) -> TableRows:
        """Return the rows that a mask, a slice or places choose."""
        return TableRows(*(each[which] for each in vars(self).values()))


#: Returns rows for the tables of a job, by name, of some rows of a table of a checkpoint.
RowChange = Callable[[str, TableRows], Mapping[str, TableRows]]


def rows_in(piece: TableState, number: int) -> TableRows:
    """Return the rows of one table of a piece."""
    mine = piece.only(piece.tables == number, slice(0))
    known = np.stack([getattr(mine, name) for name in _KNOWN], axis=1).astype(np.int64)
    return TableRows(*map(torch.from_numpy, (mine.ids, mine.values, mine.slots, known)))


def piece_of(name: str, rows: Any, number: int, table: Table) -> TableState:
    """Return rows that a function has made for a table as a piece; ConfigurationError: the table cannot have them.

    Slots of another number are the optimizer's first ones.
    """
    from steepest.tables.rows.state import TableState

    if not isinstance(rows, TableRows):
        raise ConfigurationError(
            f"change_rows= made a {type(rows).__name__} for table {name!r}: return TableRows by table"
        )
    ids, values, slots, known = (
        torch.as_tensor(each).detach().cpu().numpy() for each in vars(rows).values()
    )
    if ids.dtype.kind != "i":
        raise ConfigurationError(
            f"change_rows= made ids of {ids.dtype} for table {name!r}: return integers"
        )
    shapes = ids.shape, values.shape, slots.shape[:1], known.shape
    count = len(ids)
    if shapes != ((count,), (count, table.dim), (count,), (count, len(_KNOWN))) or slots.ndim != 2:
        raise ConfigurationError(
            f"change_rows= made ids of shape {ids.shape}, values {values.shape}, slots {slots.shape} and known "
            f"{known.shape} for table {name!r}: return (n,), (n, {table.dim}), (n, k) and (n, {len(_KNOWN)})"
        )
    first = np.array(table.optimizer.first_slots(table.dim))
    if slots.shape[1] != len(first):
        slots = np.tile(first, (count, 1))
    dtype, kinds = table.form.dtype, (np.int64, np.int32, np.int64, np.int64)
    beside = {n: of.astype(kind) for n, of, kind in zip(_KNOWN, known.T, kinds, strict=True)}
    of_table = np.full(count, number, np.int32)
    return TableState(
        of_table, ids.astype(np.int64), values.astype(dtype), slots.astype(dtype), **beside
    )
