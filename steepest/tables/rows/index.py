"""From (table, id) to row number: a hash index that grows a segment at a time.

An entry is an id of 8 bytes and a row number of 4; five of them and a count fill a bucket, which is
a cache line. 512 buckets are a segment. A table's directory maps the first bits of a hash to
segments (extendible hashing: Fagin, Nievergelt, Pippenger, Strong 1979). A segment that is 85 % full is
split in two, which takes microseconds, and nothing else moves: no request waits for a table to be
copied. Segments would all fill at the same time; so hashes are spread unevenly (spiral hashing:
Martin 1979), such that at any time some segments have just been split and others will be soon, and the
whole is always 63 % full, or 20 bytes for an entry.

A bucket's count says how many entries went past it because it was full (F14's way), so that a search
ends at once in most buckets, and a removal leaves no trace.
"""

from __future__ import annotations

import math
from operator import sub
from typing import NamedTuple

import numpy as np

from steepest.errors import ResourcesError
from steepest.tables.rows.hashing import mix
from steepest.tables.rows.kernels import Int32s, Int64s, inlined, kernel, read_only
from steepest.tables.rows.memory import Reserved, physical_bytes

BUCKETS = 512  # of a segment, a power of two
ENTRIES = 5  # of a bucket
_TURN = 256  # ids whose buckets are read at once
_FULL = int(0.85 * BUCKETS * ENTRIES)
_EXPECTED = 0.92 * _FULL  # so that chance fills few segments further
_ROWS, _PASSED = 10, 15  # where a bucket, as int32, has its row numbers plus one, and its count
_BITS = 30  # of a hash, which lead to a segment
_LOW = np.uint64(BUCKETS - 1)
_TOP, _BITS_U = np.uint64(64 - _BITS), np.uint64(_BITS)
_TWICE, _THREE = np.uint64(2 << _BITS), np.uint64(3)
_PLACE, _DEPTH = (
    0,
    1,
)  # columns of `heads`: where a table's directory begins, and its size's logarithm


class Segments(NamedTuple):
    """An index's memory, as kernels take it."""

    heads: Int64s  # (tables, 2), where a table's directory begins, and the logarithm of its size
    directory: Int32s  # of each table the segments to which the first bits of spread hashes lead
    keys: Int64s  # (buckets, 8) int64, of which the first five are ids
    rows: Int32s  # the same memory as (buckets, 16) int32
    fills: Int32s  # entries of each segment


