"""The values and slots of a shard's rows, by row number: in the dtype in which pushes compute, or packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from steepest.tables.rows.gradients import Bytes
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, kernel, read_only
from steepest.tables.rows.memory import Reserved, RowRoom
from steepest.tables.rows.row_formats import TO_NEAREST, RowFormat, as_words
from steepest.tables.rows.row_optimizers import RowOptimizer

#: The table numbers and ids of rows, (n,) each.
Keys = tuple[Int32s, Int64s]
_TURN = 256  # rows that are read at once
_PASS = 2048  # rows that are unpacked, updated and packed at once, within a processor's cache


class RowStore(Protocol):
    """Values and slots of rows. Numbers below 0 are of no row, and left out."""

    @property
    def memory(self) -> Reserved | RowRoom:
        """How many rows there is room for."""

    def gather(self, numbers: Int32s, values: Floats) -> None:
        """Copy values of rows to `values`, (n, dim)."""

    def send(self, numbers: Int32s, sent: Bytes) -> None:
        """Copy values of rows as they travel to `sent`, (n, bytes)."""

    def enter(self, numbers: Int32s, keys: Keys, values: Floats, slots: Floats) -> None:
        """Write values (n, dim) and slots (n, slots) of rows; all numbers are of rows."""

    def update(
        self,
        optimizer: RowOptimizer,
        numbers: Int32s,
        keys: Keys,
        gradients: Floats,
        version: int,
        learning_rate: float | None,
    ) -> None:
        """Update rows, see `RowOptimizer.update`."""

    def copied(self, numbers: Int32s) -> tuple[Floats, Floats]:
        """Return copies of values and slots; all numbers are of rows."""

    def in_turns(self, top: int) -> Iterator[tuple[int, Floats]]:
        """Yield the rows 0 to `top` - 1, perhaps in parts: the first one's number, and (n, dim + slots)."""

    def release(self, numbers: Int32s) -> None:
        """Note that rows are not in use any more."""


@kernel
def _gather(rows: Floats, numbers: Int32s, values: Floats) -> float:
    """Copy rows' first columns, where a number is not negative."""
    # In turns of `_TURN` rows, an item of each is read first: these reads wait for memory all at once. Their sum is
    # returned, or the compiler would leave them out.
    read, width = 0.0, values.shape[1]
    for first in range(0, len(numbers), _TURN):
        end = min(first + _TURN, len(numbers))
        for at in range(first, end):
            read += rows[max(numbers[at], 0), 0]
        for at in range(first, end):
            if numbers[at] >= 0:
                row = rows[numbers[at], :width]
                target = values[at]
                for column in range(width):
                    target[column] = row[column]
    return read


@kernel
def _scatter(rows: Floats, numbers: Int32s, values: Floats, slots: Floats) -> None:
    dim, width = values.shape[1], slots.shape[1]
    for at in range(len(numbers)):
        row, first, rest = rows[numbers[at]], values[at], slots[at]
        for column in range(dim):
            row[column] = first[column]
        for column in range(width):
            row[dim + column] = rest[column]


