"""Tables that workers hold: from a checkpoint of one job to the workers of another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from steepest.checkpoint.files import Checkpoint, DamagedRowsError
from steepest.checkpoint.saved_rows import CheckpointRows, SavedFile, ShardMark
from steepest.checkpoint.table_moves import described_tables, slots_stay
from steepest.core.optim.spec import OptimizerSpec
from steepest.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing
    from steepest.tables.table import Table


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
        found = rows.get(name) or _served_rows(name, saved)
        weights[parameter], slots = _begun_with(found, table, seed)
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

    ids: Any  # (n,) int64
    values: Any  # (n, dim)
    slots: Any  # (n, k)
    updates: int
    optimizer: str


def _held_rows(
    held: _SavedTable, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor]
) -> _SavedRows:
    """Return the rows of a table that workers held, and take them out of weights and state."""
    if held.parameter not in weights:
        raise CheckpointError(f"it has no {held.parameter!r}, the rows of its table {held.name!r}")
    values = weights.pop(held.parameter).numpy()
    mine = [key for key in state if key.rpartition("/")[0] == held.parameter]
    own = {key.rpartition("/")[2]: state.pop(key) for key in mine}
    slots = own["slots"].numpy() if "slots" in own else values[:, :0]
    updates = int(own["step"]) if "step" in own else 0
    return _SavedRows(np.arange(len(values)), values, slots, updates, held.optimizer)


def _served_rows(name: str, saved: Checkpoint) -> _SavedRows | None:
    """Return the rows that servers had of a table; None if they had no such table."""
    from steepest.checkpoint.row_pieces import rows_of_table

    known = described_tables(saved.about.get("tables", ()))
    if name not in known or saved.saved_rows is None:
        return None
    try:
        states = list(rows_of_table(saved.saved_rows, known[name], SavedFile.tensors))
    except (ConfigurationError, OSError, ValueError) as error:
        raise DamagedRowsError(f"embedding tables: {error}") from error
    arrays = ([getattr(state, key) for state in states] for key in ("ids", "values", "slots"))
    ids, values, slots = map(np.concatenate, arrays)
    updates = max(mark.updates for mark in saved.saved_rows.marks)
    return _SavedRows(ids, values, slots, updates, known[name].optimizer)


def _begun_with(
    found: _SavedRows | None, table: Table, seed: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the values of all rows of a table, and the state of its optimizer, with the rows that there were."""
    from steepest.tables.replicated import first_values

    values, state = torch.from_numpy(first_values(table, seed)), dict[str, torch.Tensor]()
    if found is None:
        return values, state
    if found.values.shape[1] != table.dim or found.values.dtype != values.numpy().dtype:
        raise CheckpointError(
            f"its embedding table {table.name!r} has dimension {found.values.shape[1]} and computes in "
            f"{found.values.dtype}, this job's has {table.dim} and {table.form.dtype}: give the table that dimension "
            "and dtype, or another name, with which it begins without rows"
        )
    if len(found.ids) and int(found.ids.max()) >= len(values):
        raise CheckpointError(
            f"its embedding table {table.name!r} has a row of id {int(found.ids.max())}, this job's has "
            f"num_embeddings={len(values)}: give at least {int(found.ids.max()) + 1}"
        )
    values.numpy()[found.ids] = found.values
    state["step"] = torch.tensor(float(found.updates), dtype=torch.float64)
    first = table.optimizer.first_slots(table.dim)
    if first and slots_stay(found.optimizer, found.slots, table):
        state["slots"] = torch.tensor(first, dtype=values.dtype).repeat(len(values), 1)
        state["slots"].numpy()[found.ids] = found.slots
    return values, state


def _arrays_of(rows: _SavedRows) -> dict[str, torch.Tensor]:
    """Return a table's rows as the arrays of a shard on servers."""
    from steepest.tables.state import TableState

    count, nothing, no_ids = len(rows.ids), np.zeros(0, np.int32), np.zeros(0, np.int64)
    state = TableState(
        tables=np.zeros(count, np.int32),
        ids=rows.ids,
        values=rows.values,
        slots=rows.slots,
        written=np.full(count, rows.updates),
        sightings=np.ones(count, np.int32),
        counted_tables=nothing,
        counted_ids=no_ids,
        counted=nothing,
        removed_tables=nothing,
        removed_ids=no_ids,
    )
    return {key: torch.from_numpy(array) for key, array in state.arrays().items()}
