"""The ids whose rows were removed of late, for exports of what has changed."""

from __future__ import annotations

from collections import deque

import numpy as np

from steepest.tables.hashing import Distinct
from steepest.tables.kernels import Int32s, Int64s

_LEAST = 1 << 16


class Removals:
    """The ids whose rows a shard has removed, with the versions at which it has."""

    # `known_from`: known from that version on.

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
