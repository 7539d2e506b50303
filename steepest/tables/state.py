"""A shard's state as arrays: what checkpoints hold, and what moves to other shards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.kernels import Floats, Int32s, Int64s


@dataclass(frozen=True)
class TableState:
    """Rows, and what is known of ids without rows, in order of table and id.

    Attributes:
        tables, ids: (n,) int32 and int64, of the rows.
        values, slots: (n, dim) and (n, slots), of the tables' dtype.
        written: (n,) int64, the version that wrote each row last.
        sightings: (n,) int32, how often each row's id was in a push.
        counted_tables, counted_ids, counted: (m,), of ids that were seen and are not admitted, and how often.
        removed_tables, removed_ids: (k,), of rows that were evicted after the version of an increment.
        counters: the counting Bloom filters, by table number.
        frozen: the numbers of frozen tables.
    """

    tables: Int32s
    ids: Int64s
    values: Floats
    slots: Floats
    written: Int64s
    sightings: Int32s
    counted_tables: Int32s
    counted_ids: Int64s
    counted: Int32s
    removed_tables: Int32s
    removed_ids: Int64s
    counters: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()

    def sorted(self) -> TableState:
        """Return the same in order of table and id, which no memory layout and no history changes."""
        orders = {
            "": np.lexsort((self.ids, self.tables)),
            "counted": np.lexsort((self.counted_ids, self.counted_tables)),
            "removed": np.lexsort((self.removed_ids, self.removed_tables)),
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

    def only(self, mine: npt.NDArray[np.bool_], counted: npt.NDArray[np.bool_]) -> TableState:
        """Return the rows and the counted ids that are marked, and what was removed."""
        return self._taken({"": mine, "counted": counted, "removed": slice(None)})


def joined(states: Iterable[TableState]) -> TableState:
    """Return the state of several shards of the same tables as one, in order of table and id.

    Counters of Bloom filters are added up, so that no id is counted too low.

    Raises:
        ConfigurationError: there is none.
    """
    states = list(states)
    if not states:
        raise ConfigurationError("no states of tables: give what `export` of each shard returned")
    changes: dict[str, Any] = {}
    for known in fields(TableState):
        parts = [getattr(state, known.name) for state in states]
        if isinstance(parts[0], np.ndarray):
            changes[known.name] = np.concatenate(parts)
    counters: dict[int, npt.NDArray[Any]] = {}
    for table, counter in states[0].counters.items():
        total = sum(state.counters[table].astype(np.uint64) for state in states)
        most = np.iinfo(counter.dtype).max
        counters[table] = np.minimum(total, most).astype(counter.dtype)
    return replace(states[0], counters=counters, **changes).sorted()


def increased(base: TableState, increment: TableState) -> TableState:
    """Return a state with the rows of a later increment in place of its own, less those removed.

    The increment's counts of ids that are not admitted replace those of the base.
    """
    stale = _keys(base.tables, base.ids)
    newer = (
        _keys(increment.tables, increment.ids),
        _keys(increment.removed_tables, increment.removed_ids),
    )
    kept = ~np.isin(stale, np.concatenate(newer))
    rest = base.only(kept, np.zeros(len(base.counted), np.bool_))
    rest = replace(rest, removed_tables=rest.removed_tables[:0], removed_ids=rest.removed_ids[:0])
    gone = replace(
        increment,
        removed_tables=increment.removed_tables[:0],
        removed_ids=increment.removed_ids[:0],
        counters={},
    )
    together = joined([replace(rest, counters={}), gone])
    return replace(together, counters=increment.counters, frozen=increment.frozen)


def _keys(tables: Int32s, ids: Int64s) -> npt.NDArray[Any]:
    """Return (table, id) as one array of pairs that can be compared."""
    pairs = np.empty(len(ids), [("table", np.int32), ("id", np.int64)])
    pairs["table"], pairs["id"] = tables, ids
    return pairs
