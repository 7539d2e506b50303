"""A shard's state as arrays: what checkpoints hold, and what moves to other shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.kernels import Floats, Int32s, Int64s

#: The dtypes of the arrays that have an item for each row.
_OF_ROWS: dict[str, tuple[str, ...]] = {
    "tables": ("int32",),
    "ids": ("int64",),
    "values": ("float32", "float64"),
    "slots": ("float32", "float64"),
    "written": ("int64",),
    "sightings": ("int32",),
}
#: Those of ids without rows, which a piece may be without.
_BESIDE: dict[str, tuple[str, ...]] = {
    "counted_tables": ("int32",),
    "counted_ids": ("int64",),
    "counted": ("int32",),
    "removed_tables": ("int32",),
    "removed_ids": ("int64",),
}
#: Arrays of rows that a state may be without, which are then of zeros.
_OPTIONAL = {"until": ("int64",), "scores": ("int64",)}
_COUNTERS = ("uint8", "uint16", "uint32")


@dataclass(frozen=True)
class TableState:
    """A piece of a shard's state: rows, and counts of ids without rows."""

    tables: Int32s  # (n,), of the rows
    ids: Int64s
    values: Floats  # (n, dim), of the tables' dtype
    slots: Floats  # (n, slots), likewise
    written: Int64s  # (n,), the version that wrote each row last
    sightings: Int32s  # (n,), how often each row's id was in a push
    # this, counted_ids and counted: (m,), of ids that were seen and are not admitted, and how often
    counted_tables: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    counted_ids: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    counted: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    # this and removed_ids: (k,), of rows that were evicted after the version of an increment
    removed_tables: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    removed_ids: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    # the counting Bloom filters, by table number
    counters: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    # (n,), until when each row stays without a push, in seconds since the epoch; 0: it is not known
    until: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    # (n,), see `steepest.tables.rows.scores`; 0: without a score
    scores: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        for name in _OPTIONAL:
            if not len(getattr(self, name)):
                object.__setattr__(self, name, np.zeros(len(self.ids), np.int64))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the state as contiguous arrays, of dtypes that torch and safetensors have too.

        Keys are the names of attributes. A counter of table 3 is "counter.3.uint16", after its dtype; the
        array is its bytes, as uint8.
        """
        found: dict[str, npt.NDArray[Any]] = {
            name: np.ascontiguousarray(getattr(self, name)) for name in (*_OF_ROWS, *_BESIDE)
        }
        found |= {
            name: np.ascontiguousarray(getattr(self, name))
            for name in _OPTIONAL
            if getattr(self, name).any()
        }
        for table, counter in sorted(self.counters.items()):
            found[f"counter.{table}.{counter.dtype.name}"] = counter.view(np.uint8)
        return found

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> TableState:
        """Return the state that `arrays` returned, not copied; those of ids without rows may be missing.

        Raises:
            ConfigurationError: one of rows is missing, or one is of another form.
        """
        if missing := [name for name in _OF_ROWS if name not in arrays]:
            raise ConfigurationError(f"a state of tables without the arrays {', '.join(missing)}")
        arrays = {name: np.zeros(0, kinds[0]) for name, kinds in _BESIDE.items()} | dict(arrays)
        optional = {name: kinds for name, kinds in _OPTIONAL.items() if name in arrays}
        known = _OF_ROWS | _BESIDE | optional
        for name, kinds in known.items():
            _require_array(name, kinds, arrays)
        if arrays["values"].dtype != arrays["slots"].dtype:
            raise _wrong("slots", arrays, f"{arrays['values'].dtype}, as values")
        counters = {}
        for name in arrays:
            if name not in known:
                table, counter = _counter(name, arrays)
                counters[table] = counter
        return cls(**{name: arrays[name] for name in known}, counters=counters)

    def sorted(self) -> TableState:
        """Return the same in order of table and id, which no memory layout and no history changes."""
        orders = {
            "": order_of(self.tables, self.ids),
            "counted": order_of(self.counted_tables, self.counted_ids),
            "removed": order_of(self.removed_tables, self.removed_ids),
        }
        return self._taken(orders)

    def _taken(self, which: dict[str, Any]) -> TableState:
        """Return the items `which` of rows, of counted ids ("counted") and of removed ones ("removed")."""
        changes = {}
        for known in fields(self):
            of = getattr(self, known.name)
            if isinstance(of, np.ndarray):
                part = known.name.partition("_")[0]
                changes[known.name] = of[which[part if part in which else ""]]
        return replace(self, **changes)

    def only(self, rows: Any, counted: Any) -> TableState:
        """Return the rows and the counted ids that masks or slices choose, and all removed ids."""
        return self._taken({"": rows, "counted": counted, "removed": slice(None)})


def order_of(tables: npt.NDArray[np.integer], ids: Int64s) -> npt.NDArray[np.intp]:
    """Return what sorts distinct (table below 2^15, id), (n,) each; NumPy's `lexsort` takes three times as long."""
    order = np.argsort(ids)
    if len(tables) and tables.min() < tables.max():
        of = tables[order].astype(np.int16)  # NumPy sorts these by radix
        order = order[np.argsort(of, kind="stable")]
    return order


