"""Rows on disk, of which memory has those used of late, see `RowStore`.

Which rows are where changes no number: rows are updated in memory alone, and lie on disk as they do there.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from steepest.tables.rows.gradients import Bytes
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, kernel, read_only
from steepest.tables.rows.memory import Reserved, RowRoom
from steepest.tables.rows.row_formats import RowFormat
from steepest.tables.rows.row_log import Octets, RowLog
from steepest.tables.rows.row_optimizers import RowOptimizer
from steepest.tables.rows.row_store import Keys, PackedRows, WideRows

_NONE = -1
_TURN = 2048  # rows that are copied at once, past the places of rows in memory
#: Of reads that are expected to take less, none is handed to other threads, which takes a server some 0.1 ms itself.
_WORTH_SECONDS = 2e-4
_LEAST = 256  # places for rows in memory
_PLACE_BYTES = 5  # of what is known of a place
_LISTED = -1  # in place of a place: that a row is among those that are missing
_FREE, _SEEN, _NEEDED = (
    0,
    1,
    2,
)  # how a place is marked: for the next row, used since the hand passed, by this call


@kernel
def _find(
    numbers: Int32s, place_of: Int32s, marks: npt.NDArray[np.uint8], places: Int32s, missing: Int32s
) -> int:
    """Fill in the places of rows; list those that have none once, and return how many they are."""
    count = 0
    for at in range(len(numbers)):
        number = numbers[at]
        places[at] = _NONE
        if number < 0:
            continue
        place = place_of[number] - 1
        if place >= 0:
            marks[place] = _NEEDED
            places[at] = place
        elif place == _NONE:
            missing[count] = number
            place_of[number] = _LISTED
            count += 1
    return count


@kernel
def _take(count: int, hand: int, marks: npt.NDArray[np.uint8], taken: Int32s) -> int:
    """Take places that were not used since the hand was there last; return where the hand is."""
    # A clock (Corbato 1968): a place that was used is passed once.
    chosen = 0
    while chosen < count:
        if marks[hand] == _FREE:
            taken[chosen] = hand
            marks[hand] = _NEEDED
            chosen += 1
        elif marks[hand] == _SEEN:
            marks[hand] = _FREE
        hand += 1
        if hand == len(marks):
            hand = 0
    return hand


@kernel
def _settle(
    numbers: Int32s, place_of: Int32s, marks: npt.NDArray[np.uint8], places: Int32s
) -> None:
    """Fill in the places that rows have now, and mark them as used."""
    for at in range(len(numbers)):
        if numbers[at] >= 0:
            places[at] = place_of[numbers[at]] - 1
            marks[places[at]] = _SEEN


def bytes_of(rows: int, form: RowFormat) -> int:
    """Return the memory of places for so many rows, and of those for rows that pass."""
    return rows * (form.row_bytes + _PLACE_BYTES) + _TURN * form.row_bytes


def rows_in(memory_bytes: int, form: RowFormat) -> tuple[int, int]:
    """Return for how many rows there are places in so much memory, perhaps none, and how many there must be."""
    passing = bytes_of(0, form)
    return max(memory_bytes - passing, 0) // (form.row_bytes + _PLACE_BYTES), _LEAST


class TieredRows:
    """Rows in memory and on disk.

    Args:
        form: how they lie.
        salts: by table number, of the chances by which they are rounded.
        most: rows.
        directory: of the file.
        memory_rows: places in memory, at least 256.
        segment: records in a segment of the file; by default those of a MB.

    Attributes:
        looked_up, read: rows that were asked for, and those of them that were on disk.
    """

    def __init__(
        self,
        form: RowFormat,
        salts: Int64s,
        most: int,
        directory: str,
        memory_rows: int,
        segment: int | None = None,
    ) -> None:
        places = min(max(memory_rows, _LEAST), max(most, _LEAST))
        self._rows = (PackedRows if form.is_packed else WideRows)(form, salts, places + _TURN)
        held = self._rows.memory
        held.require(places + _TURN)
        self._bytes: Octets = held.array.reshape(-1).view(np.uint8).reshape(-1, form.row_bytes)
        self._passing = np.arange(
            places, places + _TURN, dtype=np.int32
        )  # places of rows that are only copied
        # by row, the place and the record plus one, 0 without: memory that is never written is never taken
        self._place_of, self._record_of = (Reserved(most, np.int32).array for _ in range(2))
        self._log = RowLog(directory, form.row_bytes, most, self._record_of, segment)
        self._numbers = np.full(places, _NONE, np.int32)  # of the row at each place
        self._marks = np.zeros(places, np.uint8)
        self._width, self._dtype = form.dim + form.slots, form.dtype
        self._hand = 0
        self._at_once = places // 2  # rows of a call
        self.memory = RowRoom(most, self._log.require)
        self.looked_up = self.read = 0

    @property
    def disk(self) -> RowLog:
        """The file of rows that are not in memory."""
        return self._log

    @property
    def nbytes_on_disk(self) -> int:
        """The bytes on disk that are taken."""
        return self._log.nbytes

    def read_ahead(self, numbers: Int32s) -> list[Future[int]]:
        """Read rows on disk ahead, see `RowLog.read_ahead`, if that is a gain."""
        numbers = numbers[numbers >= 0]
        away = numbers[(self._place_of[numbers] == 0) & (self._record_of[numbers] > 0)]
        expected = len(away) * self._log.row_seconds
        return self._log.read_ahead(away) if expected >= _WORTH_SECONDS else []

    def _places(self, numbers: Int32s, *, load: bool = True) -> Int32s:
        """Return the places in memory of rows, at most `_at_once`, which are brought there; -1 for none."""
        # load: whether their values matter.
        numbers = read_only(numbers, np.int32)
        places, missing = np.empty(len(numbers), np.int32), np.empty(len(numbers), np.int32)
        count = _find(numbers, self._place_of, self._marks, places, missing)
        self.looked_up += len(numbers)
        if count:
            self._bring(missing[:count], load)
        _settle(numbers, self._place_of, self._marks, places)
        return places

    def _bring(self, numbers: Int32s, load: bool) -> None:
        """Give rows places in memory, from which others go to the disk."""
        taken = np.empty(len(numbers), np.int32)
        self._hand = _take(len(numbers), self._hand, self._marks, taken)
        before = self._numbers[taken]
        gone = before >= 0
        self._place_of[before[gone]] = 0
        changed = gone.copy()
        changed[gone] = self._record_of[before[gone]] == 0
        if changed.any():
            self._log.write(before[changed], self._bytes[taken[changed]])
        self._numbers[taken] = numbers
        self._place_of[numbers] = taken + 1
        if load:
            here = self._record_of[numbers] > 0
            self._read(numbers[here], taken[here])

    def _read(self, numbers: Int32s, places: Int32s) -> None:
        """Copy rows from the disk to places."""
        if len(numbers):
            rows = np.empty((len(numbers), self._bytes.shape[1]), np.uint8)
            self._log.read(numbers, rows)
            self._bytes[places] = rows
            self.read += len(numbers)

    def _turns(self, count: int) -> Iterator[slice]:
        """Yield the parts of a call of so many rows that memory has places for."""
        for begin in range(0, count, self._at_once):
            yield slice(begin, begin + self._at_once)

    def gather(self, numbers: Int32s, values: Floats) -> None:
        """Copy values of rows."""
        for part in self._turns(len(numbers)):
            self._rows.gather(self._places(numbers[part]), values[part])

    def send(self, numbers: Int32s, sent: Bytes) -> None:
        """Copy values of rows as they travel."""
        for part in self._turns(len(numbers)):
            self._rows.send(self._places(numbers[part]), sent[part])

    def enter(self, numbers: Int32s, keys: Keys, values: Floats, slots: Floats) -> None:
        """Write values and slots, of distinct rows."""
        tables, ids = keys
        for part in self._turns(len(numbers)):
            places = self._places(numbers[part], load=False)
            of = tables[part], ids[part]
            self._rows.enter(places, of, values[part], slots[part])
            self._log.forget(numbers[part])

    def update(
        self,
        optimizer: RowOptimizer,
        numbers: Int32s,
        keys: Keys,
        gradients: Floats,
        version: int,
        learning_rate: float | None,
    ) -> None:
        """Update distinct rows in memory; what the disk has of them is of no use then."""
        tables, ids = keys
        for part in self._turns(len(numbers)):
            mine = numbers[part]
            of = tables[part], ids[part]
            places = self._places(mine)
            self._rows.update(optimizer, places, of, gradients[part], version, learning_rate)
            self._log.forget(mine[mine >= 0])

    def copied(self, numbers: Int32s) -> tuple[Floats, Floats]:
        """Return copies of values and slots; no row moves between memory and disk."""
        blocks = [
            self._copied(numbers[begin : begin + _TURN]) for begin in range(0, len(numbers), _TURN)
        ]
        if len(blocks) == 1:
            return blocks[0]
        nothing = self._rows.copied(np.empty(0, np.int32))
        values, slots = zip(nothing, *blocks, strict=True)
        return np.concatenate(values), np.concatenate(slots)

    def _copied(self, numbers: Int32s) -> tuple[Floats, Floats]:
        """Return copies of at most `_TURN` rows."""
        places = self._place_of[numbers] - 1
        away = np.flatnonzero(places < 0)
        if len(away):
            passing = self._passing[: len(away)]
            rows = np.empty((len(away), self._bytes.shape[1]), np.uint8)
            self._log.read(numbers[away], rows)
            self._bytes[passing] = rows
            places[away] = passing
        return self._rows.copied(places)

    def in_turns(self, top: int) -> Iterator[tuple[int, Floats]]:
        """Yield the rows of a turn after the other."""
        for begin in range(0, top, _TURN):
            numbers = np.arange(begin, min(begin + _TURN, top), dtype=np.int32)
            here = (self._place_of[numbers] > 0) | (self._record_of[numbers] > 0)
            values = np.zeros((len(numbers), self._width), self._dtype)
            if here.any():
                values[here] = np.concatenate(self._copied(numbers[here]), axis=1)
            yield begin, values

    def release(self, numbers: Int32s) -> None:
        """Forget rows that are not in use any more, which were."""
        places = self._place_of[numbers] - 1
        held = places >= 0
        self._numbers[places[held]], self._marks[places[held]] = _NONE, _FREE
        self._place_of[numbers] = 0
        self._log.forget(numbers)
