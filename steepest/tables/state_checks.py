"""Checks a shard's state that comes from another process, before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.checks import require_keys
from steepest.tables.hashing import Distinct
from steepest.tables.kernels import Int32s, Int64s
from steepest.tables.state import TableState
from steepest.tables.table import Table


def require_number_in(name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> int:
    """Return the one number, at least 0, of a state's array; ConfigurationError: it is missing, or holds another."""
    array = arrays.get(name)
    if array is None or array.dtype != np.int64 or array.shape != (1,) or array[0] < 0:
        raise ConfigurationError(f"{name}={array!r:.80} in a state of tables: give one count")
    return int(array[0])


def require_sound(state: TableState, tables: Sequence[Table], version: int) -> None:
    """Check that rows can be pushed to and pulled from a shard's state, whatever was written to it.

    Raises:
        ConfigurationError: an id is there twice or is none, a table is not of the group, or a row was
            written after the last push (`version`), say.
    """
    require_possible(state, tables, version)
    require_distinct("ids", state.tables, state.ids)
    require_distinct("counted_ids", state.counted_tables, state.counted_ids)


def require_possible(state: TableState, tables: Sequence[Table], version: int) -> None:
    """Check the same but that ids are distinct; ConfigurationError: as `require_sound`."""
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
