"""The rows of a state on their way into a shard: piece by piece, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.rows.admission import Admission
from steepest.tables.rows.hashing import deal, shard_of
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.row_optimizers import RowOptimizer
from steepest.tables.rows.shard_rows import Removals, ShardRows
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.state import TableState, appended
from steepest.tables.rows.state_checks import require_distinct, require_possible
from steepest.validation import require_count


class LoadingRows(ShardRows):
    """A shard that takes rows of others: all at once by `load`, or by `begin_load`, `take` and `end_load`.

    A table over its capacity keeps its most used rows, if it evicts by use, whatever the order of the pieces.
    """

    dim: int
    dtype: str
    _admission: Admission
    _names: list[str]
    _optimizer: RowOptimizer

    def load(self, states: Iterable[TableState], version: int, clock: int = 0) -> None:
        """Replace everything by this shard's part of a state; counters of events begin at 0.

        Args:
            states: what `export` returned, of all shards of the same tables, however many.
            version: of that state.
            clock: of that state, in seconds since the epoch; 0 if it is not known.

        Raises:
            ConfigurationError: the state is of other tables, cannot be one, see `require_possible`, has an id twice, or
                a table has more rows than its capacity and evicts none; nothing has changed.
        """
        require_count("version", version, 0)
        before = vars(self).copy()
        try:
            self.begin_load(version, clock)
            for state in states:
                require_possible(state, self._tables, version)
                mine, counted = (
                    shard_of(tables, ids, self._spread) == self._shard
                    for tables, ids in (
                        (state.tables, state.ids),
                        (state.counted_tables, state.counted_ids),
                    )
                )
                whole = mine.all() and counted.all()
                self.take(state if whole else state.only(mine, counted))
            self.end_load()
            self.require_kept()
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    def begin_load(self, version: int, clock: int = 0) -> None:
        """Drop all rows; pieces of a state of this version and time follow."""
        self._clear()
        # those of before stay as they are, for a load that is refused
        self._lives, self._admission = copy(self._lives), copy(self._admission)
        self.version, self._lives.clock = version, clock
        self._offered = np.zeros(len(self._tables), np.int64)  # rows of each table, kept or not
        self._beside: list[TableState] = []  # what pieces have beside rows
        self._waiting: list[TableState] = []  # pieces whose scores need those of all others
        self._fresh: list[Int32s] = []  # numbers of rows to which no ids lead yet

    def take(self, piece: TableState) -> None:
        """Take a piece of a state; all of its rows must be of these tables and this shard."""
        beside = piece.only(np.empty(0, np.int64), slice(None))
        self._beside.append(appended([beside]))  # a copy, which keeps no file's memory
        (self._waiting.append if self._scores.any else self._take_rows)(piece)

    def end_load(self) -> None:
        """Be what `load` leaves, but for `require_kept`; ConfigurationError: an id is there twice, drop the shard."""
        beside = appended(self._beside)
        require_distinct("counted_ids", beside.counted_tables, beside.counted_ids)
        if self._waiting:
            self._take_rows(self._scores.completed(appended(self._waiting)))
        if not self._alive.any():
            self._index.expect(self._offered)
        self._lead_to_rows()
        self._admission.load(beside.sorted())
        self._removals = Removals(self.version)
        for table in self._uses:
            self.counts["evicted_full"][table] = self._offered[table] - self._alive[table]
        self._beside, self._waiting = [], []

    def require_kept(self) -> None:
        """Check that each table has all rows that were loaded, or evicts; ConfigurationError: drop the shard."""
        self._capacities.require_kept(self._offered, self._alive)

    def _take_rows(self, piece: TableState) -> None:
        self._offered += np.bincount(piece.tables, minlength=len(self._tables))
        # pinned ids without rows, and some whose rows were taken just now
        absent = self._taken - self._alive
        for table in self._capacities.over(self._offered + absent):
            self._lead_to_rows()
            piece = self._most_used(piece, table)
        beside = {"until": piece.until, "scores": piece.scores}
        known = piece.written, piece.sightings
        keys = piece.tables, piece.ids
        self._fresh.append(self._enter(keys, piece.values, piece.slots, *known, beside))

    def _lead_to_rows(self) -> None:
        """Enter the ids of the taken rows into the index."""
        taken, self._fresh = self._fresh, []
        for numbers in taken:
            tables, ids = self._blocks.tables[numbers].astype(np.int32), self._blocks.ids[numbers]
            if (twice := self._begin(tables, ids, numbers)) is not None:
                name = self._names[int(tables[twice])]
                raise ConfigurationError(f"id {ids[twice]} of table {name!r} has two rows")

    def _most_used(self, piece: TableState, table: int) -> TableState:
        """Return a piece without the rows for which a table has no room; remove rows that it has no room for then."""
        mine = np.flatnonzero((piece.tables == table) & ~self._pins.has(piece.tables, piece.ids))
        room, kept = int(self._capacities.rows[table]), np.ones(len(piece.ids), np.bool_)
        if (use := self._uses.get(table)) is None:
            kept[mine[max(room - int(self._taken[table]), 0) :]] = False
            return piece.only(kept, slice(None))
        room -= int(self._pins.counts[table])
        numbers, uses = use.present(self._blocks)
        ids = np.concatenate([self._blocks.ids[numbers], piece.ids[mine]])
        order = np.lexsort((ids, np.concatenate([uses, use.of_state(piece)[mine]])))
        least = order[: max(len(order) - room, 0)]
        kept[mine[least[least >= len(numbers)] - len(numbers)]] = False
        self._remove(numbers[least[least < len(numbers)]], self.version)
        use.forget_free(self._blocks)
        return piece.only(kept, slice(None))


def dealt(piece: TableState, spread: Spread) -> Iterator[tuple[int, TableState]]:
    """Yield the shards that have rows, counted ids or counters of a piece, each with its part; of one all rows."""
    order, begins = deal(piece.tables, piece.ids, spread)
    counted = shard_of(piece.counted_tables, piece.counted_ids, spread)
    for shard in range(spread.num_shards):
        begin, end = begins[shard : shard + 2].tolist()
        rows: Any = slice(begin, end) if order is None else order[begin:end]
        known: Int64s = np.flatnonzero(counted == shard)
        if end > begin or len(known) or piece.counters:
            yield shard, piece.only(rows, known)
