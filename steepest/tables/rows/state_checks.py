"""Checks a shard's state that comes from another process, before any of it is used."""

from __future__ import annotations

from collections.abc import Sequence

from steepest.errors import ConfigurationError
from steepest.tables.rows.checks import require_keys
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.state import TableState
from steepest.tables.rows.table import Table


def require_possible(state: TableState, tables: Sequence[Table], version: int) -> None:
    """Check that rows can be pushed to and pulled from a shard's state, but for ids that are there twice.

    Raises:
        ConfigurationError: an id is none, a table is not of the group, or a row was written after the last push
            (`version`), say.
    """
    one, dtype, names = tables[0], tables[0].form.dtype, [table.name for table in tables]
    widths = state.values.shape[1], state.slots.shape[1]
    fits = widths == (one.dim, one.optimizer.slots(one.dim))
    if state.values.dtype != dtype or not fits:
        raise ConfigurationError(
            f"a state of {widths[0]} values and {widths[1]} slots of {state.values.dtype} a row, for "
            f"tables of {one.dim} and {one.optimizer.slots(one.dim)} of {dtype}"
        )
    require_keys(state.tables, state.ids, names)
    require_keys(state.counted_tables, state.counted_ids, names)
    require_keys(state.removed_tables, state.removed_ids, names)
    for name, least, most in (
        ("written", 0, version),
        ("sightings", 0, 2**31 - 1),
        ("counted", 1, 2**31 - 1),
        ("until", 0, 2**32 - 1),
        ("scores", 0, 2**62),
    ):
        array = getattr(state, name)
        if len(array) and not least <= array.min() <= array.max() <= most:
            raise ConfigurationError(
                f"{name} of a state of tables hold {array.min()} to {array.max()}: give numbers "
                f"from {least} to {most}"
            )


def require_distinct(name: str, tables: Int32s, ids: Int64s) -> None:
    """Check that keys (n,) are distinct; ConfigurationError otherwise."""
    counts = Distinct(tables, ids).counts
    if len(counts) < len(ids):
        raise ConfigurationError(f"of {len(ids)} {name} of a state only {len(counts)} are distinct")
