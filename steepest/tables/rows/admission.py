"""Which ids get a row: all, those seen often enough, or some by chance. Names are DeepRec's.

A sighting is an id's occurrence in a pushed batch, so that admissions follow the order of pushes, and a
replay of the pushes decides the same. The push with which an id is admitted updates its row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.hashing import GAMMA, mix
from steepest.tables.rows.index import Index
from steepest.tables.rows.kernels import Int32s, Int64s, kernel, read_only
from steepest.tables.rows.state import TableState
from steepest.validation import require_count, require_number

Bools = npt.NDArray[np.bool_]
_MOST_COUNTED = 2**31 - 2  # what an index can map an id to


@dataclass(frozen=True)
class CounterFilter:
    """An id is admitted at its `filter_freq`-th sighting, counted exactly, in 22 to 24 bytes an id.

    Attributes:
        filter_freq: sightings until an id is admitted.
    """

    filter_freq: int

    def __post_init__(self) -> None:
        require_count("CounterFilter(filter_freq)", self.filter_freq)


@dataclass(frozen=True, kw_only=True)
class CBFFilter:
    """As `CounterFilter`, counted in a counting Bloom filter, in whose counters ids may coincide.

    An id is never admitted later than by an exact count. What an id was seen before it was evicted
    stays counted.

    Attributes:
        filter_freq: sightings until an id is admitted.
        max_element_size: ids that are to be counted, over all shards, each of which has so many counters.
        false_positive_probability: of an id that is counted too high, when there are so many.
        counter_type: of a counter: "uint8", "uint16" or "uint32".
    """

    filter_freq: int
    max_element_size: int
    false_positive_probability: float = 0.01
    counter_type: str = "uint8"

    def __post_init__(self) -> None:
        require_count("CBFFilter(filter_freq)", self.filter_freq)
        require_count("CBFFilter(max_element_size)", self.max_element_size)
        wrong = self.false_positive_probability
        require_number("CBFFilter(false_positive_probability)", wrong, 1e-9, 0.5)
        if self.counter_type not in ("uint8", "uint16", "uint32"):
            raise ConfigurationError(
                f"CBFFilter(counter_type={self.counter_type!r}): give uint8, uint16 or uint32"
            )
        if self.filter_freq > np.iinfo(self.counter_type).max:
            raise ConfigurationError(
                f"CBFFilter(filter_freq={self.filter_freq}): a counter of {self.counter_type} counts to "
                f"{np.iinfo(self.counter_type).max}; give a wider counter_type"
            )

    def size(self) -> int:
        """Return the number of counters: -n ln p / (ln 2)^2."""
        bits = -self.max_element_size * math.log(self.false_positive_probability)
        return max(8, math.ceil(bits / math.log(2) ** 2))

    def hashes(self) -> int:
        """Return how many counters an id has: -log2 p."""
        return max(1, round(-math.log2(self.false_positive_probability)))


@dataclass(frozen=True)
class ProbabilityFilter:
    """An id is admitted by each push that it is in with a probability, decided by seed, id and version.

    Attributes:
        probability: from 0 to 1.
    """

    probability: float

    def __post_init__(self) -> None:
        require_number("ProbabilityFilter(probability)", self.probability, 0.0, 1.0)


Filter = CounterFilter | CBFFilter | ProbabilityFilter


@kernel
def _bloom(
    ids: Int64s, sightings: Int32s, hashes: int, counters: Any, seen: Int64s, write: bool
) -> None:
    """Fill in how often ids have been seen, these sightings included; count them if `write`."""
    # Only the least of an id's counters are raised (conservative update: Estan and Varghese 2002).
    size = np.uint64(len(counters))
    most = np.int64(np.iinfo(counters.dtype).max)
    for at in range(len(ids)):
        hashed = mix(np.uint64(ids[at]))
        step = mix(hashed + GAMMA) | np.uint64(1)
        least = most
        for turn in range(hashes):
            least = min(least, np.int64(counters[(hashed + np.uint64(turn) * step) % size]))
        seen[at] = min(least + np.int64(sightings[at]), most)
        if write:
            for turn in range(hashes):
                place = (hashed + np.uint64(turn) * step) % size
                counters[place] = max(np.int64(counters[place]), seen[at])


@kernel
def _by_chance(
    ids: Int64s, salt: np.uint64, version: int, most: np.uint64, admitted: Bools
) -> None:
    for at in range(len(ids)):
        drawn = mix(mix(np.uint64(ids[at]) ^ salt) + GAMMA * np.uint64(version))
        admitted[at] = (drawn >> np.uint64(11)) < most


class Admission:
    """What a shard knows of ids without rows."""

    def __init__(self, filters: Sequence[Filter | None], salts: Sequence[int]) -> None:
        """Take the filter of each table, or None, and its 64 bits from `salt_of`."""
        self._filters, self._salts = tuple(filters), tuple(salts)
        # by table number, of the tables with a `CBFFilter`
        self.counters = {
            table: np.zeros(way.size(), way.counter_type)
            for table, way in enumerate(filters)
            if isinstance(way, CBFFilter)
        }
        exact = any(isinstance(way, CounterFilter) for way in filters)
        # sightings less one, by (table, id), of the tables with a `CounterFilter`
        self.counted = Index(len(filters)) if exact else None

    @property
    def filters(self) -> bool:
        """Whether there is a table that does not admit every id."""
        return any(way is not None for way in self._filters)

    def admits(self, tables: Int32s, ids: Int64s, sightings: Int32s, version: int) -> Bools:
        """Return which ids, distinct and without rows, a push admits; count nothing."""
        admitted = np.ones(len(ids), np.bool_)
        for table, way in enumerate(self._filters):
            of = np.flatnonzero(tables == table) if way is not None else ()
            if len(of):
                admitted[of] = self._admits(table, ids[of], sightings[of], version)
        return admitted

    def _admits(self, table: int, ids: Int64s, sightings: Int32s, version: int) -> Bools:
        way = self._filters[table]
        if isinstance(way, ProbabilityFilter):
            admitted = np.empty(len(ids), np.bool_)
            most = np.uint64(int(way.probability * 2**53))
            _by_chance(
                read_only(ids, np.int64), np.uint64(self._salts[table]), version, most, admitted
            )
            return admitted
        assert way is not None
        if isinstance(way, CBFFilter):
            return self._count(table, way, ids, sightings, write=False) >= way.filter_freq
        assert self.counted is not None
        before, _ = self.counted.find(np.full(len(ids), table, np.int32), ids)
        return before.astype(np.int64) + 1 + sightings >= way.filter_freq

    def _count(
        self, table: int, way: CBFFilter, ids: Int64s, sightings: Int32s, *, write: bool
    ) -> Int64s:
        seen = np.empty(len(ids), np.int64)
        _bloom(
            read_only(ids, np.int64),
            read_only(sightings, np.int32),
            way.hashes(),
            self.counters[table],
            seen,
            write,
        )
        return seen

    def count(self, tables: Int32s, ids: Int64s, sightings: Int32s, admitted: Bools) -> None:
        """Count a push's sightings of ids without rows; forget the exact counts of those admitted."""
        for table, way in enumerate(self._filters):
            if isinstance(way, CBFFilter):
                of = tables == table
                self._count(table, way, ids[of], sightings[of], write=True)
            elif isinstance(way, CounterFilter):
                of = tables == table
                self._count_exactly(tables[of], ids[of], sightings[of], admitted[of])

    def _count_exactly(
        self, tables: Int32s, ids: Int64s, sightings: Int32s, admitted: Bools
    ) -> None:
        assert self.counted is not None
        before, _ = self.counted.find(tables, ids)
        known = before >= 0
        self.counted.remove(tables[known], ids[known])
        after = np.minimum(before.astype(np.int64) + sightings, _MOST_COUNTED)
        rest = ~admitted
        self.counted.insert(tables[rest], ids[rest], after[rest].astype(np.int32))

    def exact(self) -> tuple[Int32s, Int64s, Int32s]:
        """Return tables, ids and sightings of the ids that are counted exactly."""
        if self.counted is None:
            return np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32)
        tables, ids, before = self.counted.entries()
        return tables, ids, before + 1

    def load(self, state: TableState) -> None:
        """Replace all counts by those of a state."""
        if self.counted is not None:
            self.counted = Index(len(self._filters))
            ways = [isinstance(way, CounterFilter) for way in self._filters]
            of = np.array(ways)[state.counted_tables]
            self.counted.insert(
                state.counted_tables[of], state.counted_ids[of], state.counted[of] - 1
            )
        before, self.counters = self.counters, {}
        for table, counter in before.items():
            fresh = np.zeros_like(counter)
            saved = state.counters.get(table, fresh)
            same = saved.shape == fresh.shape and saved.dtype == fresh.dtype
            self.counters[table] = saved.copy() if same else fresh
