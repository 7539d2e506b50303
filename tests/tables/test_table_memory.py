"""The memory that few rows take."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steepest.tables.rows.shard import TableShard
from tests.table_tools import push, table

STATM = Path("/proc/self/statm")


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="the system does not tell a process's memory")
def test_a_shard_of_a_few_rows_takes_pages_and_no_huge_ones() -> None:
    shards = [TableShard([table()], shard=shard, num_shards=16) for shard in range(16)]
    push(shards[0], [1], 1)  # what is compiled and imported meanwhile is no shard's
    before = resident()
    for shard in shards[1:]:
        push(shard, [1, 2, 3], 1)
    assert resident() - before < len(shards) * 256 * 1024
