"""Rows that a user brings for an embedding table: pretrained values, or another job's export."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from steepest.checkpoint.exported_table import ExportedTable
from steepest.errors import ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.state import TableState
    from steepest.tables.table import Table


class ImportedRows(NamedTuple):
    """Values by distinct ids."""

    ids: torch.Tensor  # (n,) int64
    values: torch.Tensor  # (n, dim), of the dtype in which the table's pushes compute


def imported_rows(table: Table, rows: Any) -> ImportedRows:
    """Return what a user gave for a table; ConfigurationError: it is no export or (ids, values) that fit."""
    what = f"rows for table {table.name!r}"
    if isinstance(rows, ExportedTable):
        if rows.base is not None:
            raise ConfigurationError(
                f"{what} are changes alone: give an export without since=, or earlier.updated(changes)"
            )
        rows = rows.ids, rows.values
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise ConfigurationError(
            f"{what} are a {type(rows).__name__}: give an ExportedTable, or (ids, values)"
        )
    try:
        ids, values = (torch.as_tensor(each).detach().cpu() for each in rows)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"{what} are no tensors or arrays: {error}") from None
    whole = not ids.is_floating_point() and not ids.is_complex() and ids.dtype is not torch.bool
    if not whole or ids.dim() != 1 or values.shape != (len(ids), table.dim):
        raise ConfigurationError(
            f"{what} are ids of {ids.dtype} and shape {tuple(ids.shape)}, and values of shape "
            f"{tuple(values.shape)}: give integers (n,) and values (n, {table.dim})"
        )
    ids, values = ids.long(), values.to(getattr(torch, table.form.dtype))
    if len(ids) and int(ids.min()) < 0:
        raise ConfigurationError(
            f"{what} have the id {int(ids.min())}: give ids from 0 to 2^63 - 1"
        )
    if len(np.unique(ids.numpy())) < len(ids):
        raise ConfigurationError(f"{what} have an id twice: give each id once")
    if not bool(values.isfinite().all()):
        raise ConfigurationError(f"{what} hold NaN or infinity: give finite values")
    return ImportedRows(ids, values)


def with_given(
    state: TableState, version: int, number: int, table: Table, rows: ImportedRows
) -> tuple[TableState, int]:
    """Return a shard's state with rows in place of those of their ids, and how many had rows.

    Their slots begin anew, and ids that filters have counted are admitted.

    Args:
        state: of the shard.
        version: of that state.
        number: of the table in its group.
        table: the table.
        rows: those of this shard.
    """
    from steepest.tables.state import increased

    ids, values = rows.ids.numpy(), rows.values.numpy()
    first = np.array(table.optimizer.first_slots(table.dim), values.dtype)
    had = np.isin(state.ids, ids) & (state.tables == number)
    counted = ~(np.isin(state.counted_ids, ids) & (state.counted_tables == number))
    seen = dict(zip(state.ids[had].tolist(), state.sightings[had].tolist(), strict=True))
    changes = replace(
        state.only(slice(0), counted),
        tables=np.full(len(ids), number, np.int32),
        ids=ids,
        values=values,
        slots=np.tile(first, (len(ids), 1)),
        written=np.full(len(ids), version, np.int64),
        sightings=np.array([seen.get(each, 1) for each in ids.tolist()], np.int32),
    )
    return increased(state, changes), int(had.sum())
