"""Tables that workers hold: from a checkpoint of one job to the workers of another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from steepest.checkpoint.files import Checkpoint, DamagedRowsError
from steepest.core.optim.spec import OptimizerSpec
from steepest.errors import CheckpointError, ConfigurationError
from steepest.tables.files.saved_rows import CheckpointRows, SavedFile, ShardMark
from steepest.tables.files.table_moves import described_tables, slots_stay

if TYPE_CHECKING:
    from steepest.tables.rows.dealing import Dealing
    from steepest.tables.rows.state import TableState
    from steepest.tables.rows.table import Table


@runtime_checkable
class OfTable(Protocol):
    """A `steepest.core.optim.rules.Rule` for the rows of a table."""

    @property
    def table(self) -> Table:
        """The table."""


class _SavedTable(NamedTuple):
    """What a manifest says of a replicated table."""

    name: str
    dim: int
    dtype: str
    optimizer: str
    parameter: str  # that has its rows


def replicated_tables(spec: OptimizerSpec) -> dict[str, tuple[str, Table]]:
    """Map each table that workers hold, by name, to the parameter with its rows, and the table."""
    of_tables = [(each, rule) for each, rule in spec.ruled if isinstance(rule, OfTable)]
    return {rule.table.name: (parameter, rule.table) for parameter, rule in of_tables}


def described_replicated(spec: OptimizerSpec) -> list[list[Any]]:
    """Return, for checkpoints, each such table's name, dimension, dtype, optimizer and parameter."""
    return [
        [table.name, table.dim, table.form.dtype, type(table.optimizer).__name__, parameter]
        for parameter, table in replicated_tables(spec).values()
    ]


def with_tables_of(saved: Checkpoint, spec: OptimizerSpec, dealing: Dealing | None) -> Checkpoint:
    """Return a copy of a checkpoint with each table where the job holds it: among weights, or among servers' rows.

    Rows and slots stay; slots of another optimizer begin anew, and so do tables, and rows of a table that has
    become longer, that the checkpoint has not.

    Args:
        saved: the checkpoint.
        spec: of the job's optimizer.
        dealing: of the job's tables on servers; None if it has none.

    Raises:
        CheckpointError: a table does not fit: it has another dimension or dtype, or rows beyond its
            `num_embeddings`.
    """
    before = {each[0]: _SavedTable(*each) for each in saved.about.get("replicated", ())}
    after = replicated_tables(spec)
    if not before and not after:
        return saved
    served = {} if dealing is None else {table.name: table for table in dealing.tables}
    weights, state = dict(saved.weights), dict(saved.optimizer)
    rows = {name: _held_rows(held, weights, state) for name, held in before.items()}
    saved_rows = saved.saved_rows or CheckpointRows(())
    tables, seed = list(saved.about.get("tables", ())), int(saved.about["seed"])
    for name, (parameter, table) in after.items():
        own_rows = rows.get(name) or _served_rows(name, saved)
        weights[parameter], slots = _begun_with(own_rows, table, seed)
        state |= {f"{parameter}/{key}": value for key, value in slots.items()}
    for name in before.keys() & served.keys():
        groups = len({each[4] for each in tables})
        tables.append([*before[name][:4], groups])
        mark = ShardMark(rows[name].updates, seed)
        saved_rows = saved_rows.with_group(tables, _arrays_of(rows[name]), mark)
    gone = {held.parameter for held in before.values()} - {
        parameter for parameter, _ in after.values()
    }
    replicas = {
        key: value
        for key, value in saved.replicas.items()
        if not any(f"/{name}/" in f"{key}/" for name in gone)
    }
    about = {**saved.about, "tables": tables}
    rest = saved_rows if saved_rows.marks else None
    return replace(
        saved, weights=weights, optimizer=state, replicas=replicas, about=about, saved_rows=rest
    )


class _SavedRows(NamedTuple):
    """Rows of one table in a checkpoint, with what its optimizer knows of them."""

    pieces: Iterable[TableState]
    updates: int
    optimizer: str


def _held_rows(
    held: _SavedTable, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> _SavedRows:
    """Return the rows of a table that workers held, as one piece, and take them out of weights and state."""
    from steepest.tables.rows.state import TableState

    if held.parameter not in weights:
        raise CheckpointError(f"it has no {held.parameter!r}, the rows of its table {held.name!r}")
    values = weights.pop(held.parameter).numpy()
    mine = [key for key in state if key.rpartition("/")[0] == held.parameter]
    own = {key.rpartition("/")[2]: state.pop(key) for key in mine}
    slots = own["slots"].numpy() if "slots" in own else values[:, :0]
    updates, count = int(own["step"]) if "step" in own else 0, len(values)
    tables, sightings = np.zeros(count, np.int32), np.ones(count, np.int32)
    written = np.full(count, updates)
    piece = TableState(tables, np.arange(count), values, slots, written, sightings)
    return _SavedRows([piece], updates, held.optimizer)


def _served_rows(name: str, saved: Checkpoint) -> _SavedRows | None:
    """Return the rows that servers had of a table; None if they had no such table."""
    from steepest.tables.files.row_pieces import rows_of_table

    known = described_tables(saved.about.get("tables", ()))
    if name not in known or saved.saved_rows is None:
        return None
    pieces = rows_of_table(saved.saved_rows, known[name], SavedFile.tensors)
    updates = max(mark.updates for mark in saved.saved_rows.marks)
    return _SavedRows(pieces, updates, known[name].optimizer)


def _begun_with(
    found: _SavedRows | None, table: Table, seed: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the values of all rows of a table, and the state of its optimizer, with the rows that there were."""
    from steepest.tables.rows.replicated import first_values

    values, state = torch.from_numpy(first_values(table, seed)), dict[str, torch.Tensor]()
    if found is None:
        return values, state
    state["step"] = torch.tensor(float(found.updates), dtype=torch.float64)
    slots = torch.tensor(table.optimizer.first_slots(table.dim), dtype=values.dtype)
    slots = slots.repeat(len(values), 1)
    try:
        for piece in found.pieces:
            _require_fitting(piece, table, values.numpy())
            values.numpy()[piece.ids] = piece.values
            if slots.numel() and slots_stay(found.optimizer, piece.slots, table):
                state["slots"] = slots
                slots.numpy()[piece.ids] = piece.slots
    except (ConfigurationError, OSError, ValueError) as error:
        raise DamagedRowsError(f"embedding tables: {error}") from error
    return values, state


def _require_fitting(piece: TableState, table: Table, values: Any) -> None:
    """Check that a table can have rows of a checkpoint; CheckpointError otherwise."""
    if piece.values.shape[1] != table.dim or piece.values.dtype != values.dtype:
        raise CheckpointError(
            f"its embedding table {table.name!r} has dimension {piece.values.shape[1]} and computes in "
            f"{piece.values.dtype}, this job's has {table.dim} and {table.form.dtype}: give the table that dimension "
            "and dtype, or another name, with which it begins without rows"
        )
    if len(piece.ids) and int(piece.ids.max()) >= len(values):
        raise CheckpointError(
            f"its embedding table {table.name!r} has a row of id {int(piece.ids.max())}, this job's has "
            f"num_embeddings={len(values)}: give at least {int(piece.ids.max()) + 1}"
        )


def _arrays_of(rows: _SavedRows) -> dict[str, torch.Tensor]:
    """Return the rows of a table that workers held as the arrays of a shard on servers."""
    (piece,) = rows.pieces
    return {key: torch.from_numpy(array) for key, array in piece.arrays().items()}