def appended(states: Iterable[TableState]) -> TableState:
    """Return several states of the same tables as one, one after the other; ConfigurationError: none."""
    # Of the counters of Bloom filters the greatest stay: each id was counted by one shard, and none is counted too low.
    states = list(states)
    if not states:
        raise ConfigurationError("no states of tables: give what `export` of each shard returned")
    changes: dict[str, Any] = {}
    for known in fields(TableState):
        parts = [getattr(state, known.name) for state in states]
        if isinstance(parts[0], np.ndarray):
            changes[known.name] = np.concatenate(parts)
    counters: dict[int, npt.NDArray[Any]] = {}
    for table in sorted({table for state in states for table in state.counters}):
        of = [state.counters[table] for state in states if table in state.counters]
        counters[table] = np.maximum.reduce(of)
    return replace(states[0], counters=counters, **changes)


def _require_array(
    name: str, dtypes: tuple[str, ...], arrays: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Check that an array of a state is of its dtype and has an item for each id that it is of."""
    array = arrays[name]
    if array.dtype not in [np.dtype(known) for known in dtypes]:
        raise _wrong(name, arrays, " or ".join(dtypes))
    wide = name in ("values", "slots")
    of = {"counted": "counted_ids", "removed": "removed_ids"}
    ids = arrays[of.get(name.partition("_")[0], "ids")]
    if array.ndim != 1 + wide or ids.ndim != 1 or len(array) != len(ids):
        raise _wrong(
            name, arrays, f"shape ({ids.size}, columns)" if wide else f"shape ({ids.size},)"
        )


def _counter(name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, npt.NDArray[Any]]:
    """Return the table and the counter that an array has the bytes of."""
    begin, _, rest = name.partition(".")
    table, _, dtype = rest.partition(".")
    if begin != "counter" or not table.isdecimal() or dtype not in _COUNTERS:
        raise ConfigurationError(
            f"a state of tables with an array {name!r}: known are {', '.join((*_OF_ROWS, *_BESIDE))}, and "
            f"counter.TABLE.DTYPE with {', '.join(_COUNTERS)}"
        )
    found, size = arrays[name], np.dtype(dtype).itemsize
    if found.dtype != np.uint8 or found.ndim != 1 or len(found) % size:
        raise _wrong(name, arrays, f"uint8 and shape (a multiple of {size},)")
    return int(table), np.ascontiguousarray(found).view(dtype)


def _wrong(name: str, arrays: Mapping[str, npt.NDArray[Any]], wanted: str) -> ConfigurationError:
    array = arrays[name]
    return ConfigurationError(
        f"array {name!r} of a state of tables is of {array.dtype} and shape {array.shape}: give {wanted}"
    )
