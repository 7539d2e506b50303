"""Rows in one block of memory: values, the optimizer's slots beside them, and what is known of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.tables.kernels import Floats, Int32s, Int64s, kernel, read_only
from steepest.tables.memory import Reserved, physical_bytes

FREE = -1  # the version at which a row was written that nobody has
_MOST = 2**31 - 2
_TURN = 256  # rows that are read at once


@kernel
def _gather(rows: Floats, numbers: Int32s, begin: int, values: Floats) -> float:
    """Copy rows from column `begin` on, where a number is not negative."""
    # In turns of `_TURN` rows, an item of each is read first: these reads wait for memory all at once. Their sum is
    # returned, or the compiler would leave them out.
    read, width = 0.0, values.shape[1]
    for first in range(0, len(numbers), _TURN):
        end = min(first + _TURN, len(numbers))
        if width:
            for at in range(first, end):
                read += rows[max(numbers[at], 0), begin]
        for at in range(first, end):
            if numbers[at] >= 0:
                row = rows[numbers[at], begin : begin + width]
                target = values[at]
                for column in range(width):
                    target[column] = row[column]
    return read


@kernel
def _scatter(rows: Floats, numbers: Int32s, begin: int, values: Floats) -> None:
    width = values.shape[1]
    for at in range(len(numbers)):
        row = rows[numbers[at], begin : begin + width]
        source = values[at]
        for column in range(width):
            row[column] = source[column]


class Blocks:
    """The rows of a shard's tables; they never move."""

    def __init__(self, dim: int, slots: int, dtype: str, most: int | None = None) -> None:
        """Reserve room for rows of `dim` values and `slots` of the optimizer."""
        # most: rows that there will be at most; without it, what the machine's memory holds.
        width = dim + slots
        room = physical_bytes() // (width * np.dtype(dtype).itemsize)
        most = min(room if most is None else most, _MOST)
        self._memory = Reserved(most, dtype, width)
        self._known = [Reserved(most, kind) for kind in (np.int64, np.int16, np.int64, np.int32)]
        self._free = Reserved(most, np.int32)
        self.dim, self.top, self.freed = dim, 0, 0
        # (capacity, dim + slots), of which rows 0 to `top` - 1 have been used
        self.rows: Floats = self._memory.array.reshape(-1, width)
        # of each row: id, table, the version that wrote it last (`FREE`: not in use), pushes with its id
        self.ids, self.tables, self.written, self.sightings = (known.array for known in self._known)

    def __len__(self) -> int:
        return self.top - self.freed

    @property
    def room(self) -> int:
        """For how many more rows there is room."""
        return min(memory.capacity for memory in (self._memory, *self._known)) - len(self)

    def require(self, count: int) -> None:
        """Check that there is room for so many more rows; ResourcesError otherwise."""
        for memory in (self._memory, *self._known):
            memory.require(len(self) + count)

    def allocate(self, tables: Int32s, ids: Int64s) -> Int32s:
        """Return row numbers for ids: those freed last, then fresh ones; all else is the caller's to set."""
        self.require(len(ids))
        reused = min(self.freed, len(ids))
        self.freed -= reused
        fresh = len(ids) - reused
        numbers = np.empty(len(ids), np.int32)
        numbers[:reused] = self._free.array[self.freed : self.freed + reused][::-1]
        numbers[reused:] = np.arange(self.top, self.top + fresh)
        self.top += fresh
        self.ids[numbers], self.tables[numbers] = ids, tables
        return numbers

    def release(self, numbers: Int32s) -> None:
        """Take rows out of use."""
        self._free.array[self.freed : self.freed + len(numbers)] = numbers
        self.freed += len(numbers)
        self.written[numbers] = FREE

    def gather(self, numbers: Int32s, values: Floats, begin: int = 0) -> None:
        """Copy rows from column `begin` on to `values` (n, columns), where a number is not negative."""
        _gather(self.rows, read_only(numbers, np.int32), begin, values)

    def scatter(self, numbers: Int32s, values: npt.NDArray[Any], begin: int = 0) -> None:
        """Copy `values` (n, columns) to rows, from column `begin` on."""
        _scatter(self.rows, read_only(numbers, np.int32), begin, read_only(values, self.rows.dtype))

    def in_use(self) -> Int32s:
        """Return the numbers of the rows that are in use, ascending."""
        return np.flatnonzero(self.written[: self.top] != FREE).astype(np.int32)
