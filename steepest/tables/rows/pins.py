"""Ids whose rows stay, whatever else a table evicts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from steepest.tables.rows.hashing import shard_of
from steepest.tables.rows.index import Index
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import Table


class Pins:
    """The pinned ids of a shard's tables.

    Attributes:
        counts: how many there are in this shard, by table; so many places are theirs, with rows or without.
    """

    def __init__(self, tables: Sequence[Table], spread: Spread, shard: int) -> None:
        """Take those of the tables' ids that belong to this shard."""
        pinned = [np.array(table.pinned, np.int64) for table in tables]
        of = np.repeat(np.arange(len(pinned), dtype=np.int32), [len(ids) for ids in pinned])
        ids = np.concatenate(pinned)
        mine = shard_of(of, ids, spread) == shard
        self.counts: Int64s = np.bincount(of[mine], minlength=len(pinned))
        self._index: Index | None = None
        if mine.any():
            self._index = Index(len(pinned), int(mine.sum()))
            self._index.insert(of[mine], ids[mine], np.arange(mine.sum(), dtype=np.int32))

    def has(self, tables: Int32s, ids: Int64s) -> npt.NDArray[np.bool_]:
        """Return which keys (n,) are pinned."""
        if self._index is None:
            return np.zeros(len(ids), np.bool_)
        pinned: npt.NDArray[np.bool_] = self._index.find(tables, ids)[0] >= 0
        return pinned
