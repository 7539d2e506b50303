"""What is known of each row of a shard, by row number: id, table, the version that wrote it, and its sightings."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from steepest.errors import ResourcesError
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.memory import Reserved, physical_bytes
from steepest.tables.rows.row_formats import RowFormat
from steepest.tables.rows.row_store import PackedRows, RowStore, WideRows
from steepest.tables.rows.tiered_rows import TieredRows

FREE = -1  # the version at which a row was written that nobody has
_MOST = 2**31 - 2
_AHEAD = 8  # times the rows that a batch may add, for which room on disk is taken
_KNOWN_BYTES = 30  # in memory, of a row that is on disk


class Blocks:
    """The rows of a shard's tables; they never move.

    Attributes:
        store: values and slots.
        until: when each row's life ends, uint32 seconds since the epoch, 0 where it is not known; None where rows
            stay.
        scores: by which a full table evicts, see `steepest.tables.rows.scores`; None where none does.
    """

    def __init__(
        self,
        form: RowFormat,
        salts: Int64s,
        most: int | None = None,
        *,
        ends: bool = False,
        scored: bool = False,
        disk: tuple[str, int] | None = None,
    ) -> None:
        """Reserve room for rows of a format; `salts`: of the tables, which decide how rows are rounded."""
        # ends: whether rows have a time to live; scored: whether they have scores;
        # disk: a directory, and the rows that are to be in memory; None for all.
        # most: rows that there will be at most; without it, what the machine's memory holds.
        room = physical_bytes() // (form.row_bytes if disk is None else _KNOWN_BYTES)
        most = min(room if most is None else most, _MOST)
        self.store: RowStore
        if disk is not None:
            self.store = TieredRows(form, salts, most, *disk)
        else:
            self.store = (PackedRows if form.is_packed else WideRows)(form, salts, most)
        self._known = [Reserved(most, kind) for kind in (np.int64, np.int16, np.int64, np.int32)]
        self.until: npt.NDArray[np.uint32] | None = None
        if ends:
            self._known.append(Reserved(most, np.uint32))
            self.until = self._known[-1].array
        self.scores: Int64s | None = None
        if scored:
            self._known.append(Reserved(most, np.int64))
            self.scores = self._known[-1].array
        self._free = Reserved(most, np.int32)
        self._several = len(salts) > 1
        # rows for which there is room without a look: none where it depends on a disk
        self._surely = 0 if isinstance(self.store, TieredRows) else self._capacity()
        # rows 0 to `top` - 1 have been used
        self.dim, self.top, self.freed = form.dim, 0, 0
        # of each row: id, table, the version that wrote it last (`FREE`: not in use), pushes with its id
        self.ids, self.tables, self.written, self.sightings = (
            known.array for known in self._known[:4]
        )

    def __len__(self) -> int:
        return self.top - self.freed

    def _capacity(self) -> int:
        return min(memory.capacity for memory in (self.store.memory, *self._known))

    def require(self, count: int) -> None:
        """Check that there is room for so many more rows; ResourcesError otherwise."""
        for memory in (self.store.memory, *self._known):
            memory.require(len(self) + count)

    def has_room(self, count: int) -> bool:
        """Return whether there is room for so many more rows, and take room on disk for more than these if there is."""
        if len(self) + _AHEAD * count <= self._surely:
            return True
        try:
            self.require(count)
        except ResourcesError:
            return False
        with contextlib.suppress(ResourcesError):  # pushes of others may be applied before this one
            self.store.memory.require(len(self) + _AHEAD * count)
        return True

    def allocate(self, tables: Int32s, ids: Int64s) -> tuple[Int32s, Int32s | slice]:
        """Return row numbers for ids: those freed last, then fresh ones; all else is the caller's to set.

        Returns:
            The numbers, and the same as an index of rows: a slice where all are fresh, which is faster.
        """
        self.require(len(ids))
        reused = min(self.freed, len(ids))
        self.freed -= reused
        fresh = len(ids) - reused
        numbers = np.empty(len(ids), np.int32)
        numbers[:reused] = self._free.array[self.freed : self.freed + reused][::-1]
        numbers[reused:] = np.arange(self.top, self.top + fresh)
        where = numbers if reused else slice(self.top, self.top + fresh)
        self.top += fresh
        self.ids[where] = ids
        if self._several:  # memory that is never written is never taken
            self.tables[where] = tables
        return numbers, where

    def release(self, numbers: Int32s) -> None:
        """Take rows out of use."""
        self._free.array[self.freed : self.freed + len(numbers)] = numbers
        self.freed += len(numbers)
        self.written[numbers] = FREE
        self.store.release(numbers)