@inlined
def _spread(hashed: np.uint64) -> np.uint64:
    """Return `_BITS` bits that are denser among small numbers, twice as dense at 0 as at the end."""
    even = hashed >> _TOP
    spread: np.uint64 = (even * (_TWICE + even) // _THREE) >> _BITS_U
    return spread


@inlined
def _segment(hashed: np.uint64, table: np.int32, index: Segments) -> np.int64:
    depth = np.uint64(index.heads[table, _DEPTH])
    place = index.heads[table, _PLACE] + np.int64(_spread(hashed) >> (_BITS_U - depth))
    segment: np.int64 = np.int64(index.directory[place])
    return segment


@inlined
def _row_in(bucket: np.int64, key: np.int64, index: Segments) -> np.int32:
    """Return the row number plus one of an id in a bucket, or 0; without a branch to predict."""
    # An entry without a row may still have the id, but stands behind the entry that has both: that one was the first
    # without a row when the id was entered.
    place = _PASSED
    for entry in range(ENTRIES - 1, -1, -1):
        place = _ROWS + entry if index.keys[bucket, entry] == key else place
    row: np.int32 = index.rows[bucket, place]
    return row if place != _PASSED else np.int32(0)


@inlined
def _next(bucket: np.int64) -> np.int64:
    """Return the bucket of the same segment to which entries go that a bucket has no room for."""
    following: np.int64 = (bucket & ~(BUCKETS - 1)) + ((bucket + 1) & (BUCKETS - 1))
    return following


@inlined
def _row_beyond(bucket: np.int64, key: np.int64, index: Segments) -> np.int32:
    """Return the row number plus one of an id that is not in its first bucket, or 0."""
    row: np.int32 = np.int32(0)
    while row == 0 and index.rows[bucket, _PASSED] != 0:
        bucket = _next(bucket)
        row = _row_in(bucket, key, index)
    return row


@kernel
def _find(tables: Int32s, ids: Int64s, index: Segments, found: Int32s) -> tuple[int, int]:
    """Fill in row numbers, -1 where there is none; return how many there are none of."""
    # In turns of `_TURN` ids, a word of each id's bucket is read first: these reads wait for memory all at once, those
    # of whole searches for one another. What is read is returned too, or the compiler would leave it out.
    buckets, rest = np.empty(_TURN, np.int64), np.empty(_TURN, np.int64)
    missing, read = 0, 0
    for begin in range(0, len(ids), _TURN):
        count = min(_TURN, len(ids) - begin)
        for at in range(count):
            hashed = mix(np.uint64(ids[begin + at]))
            segment = _segment(hashed, tables[begin + at], index)
            buckets[at] = segment * BUCKETS + np.int64(hashed & _LOW)
        for at in range(count):
            read += index.keys[buckets[at], 0]
        left = 0
        for at in range(count):
            row = _row_in(buckets[at], ids[begin + at], index)
            found[begin + at] = row - 1
            rest[left] = at
            left += np.int64(row == 0)
        for turn in range(left):
            read += index.keys[_next(buckets[rest[turn]]), 0]
        for turn in range(left):
            at = rest[turn]
            row = _row_beyond(buckets[at], ids[begin + at], index)
            found[begin + at] = row - 1
            missing += row == 0
    return missing, read


@inlined
def _put(begin: int, place: int, key: int, row: int, index: Segments) -> None:
    """Enter an id that is not there into a segment that is not full."""
    while True:
        bucket = begin + place
        for entry in range(ENTRIES):
            if index.rows[bucket, _ROWS + entry] == 0:
                index.keys[bucket, entry] = key
                index.rows[bucket, _ROWS + entry] = row + 1
                return
        index.rows[bucket, _PASSED] += 1
        place = (place + 1) & (BUCKETS - 1)


@kernel
def _split(segment: int, fresh: int, bit: np.uint64, index: Segments) -> None:
    """Move the entries whose spread hash has `bit` from a segment to a fresh one."""
    first, end = segment * BUCKETS, (segment + 1) * BUCKETS
    old_keys, old_rows = index.keys[first:end].copy(), index.rows[first:end].copy()
    index.rows[first:end] = 0
    index.fills[segment] = index.fills[fresh] = 0
    for bucket in range(BUCKETS):
        for entry in range(ENTRIES):
            row = old_rows[bucket, _ROWS + entry] - 1
            if row >= 0:
                key = np.int64(old_keys[bucket, entry])
                hashed = mix(np.uint64(key))
                target = fresh if _spread(hashed) & bit else segment
                _put(target * BUCKETS, np.int64(hashed & _LOW), key, row, index)
                index.fills[target] += 1


@kernel
def _insert(
    tables: Int32s, ids: Int64s, numbers: Int32s, begin_at: int, index: Segments
) -> tuple[int, int, int]:
    """Enter ids from `begin_at` on; return their number and 0, or where it ends before.

    That is at an id whose segment is full: its spread hash is returned too; or at one that is there: -1 is.
    """
    # In turns, as `_find`.
    read = 0
    for begin in range(begin_at, len(ids), _TURN):
        end = min(begin + _TURN, len(ids))
        for at in range(begin, end):
            hashed = mix(np.uint64(ids[at]))
            segment = _segment(hashed, tables[at], index)
            read += index.keys[segment * BUCKETS + np.int64(hashed & _LOW), 0]
        for at in range(begin, end):
            hashed = mix(np.uint64(ids[at]))
            segment = _segment(hashed, tables[at], index)
            if index.fills[segment] >= _FULL:
                return at, np.int64(_spread(hashed)), read
            bucket = segment * BUCKETS + np.int64(hashed & _LOW)
            if _row_in(bucket, ids[at], index) or _row_beyond(bucket, ids[at], index):
                return at, -1, read
            index.fills[segment] += 1
            _put(segment * BUCKETS, np.int64(hashed & _LOW), ids[at], numbers[at], index)
    return len(ids), 0, read


@kernel
def _remove(tables: Int32s, ids: Int64s, index: Segments) -> None:
    """Take out ids that are there."""
    for at in range(len(ids)):
        hashed = mix(np.uint64(ids[at]))
        segment = _segment(hashed, tables[at], index)
        begin, place = segment * BUCKETS, np.int64(hashed & _LOW)
        index.fills[segment] -= 1
        gone = False
        while not gone:
            bucket = begin + place
            for entry in range(ENTRIES):
                if index.keys[bucket, entry] == ids[at] and index.rows[bucket, _ROWS + entry]:
                    index.rows[bucket, _ROWS + entry] = 0
                    gone = True
            if not gone:
                index.rows[bucket, _PASSED] -= 1
            place = (place + 1) & (BUCKETS - 1)


class Index:
    """A map from (table, id from 0 to 2^63 - 1) to a row number, 0 to 2^31 - 2, of all tables of a group."""

    def __init__(self, num_tables: int, most: int | None = None) -> None:
        """Begin with an empty segment for each table, for `most` entries, or what the machine's memory holds."""
        most = min(physical_bytes() // 16 if most is None else most, 2**31 - 2)
        segments = 2 * num_tables + 4 * most // (BUCKETS * ENTRIES)
        memory = Reserved(segments * BUCKETS, np.int64, 8)
        most_segments = memory.capacity // BUCKETS
        heads = np.zeros((num_tables, 2), np.int64)
        heads[:, _PLACE] = np.arange(num_tables)
        self._memory = Segments(
            heads,
            np.arange(num_tables, dtype=np.int32),
            memory.array,
            memory.array.view(np.int32),
            np.zeros(most_segments, np.int32),
        )
        self._depths = np.zeros(
            most_segments, np.int8
        )  # leading bits that a segment's hashes share
        self._used = num_tables

    @property
    def nbytes(self) -> int:
        """The memory of the segments and directories that are in use."""
        return self._used * (BUCKETS * 64 + 5) + self._memory.directory.nbytes

    def find(self, tables: Int32s, ids: Int64s) -> tuple[Int32s, int]:
        """Return the row number of each (table, id), -1 for none; and of how many there is none."""
        slots = np.empty(len(ids), np.int32)
        if tables.flags.writeable or ids.flags.writeable:
            tables, ids = read_only(tables, np.int32), read_only(ids, np.int64)
        missing, _ = _find(tables, ids, self._memory, slots)
        return slots, missing

    def insert(self, tables: Int32s, ids: Int64s, numbers: Int32s) -> int | None:
        """Map each (table, id) to a row number; return None, or the place of the first that is there already.

        Raises:
            ResourcesError: there is no room for more.
        """
        tables, ids = read_only(tables, np.int32), read_only(ids, np.int64)
        numbers = read_only(numbers, np.int32)
        at, spread, _ = _insert(tables, ids, numbers, 0, self._memory)
        while at < len(ids):
            if spread < 0:
                return at
            self._grow(int(tables[at]), spread)
            at, spread, _ = _insert(tables, ids, numbers, at, self._memory)
        return None

    def expect(self, counts: Int64s) -> None:
        """Split the empty segments of tables for so many ids of each, so that few are split later."""
        for table, count in enumerate(counts.tolist()):
            todo = [(0, 1 << _BITS)] if count > _EXPECTED else []  # spread hashes: from, to
            while todo:
                begin, end = todo.pop()
                ends = (math.sqrt(1 + 3 * at / (1 << _BITS)) for at in (begin, end))
                if count * -sub(*ends) > _EXPECTED and end - begin > 1:
                    self._grow(table, begin)
                    middle = (begin + end) // 2
                    todo += [(begin, middle), (middle, end)]

    def remove(self, tables: Int32s, ids: Int64s) -> None:
        """Take out each (table, id), distinct and there."""
        _remove(read_only(tables, np.int32), read_only(ids, np.int64), self._memory)

    def entries(self) -> tuple[Int32s, Int64s, Int32s]:
        """Return the tables, ids and row numbers of all entries, in no particular order."""
        table_of = np.zeros(self._used, np.int32)
        for table, (place, depth) in enumerate(self._memory.heads):
            table_of[self._memory.directory[place : place + (1 << int(depth))]] = table
        used = self._used * BUCKETS
        numbers = self._memory.rows[:used, _ROWS : _ROWS + ENTRIES]
        bucket, entry = np.nonzero(numbers)
        ids: Int64s = self._memory.keys[bucket, entry]
        return table_of[bucket // BUCKETS], ids, numbers[bucket, entry] - 1

    def _grow(self, table: int, spread: int) -> None:
        """Split the segment to which a spread hash leads; double its table's directory if needed."""
        if self._used == len(self._depths):
            raise ResourcesError(
                f"no room for more ids: {self._used * BUCKETS * 64:,} bytes of address space are "
                "used up. Set a table's capacity, or use more servers"
            )
        place, depth = (int(value) for value in self._memory.heads[table])
        segment = int(self._memory.directory[place + (spread >> (_BITS - depth))])
        local = int(self._depths[segment])
        if local == _BITS:
            raise ResourcesError(f"no room for more ids in table {table}: use more servers")
        if local == depth:
            self._double(table)
            place, depth = (int(value) for value in self._memory.heads[table])
        fresh = self._used
        self._used += 1
        if self._memory.fills[segment]:
            _split(segment, fresh, np.uint64(1 << (_BITS - local - 1)), self._memory)
        self._depths[segment] = self._depths[fresh] = local + 1
        span = 1 << (depth - local)  # entries of the directory that led to the segment
        first = place + ((spread >> (_BITS - local)) << (depth - local))
        self._memory.directory[first + span // 2 : first + span] = fresh

    def _double(self, table: int) -> None:
        """Write a table's directory anew, at the end, with an entry more for each."""
        place, depth = (int(value) for value in self._memory.heads[table])
        directory = self._memory.directory
        old = directory[place : place + (1 << depth)]
        self._memory.heads[table] = len(directory), depth + 1
        grown = np.concatenate([directory, np.repeat(old, 2)])
        self._memory = self._memory._replace(directory=grown)