class WideRows:
    """Rows in the dtype in which pushes compute, see `RowStore`."""

    def __init__(self, form: RowFormat, salts: Int64s, most: int) -> None:
        width = form.dim + form.slots
        self._dim, self._dtype = form.dim, form.dtype
        self.memory = Reserved(most, form.dtype, width)
        self._rows: Floats = self.memory.array.reshape(-1, width)

    def gather(self, numbers: Int32s, values: Floats) -> None:
        """Copy values of rows."""
        if numbers.flags.writeable:
            numbers = read_only(numbers, np.int32)
        _gather(self._rows, numbers, values)

    def send(self, numbers: Int32s, sent: Bytes) -> None:
        """Copy values of rows, which travel as they are."""
        if numbers.flags.writeable:
            numbers = read_only(numbers, np.int32)
        _gather(self._rows, numbers, sent.view(self._dtype))

    def enter(self, numbers: Int32s, keys: Keys, values: Floats, slots: Floats) -> None:
        """Write values and slots."""
        numbers, values = read_only(numbers, np.int32), read_only(values, self._dtype)
        _scatter(self._rows, numbers, values, read_only(slots, self._dtype))

    def update(
        self,
        optimizer: RowOptimizer,
        numbers: Int32s,
        keys: Keys,
        gradients: Floats,
        version: int,
        learning_rate: float | None,
    ) -> None:
        """Update rows where they lie."""
        optimizer.update(self._rows, numbers, gradients, version, learning_rate)

    def copied(self, numbers: Int32s) -> tuple[Floats, Floats]:
        """Return copies of values and slots."""
        rows = self._rows.take(numbers, 0)  # an index takes up to seven times as long
        dim = self._dim
        return np.ascontiguousarray(rows[:, :dim]), np.ascontiguousarray(rows[:, dim:])

    def in_turns(self, top: int) -> Iterator[tuple[int, Floats]]:
        """Yield all rows at once."""
        yield 0, self._rows[:top]

    def release(self, numbers: Int32s) -> None:
        """Do nothing: who uses their memory next writes it anew."""


class PackedRows:
    """Rows in fewer bytes, see `RowStore` and `RowFormat`.

    Args:
        form: how they lie.
        salts: by table number, of the chances by which they are rounded.
        most: rows.
    """

    def __init__(self, form: RowFormat, salts: Int64s, most: int) -> None:
        self._form, self._salts = form, salts
        self.memory = Reserved(most, np.uint16, form.width)
        self._packed = as_words(self.memory.array.reshape(-1, form.width))
        self._rows: Floats = np.empty((_PASS, form.dim + form.slots), np.float32)  # of one pass

    def gather(self, numbers: Int32s, values: Floats) -> None:
        """Unpack values of rows."""
        self._form.unpack(self._packed, numbers, values)

    def send(self, numbers: Int32s, sent: Bytes) -> None:
        """Copy values of rows as they lie."""
        self._form.copy(self._packed, numbers, sent)

    def enter(self, numbers: Int32s, keys: Keys, values: Floats, slots: Floats) -> None:
        """Write values and slots, rounded to the nearest."""
        rows = np.concatenate([values, slots], axis=1, dtype=np.float32)
        self._form.pack(rows, numbers, keys, self._salts, TO_NEAREST, self._packed)

    def update(
        self,
        optimizer: RowOptimizer,
        numbers: Int32s,
        keys: Keys,
        gradients: Floats,
        version: int,
        learning_rate: float | None,
    ) -> None:
        """Update rows in float32, and round them by the chance of the version."""
        tables, ids = keys
        for begin in range(0, len(numbers), _PASS):
            part = slice(begin, begin + _PASS)
            mine = numbers[part]
            rows, here = self._rows[: len(mine)], np.arange(len(mine), dtype=np.int32)
            self._form.unpack(self._packed, mine, rows)
            here[mine < 0] = -1
            optimizer.update(rows, here, gradients[part], version, learning_rate)
            self._form.pack(
                rows, mine, (tables[part], ids[part]), self._salts, version, self._packed
            )

    def copied(self, numbers: Int32s) -> tuple[Floats, Floats]:
        """Return values and slots, unpacked."""
        dim = self._form.dim
        rows = np.empty((len(numbers), dim + self._form.slots), np.float32)
        self._form.unpack(self._packed, numbers, rows)
        return np.ascontiguousarray(rows[:, :dim]), np.ascontiguousarray(rows[:, dim:])

    def in_turns(self, top: int) -> Iterator[tuple[int, Floats]]:
        """Yield the rows of a pass after the other, in the same memory."""
        for begin in range(0, top, _PASS):
            numbers = np.arange(begin, min(begin + _PASS, top), dtype=np.int32)
            rows = self._rows[: len(numbers)]
            self._form.unpack(self._packed, numbers, rows)
            yield begin, rows

    def release(self, numbers: Int32s) -> None:
        """Do nothing: who uses their memory next writes it anew."""
