"""The rows of a shard, and what leads to them: index and uses."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from steepest.tables.rows.blocks import Blocks
from steepest.tables.rows.capacity import Capacities
from steepest.tables.rows.cut import RowCut
from steepest.tables.rows.eviction import LFU, Use
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.index import Index
from steepest.tables.rows.kernels import Floats, Int32s, Int64s
from steepest.tables.rows.lives import RowLives
from steepest.tables.rows.row_store import Keys
from steepest.tables.rows.scores import Scores
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import Table, disk_of
from steepest.tables.rows.tiered_rows import TieredRows

_EVICTED = ("evicted_full", "evicted_age", "evicted_norm", "evicted_ttl")
_COUNTS = ("admitted", "refused", "refused_full", "ignored", *_EVICTED)


_LEAST = 1 << 16


class Removals:
    """The ids of the rows that a shard has removed, with the version of each removal.

    `known_from`: known from that version on.
    """

    def __init__(self, version: int = 0) -> None:
        self.known_from = version
        self._removed: deque[tuple[int, Int32s, Int64s]] = deque()  # version, tables, ids
        self._count = 0

    def add(self, version: int, tables: Int32s, ids: Int64s, rows: int) -> None:
        """Remember keys (n,) removed at a version; forget the oldest where there are more than the shard's `rows`."""
        if not len(ids):
            return
        self._removed.append((version, tables, ids))
        self._count += len(ids)
        while self._count > max(_LEAST, rows):
            forgotten, _, old = self._removed.popleft()
            self._count -= len(old)
            self.known_from = forgotten + 1

    def since(self, version: int) -> Distinct:
        """Return the keys of rows that were removed at a version or later; some may be back."""
        gone = [item for item in self._removed if item[0] >= version]
        tables = np.concatenate([np.empty(0, np.int32), *(item[1] for item in gone)])
        ids = np.concatenate([np.empty(0, np.int64), *(item[2] for item in gone)])
        return Distinct(tables, ids)


