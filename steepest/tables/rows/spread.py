"""How the keys of a group of tables are spread over its shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from steepest.tables.rows.kernels import Int32s, Int64s, read_only

#: Rows of a capacity for each part: a table below twice of it lies in one shard.
_ROWS_OF_A_PART = 1 << 14


class Spread(NamedTuple):
    """The shards over which each table's keys are spread, evenly by hash.

    A table without a capacity or `num_embeddings` has a part in every shard. One with a bound has as many parts as that
    has times 16,384 rows, at least one and at most one in each shard: so the bound of a small table is exact, and
    the parts of a large one fill up at nearly the same time.

    A table's parts are in shards one after another; shard 0 follows the last.
    """

    num_shards: int
    firsts: Int32s  # (tables,), the shard of a table's first part
    parts: Int32s  # (tables,), how many a table has

    @classmethod
    def of(cls, bounds: Sequence[int | None], begin: int, count: int) -> Spread:
        """Return the spread of tables with these bounds over `count` shards; small tables begin at shard `begin`."""
        firsts, parts = [], []
        for number, bound in enumerate(bounds):
            parts.append(parts_of(bound, count))
            firsts.append(0 if parts[-1] == count else (begin + number) % count)
        return cls(count, _read_only(firsts), _read_only(parts))

    @classmethod
    def evenly(cls, tables: int, count: int) -> Spread:
        """Return the spread of tables that all have a part in each of `count` shards."""
        return cls(count, _read_only([0] * tables), _read_only([count] * tables))

    def shares(self, shard: int, capacities: Int64s) -> Int64s:
        """Return a shard's share of each table's capacity, in rows; 0 for a table without a part in it."""
        part = (shard - self.firsts) % self.num_shards
        parts: Int64s = self.parts.astype(np.int64)
        each, rest = np.divmod(capacities, parts)
        return np.where(part < parts, each + (part < rest), 0)


def parts_of(bound: int | None, count: int) -> int:
    """Return how many parts a table of so many rows at most has in `count` shards."""
    return count if bound is None else min(max(bound // _ROWS_OF_A_PART, 1), count)


def _read_only(numbers: Sequence[int]) -> Int32s:
    return read_only(np.array(numbers), np.int32)
