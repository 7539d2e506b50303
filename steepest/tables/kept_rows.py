"""Rows that were evicted and are kept: ids that come again have them back, with their slots and counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from steepest.tables.blocks import Blocks
from steepest.tables.index import Index
from steepest.tables.kernels import Int32s, Int64s


class KeptRows:
    """The evicted rows of a shard that are kept; they stay where they were in its `Blocks`.

    A table keeps those that were evicted last; of several of one version, those of the greatest ids.

    Args:
        most: by table, rows that are kept at most; 0 to keep none.
        blocks: of the shard, with `Blocks.kept`, where a table keeps some.
    """

    def __init__(self, most: Sequence[int], blocks: Blocks) -> None:
        self._most: Int64s = np.array(most, np.int64)
        self._blocks = blocks
        self._index = Index(len(most), int(self._most.sum())) if self.any else None
        self._held = np.zeros(len(most), np.int64)
        # by table, versions at which rows were evicted, the oldest first, and these; some may be back
        self._queues: list[deque[tuple[int, Int32s]]] = [deque() for _ in most]

    @property
    def any(self) -> bool:
        """Whether a table keeps rows."""
        return self._blocks.kept is not None

    def __len__(self) -> int:
        """Return how many are kept."""
        return int(self._held.sum())

    def find(self, tables: Int32s, ids: Int64s) -> Int32s:
        """Return the row number of each (table, id), -1 for those that are not kept."""
        if self._index is None:
            return np.full(len(ids), -1, np.int32)
        return self._index.find(tables, ids)[0]

    def add(self, numbers: Int32s, version: int) -> Int32s:
        """Keep rows that are evicted at a version; return the numbers of those that are not kept, or not any longer."""
        kept = self._blocks.kept
        if kept is None:
            return numbers
        of = self._blocks.tables[numbers]
        released = [numbers[self._most[of] == 0]]
        for table in np.unique(of[self._most[of] > 0]).tolist():
            mine = numbers[of == table]
            kept[mine] = self._blocks.written[mine] = version
            self.enter(table, version, mine)
            released.append(self._excess(table))
        return np.concatenate(released)

    def enter(self, table: int, version: int, numbers: Int32s) -> None:
        """Take in rows of a table that were evicted at a version, at least that of the last ones."""
        ids, queue = self._blocks.ids, self._queues[table]
        assert self._index is not None
        self._index.insert(np.full(len(numbers), table, np.int32), ids[numbers], numbers)
        self._held[table] += len(numbers)
        if queue and queue[-1][0] == version:
            numbers = np.concatenate([self._still(*queue.pop()), numbers])
        queue.append((version, numbers[np.argsort(ids[numbers])]))

    def _still(self, version: int, numbers: Int32s) -> Int32s:
        """Return those of some rows that are kept since a version."""
        assert self._blocks.kept is not None
        still: Int32s = numbers[self._blocks.kept[numbers] == version]
        return still

    def excess(self) -> Int32s:
        """Forget what is more than tables keep; return these rows' numbers."""
        return np.concatenate([self._excess(table) for table in range(len(self._most))])

    def _excess(self, table: int) -> Int32s:
        """Forget the rows of a table that are more than it keeps; return their numbers."""
        found, queue = [np.empty(0, np.int32)], self._queues[table]
        excess = int(self._held[table] - self._most[table])
        while excess > 0:
            version, numbers = queue.popleft()
            still = self._still(version, numbers)
            found.append(still[:excess])
            if len(still) > excess:
                queue.appendleft((version, still[excess:]))
            excess -= len(found[-1])
        gone = np.concatenate(found)
        self._forget(np.full(len(gone), table, np.int32), gone)
        return gone

    def take_back(self, tables: Int32s, numbers: Int32s) -> None:
        """Forget rows, which are in use again."""
        if len(numbers):
            assert self._blocks.kept is not None
            self._forget(tables, numbers)
            self._blocks.kept[numbers] = 0

    def _forget(self, tables: Int32s, numbers: Int32s) -> None:
        assert self._index is not None
        self._index.remove(tables, self._blocks.ids[numbers])
        self._held -= np.bincount(tables, minlength=len(self._held))
