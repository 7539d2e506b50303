"""The rows of a shard as they are at one instant, read piece by piece while pushes change them."""

from __future__ import annotations

from typing import Any

import numpy as np

from steepest.tables.rows.blocks import FREE, Blocks
from steepest.tables.rows.kernels import Int32s, Int64s, kernel, read_only

#: NumPy arrays of rows by the names that `TableState` has for them.
RowArrays = dict[str, Any]
_MOST_LOOKED_AT = 1 << 20  # rows in a call of `take`, few of which may be wanted: a millisecond


@kernel
def _to_keep(
    numbers: Int32s, written: Int64s, begin: int, end: int, after: int, version: int, found: Int32s
) -> int:
    """Write the row numbers from `begin` to `end` - 1 that belong to a cut, and return their count."""
    count = 0
    for number in numbers:
        if begin <= number < end and after < written[number] <= version:
            found[count] = number
            count += 1
    return count


class RowCut:
    """The rows of a shard at the version at which it is made.

    Rows are copied in the order of their numbers. Before the shard changes or removes rows, it has
    those copied that have not been taken yet (`before`, `keep`). A row that was written after the
    cut is thereby known to be copied already, or not to belong to it.

    Args:
        blocks: the rows.
        version: of the last push.
        since: only rows that were written after this version; None for all.
        table: only rows of the table of this number; None for all.
    """

    def __init__(
        self, blocks: Blocks, version: int, since: int | None = None, table: int | None = None
    ) -> None:
        self._blocks = blocks
        self._version = version
        self._after = FREE if since is None else max(since, FREE)
        self._table = table
        self._next, self._top = 0, blocks.top  # rows below `_next` are copied
        self._kept: list[RowArrays] = []

    def before(self, numbers: Int32s) -> RowArrays | None:
        """Return copies of the given rows that are yet to be taken, or None; negative numbers are ignored."""
        wanted = np.empty(len(numbers), np.int32)
        count = _to_keep(
            read_only(numbers, np.int32),
            self._blocks.written,
            self._next,
            self._top,
            self._after,
            self._version,
            wanted,
        )
        rows = self._of_table(wanted[:count])
        return self._copied(rows) if len(rows) else None

    def keep(self, rows: RowArrays | None) -> None:
        """Keep copies that `before` returned, because the rows change now."""
        if rows is not None:
            self._kept.append(rows)

    def take(self, most: int) -> RowArrays:
        """Return copies of further rows, about `most`; of no rows when all are taken."""
        parts: list[Int32s] = []
        count = looked_at = 0
        while self._next < self._top and 2 * count < most and looked_at < _MOST_LOOKED_AT:
            end = min(self._next + most, self._top)
            rows = self._wanted(np.arange(self._next, end, dtype=np.int32))
            parts.append(rows)
            count, looked_at = count + len(rows), looked_at + end - self._next
            self._next = end
        if count:
            return self._copied(np.concatenate(parts))
        if self._next < self._top:
            return self.take(most)
        return self._joined(most)

    def no_rows(self) -> RowArrays:
        """Return the arrays that `take` returns, of no rows."""
        return self._copied(np.empty(0, np.int32))

    def _joined(self, most: int) -> RowArrays:
        """Return rows that were kept: at least `most`, where there are as many."""
        parts, count = [self.no_rows()], 0
        while self._kept and count < most:
            parts.append(self._kept.pop())
            count += len(parts[-1]["ids"])
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _wanted(self, numbers: Int32s) -> Int32s:
        """Return the numbers of the rows that belong to the cut and have not changed since."""
        written = self._blocks.written[numbers]
        return self._of_table(numbers[(written > self._after) & (written <= self._version)])

    def _of_table(self, numbers: Int32s) -> Int32s:
        if self._table is None:
            return numbers
        mine: Int32s = numbers[self._blocks.tables[numbers] == self._table]
        return mine

    def _copied(self, numbers: Int32s) -> RowArrays:
        blocks = self._blocks
        values, slots = blocks.store.copied(numbers)
        beside = {} if blocks.until is None else {"until": blocks.until[numbers].astype(np.int64)}
        if blocks.scores is not None:
            beside["scores"] = blocks.scores[numbers]
        return {
            "tables": blocks.tables[numbers].astype(np.int32),
            "ids": blocks.ids[numbers],
            "values": values,
            "slots": slots,
            "written": blocks.written[numbers],
            "sightings": blocks.sightings[numbers],
            **beside,
        }
