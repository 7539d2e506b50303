"""Rows that a user brings for an embedding table: pretrained values, or another job's export."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from steepest.errors import ConfigurationError
from steepest.tables.files.exported_table import ExportedTable

if TYPE_CHECKING:
    from steepest.tables.rows.shard import TableShard
    from steepest.tables.rows.table import Table


PIECE_ROWS = 1 << 15  # that are copied at once


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


def load_with_imported(
    shard: TableShard, before: TableShard, number: int, rows: ImportedRows
) -> int:
    """Load a shard's rows into another shard, with imported rows in place of those of the same ids.

    Their slots begin anew, and ids that filters have counted are admitted.

    Args:
        shard: without rows.
        before: the shard.
        number: of the table in its group.
        rows: those of this shard.

    Returns:
        How many of the ids had rows.

    Raises:
        ConfigurationError: the table has no room for them.
    """
    from steepest.tables.rows.state import TableState

    table, ids, values = before.tables[number], rows.ids.numpy(), rows.values.numpy()
    of = np.full(len(ids), number, np.int32)
    seen = before.sightings_of(of, ids)
    first = np.array(table.optimizer.first_slots(table.dim), values.dtype)
    shard.begin_load(before.version, before.clock)
    for piece in before.pieces(PIECE_ROWS):
        had = np.isin(piece.ids, ids) & (piece.tables == number)
        counted = np.isin(piece.counted_ids, ids) & (piece.counted_tables == number)
        shard.take(piece.only(~had, ~counted))
    imported = TableState(
        tables=of,
        ids=ids,
        values=values,
        slots=np.tile(first, (len(ids), 1)),
        written=np.full(len(ids), before.version, np.int64),
        sightings=np.where(seen < 0, 1, seen).astype(np.int32),
    )
    shard.take(imported)
    shard.end_load()
    shard.require_kept()
    return int((seen >= 0).sum())
