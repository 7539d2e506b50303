"""How many rows of each table a shard may have, and which ones when there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.pins import Pins
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import Table

_BOUNDLESS = 2**62  # more rows than there can be


class Plan(NamedTuple):
    """What a push does to ids that have no rows."""

    admitted: npt.NDArray[np.bool_]  # which of these ids get a row
    wanted: Int64s  # rows to make, by table
    refused: Int64s  # ids for whose rows there is no room, by table
    excess: Int64s  # rows to evict, by table


class Capacities:
    """The capacities of a shard's tables.

    Pinned ids have their places from the beginning, with rows or without: below, `taken` are the places, by table,
    that are theirs or have another row, and `known` those that are theirs or have another row that a push updates.
    Ids to make rows for are others.

    Attributes:
        pins: the pinned ids.
        rows: this shard's share of each table's capacity.
        most: rows of all tables at most; None where one has no capacity.
        told: which tables have a capacity and no filter: a push makes rows for all their ids.
    """

    def __init__(self, tables: Sequence[Table], spread: Spread, shard: int) -> None:
        """Take this shard's share; ConfigurationError: it is too small for its pinned ids."""
        self._tables = tables
        self._parts = spread.parts
        limited = np.array([table.capacity is not None for table in tables])
        limits = np.array([table.capacity or 0 for table in tables], np.int64)
        self.rows: Int64s = np.where(limited, spread.shares(shard, limits), _BOUNDLESS)
        self.most = int(self.rows.sum()) if limited.all() else None
        self._evicts = np.array([table.eviction is not None for table in tables])
        filtered = np.array([table.admission is not None for table in tables])
        self.told = limited & ~filtered
        self.pins = Pins(tables, spread, shard)
        for table in self.over(self.pins.counts):
            raise ConfigurationError(
                f"table {tables[table].name!r} has {self.pins.counts[table]} pinned ids in one of its parts, and "
                f"{self._described(table)}: raise it, or pin fewer"
            )

    def room(self, known: Int64s, taken: Int64s) -> Int64s:
        """Return how many rows a push can add to each table; one that evicts can lose all others."""
        return self.rows - np.where(self._evicts, known, taken)

    def require(self, wanted: Int64s, known: Int64s, taken: Int64s) -> None:
        """Check that there is room for the rows that a push adds (`wanted`, by table); ConfigurationError otherwise."""
        for table in map(int, np.flatnonzero(wanted > self.room(known, taken))):
            name, capacity = self._tables[table].name, self._described(table)
            if not self._evicts[table]:
                raise ConfigurationError(
                    f"table {name!r} has no room for {wanted[table]} more ids beside its "
                    f"{taken[table]} rows: {capacity}; raise it, or give eviction=LRU() or LFU()"
                )
            raise ConfigurationError(
                f"table {name!r} has no room for {known[table] + wanted[table]} ids at once: "
                f"{capacity}; raise it, or make batches smaller"
            )

    def _described(self, table: int) -> str:
        """Return the capacity of a table in words, and the share of it that this shard has."""
        capacity = f"its capacity is {self._tables[table].capacity}"
        if self._parts[table] > 1:
            capacity += (
                f", of which this one of its {self._parts[table]} parts has {self.rows[table]}"
            )
        if pinned := self.pins.counts[table]:
            capacity += f", {pinned} of them for pinned ids"
        return capacity

    def fit(
        self, tables: Int32s, admitted: npt.NDArray[np.bool_], known: Int64s, taken: Int64s
    ) -> Plan:
        """Return a plan in which the first admitted ids that fit get rows; `tables`: of the ids without rows."""
        admitted = admitted.copy()
        wanted = np.bincount(tables[admitted], minlength=len(taken))
        made = np.minimum(wanted, self.room(known, taken))
        for table in np.flatnonzero(made < wanted):
            admitted[np.flatnonzero(admitted & (tables == table))[made[table] :]] = False
        excess = (taken + made - self.rows).clip(0)
        return Plan(admitted, made, wanted - made, excess)

    def over(self, held: Int64s) -> list[int]:
        """Return the tables that have no room for so many rows each."""
        return list(map(int, np.flatnonzero(held > self.rows)))

    def require_kept(self, held: Int64s, alive: Int64s) -> None:
        """Check that a table lost rows of those that it was to hold only if it evicts; ConfigurationError otherwise."""
        for table in np.flatnonzero((held > alive) & ~self._evicts).tolist():
            raise ConfigurationError(
                f"table {self._tables[table].name!r} has {held[table]} rows here, {self._described(table)}: "
                "raise it, or give eviction=LRU() or LFU()"
            )