class ShardRows:
    """The rows of a shard: made, removed, and counted; see `TableShard` for what decides that.

    Args:
        tables: the group.
        spread: of its keys.
        shard: which of the shards this is.
        salts: of the tables, see `salt_of`.
    """

    version: int
    life: int
    counts: dict[str, Int64s]

    def __init__(
        self, tables: Sequence[Table], spread: Spread, shard: int, salts: Sequence[int]
    ) -> None:
        self._tables = tuple(tables)
        self._spread, self._shard = spread, shard
        self._form = tables[0].form
        self._salts: Int64s = np.array(salts, np.uint64).view(np.int64)
        # a table that is frozen keeps its rows
        self._lives = RowLives([table.life if table.trainable else 0 for table in tables])
        policies = [table.eviction for table in tables]
        self._scores = Scores(
            [(policy.half_life or 0) if isinstance(policy, LFU) else 0 for policy in policies]
        )
        self._capacities = Capacities(tables, spread, shard)
        self._pins = self._capacities.pins
        self._clear()

    def _clear(self) -> None:
        """Drop all rows."""
        most = self._capacities.most
        known = {"ends": self._lives.any, "scored": self._scores.any}
        disk = disk_of(self._tables, self._spread, self._shard)
        self._blocks = Blocks(self._form, self._salts, most, **known, disk=disk)
        self._index = Index(len(self._tables), most)
        self._uses = {
            number: Use(table.eviction, int(self._capacities.rows[number]))
            for number, table in enumerate(self._tables)
            if table.eviction is not None
        }
        self._alive = np.zeros(len(self._tables), np.int64)
        self._taken = self._pins.counts.copy()  # see `Capacities`
        self._removals = Removals()
        self._cuts: WeakSet[RowCut] = WeakSet()
        self.life = secrets.randbits(62)
        self.counts = {name: np.zeros(len(self._tables), np.int64) for name in _COUNTS}
        self.version = 0

    def disk_counts(self) -> dict[str, int]:
        """Return the rows "looked_up", those "read_from_disk", and "bytes_on_disk"; nothing where all are in memory."""
        store = self._blocks.store
        if not isinstance(store, TieredRows):
            return {}
        names = ("looked_up", "read_from_disk", "bytes_on_disk")
        return dict(zip(names, (store.looked_up, store.read, store.nbytes_on_disk), strict=True))

    def read_ahead(self, tables: Int32s, ids: Int64s) -> list[Future[int]]:
        """Start to read the rows (n,) that are on disk into the system's cache, and return these reads.

        Any number of pulls and pushes may be made meanwhile. Nothing is returned where there are few.
        """
        store = self._blocks.store
        if not isinstance(store, TieredRows):
            return []
        return store.read_ahead(self._index.find(tables, ids)[0])

    @property
    def disk_seconds(self) -> float:
        """How long reads and writes of rows on disk have taken."""
        store = self._blocks.store
        return store.disk.seconds if isinstance(store, TieredRows) else 0.0

    @property
    def disk_since(self) -> float | None:
        """When the read or write under way began, on the system's clock; None between two."""
        store = self._blocks.store
        return store.disk.since if isinstance(store, TieredRows) else None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._blocks)

    def rows_of(self) -> Int64s:
        """Return the number of rows of each table."""
        return np.array(self._alive)

    def sightings_of(self, tables: Int32s, ids: Int64s) -> Int32s:
        """Return how often each id was in a push since its row was made, -1 without a row."""
        numbers, _ = self._index.find(tables, ids)
        return np.where(numbers < 0, np.int32(-1), self._blocks.sightings[numbers])

    def _make_room(self, excess: Int64s, version: int) -> None:
        """Evict the least used rows that are not in this push."""
        for table in map(int, np.flatnonzero(excess)):
            victims = self._uses[table].take(int(excess[table]), version, self._blocks)
            self._remove(victims, version)
            self.counts["evicted_full"][table] += excess[table]

    def _enter(
        self,
        keys: Keys,
        values: Floats,
        slots: Floats,
        written: Int64s | np.int64,
        sightings: Int32s,
        beside: Mapping[str, Int64s],
    ) -> Int32s:
        """Return the numbers of new rows for (tables, ids), written as they are given.

        Args:
            keys, values, slots, written, sightings: of the rows.
            beside: what else is known of them, by the names of `Blocks`; the rest is 0.
        """
        blocks, (tables, ids) = self._blocks, keys
        numbers, where = blocks.allocate(tables, ids)
        blocks.written[where], blocks.sightings[where] = written, sightings
        for name in ("until", "scores"):
            if (known := getattr(blocks, name)) is not None:
                known[where] = beside.get(name, 0)
        blocks.store.enter(numbers, keys, values, slots)
        return numbers

    def _begin(self, tables: Int32s, ids: Int64s, numbers: Int32s) -> int | None:
        """Enter ids of rows into the index; return the place of an id that has another row already, or None."""
        if (twice := self._index.insert(tables, ids, numbers)) is not None:
            return twice
        self._alive += np.bincount(tables, minlength=len(self._tables))
        others = ~self._pins.has(tables, ids)
        self._taken += np.bincount(tables[others], minlength=len(self._tables))
        for table, use in self._uses.items():
            use.enter(numbers[others & (tables == table)], self._blocks)
        return None

    def _are_pinned(self, numbers: Int32s) -> npt.NDArray[np.bool_]:
        """Return which rows are of pinned ids."""
        blocks = self._blocks
        return self._pins.has(blocks.tables[numbers].astype(np.int32), blocks.ids[numbers])

    def _remove(self, numbers: Int32s, version: int) -> None:
        """Remove rows, of ids that are not pinned; the next row in their memory sets values and slots anew."""
        blocks = self._blocks
        for cut in self._cuts:
            cut.keep(cut.before(numbers))
        tables, ids = blocks.tables[numbers].astype(np.int32), blocks.ids[numbers]
        self._index.remove(tables, ids)
        gone = np.bincount(tables, minlength=len(self._tables))
        self._alive -= gone
        self._taken -= gone
        self._removals.add(version, tables, ids, len(blocks))
        blocks.release(numbers)
