"""The rows of one instant, read piece by piece while pushes change, remove and add rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepest.errors import ConfigurationError
from steepest.tables.rows.eviction import LFU, LRU, GlobalStepEvict
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.shard import TableShard
from tests.table_tools import push, same, table

PUSHES = st.lists(st.sets(st.integers(0, 30), max_size=9), min_size=1, max_size=8)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "dtype"), [(LRU(), "float32"), (LFU(), "bfloat16"), (None, "int8")], ids=str
)
@given(before=PUSHES, meanwhile=PUSHES, most=st.integers(1, 7), since=st.booleans())
def test_a_cut_has_the_rows_of_its_instant(
    policy: Any,
    dtype: str,
    before: list[set[int]],
    meanwhile: list[set[int]],
    most: int,
    since: bool,
) -> None:
    settings: Any = {} if policy is None else {"capacity": 12, "eviction": policy}
    wears = (GlobalStepEvict(steps_to_live=2),)
    shard = TableShard([table(evict=wears, optimizer=Adagrad(), dtype=dtype, **settings)])
    for version, ids in enumerate(before, 1):
        push(shard, sorted(ids), version)
    base = len(before) // 2 if since else None
    expected, (rest, rows) = shard.export(base), shard.cut(base)
    pieces = [rows.take(most)]
    for version, ids in enumerate(meanwhile, len(before) + 1):
        push(shard, sorted(ids), version)
        if version % 3 == 0:
            shard.evict(version)
        pieces.append(rows.take(most))
    while len((piece := rows.take(most))["ids"]):
        pieces.append(piece)
    found = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    assert same(replace(rest, **found).sorted(), expected)


def test_a_push_that_is_refused_leaves_a_cut_as_it_is() -> None:
    shard = TableShard([table()])
    push(shard, range(5), 1)
    expected, (rest, rows) = shard.export(), shard.cut()
    with pytest.raises(ConfigurationError, match="twice"):
        push(shard, [3, 3], 2)
    assert same(replace(rest, **rows.take(9)).sorted(), expected)
    assert not len(rows.take(9)["ids"])


def test_rows_that_change_soon_after_a_cut_come_in_few_pieces() -> None:
    """Each piece is several messages: rows kept by many small pushes are joined."""
    shard = TableShard([table()])
    push(shard, range(1000), 1)
    expected, (rest, rows) = shard.export(), shard.cut()
    for version in range(2, 102):
        push(shard, range(10 * (version - 2), 10 * (version - 1)), version)
    pieces = [rows.take(400) for _ in range(4)]
    assert [len(piece["ids"]) for piece in pieces] == [400, 400, 200, 0]
    found = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
    assert same(replace(rest, **found).sorted(), expected)


def test_a_cut_of_one_table_has_no_other_rows() -> None:
    shard = TableShard([table("a"), table("b")])
    push(shard, range(6), 1, tables=np.arange(6) % 2)
    assert shard.cut(table=1)[1].take(9)["ids"].tolist() == [1, 3, 5]


def test_versions_of_another_life_are_not_covered() -> None:
    shard = TableShard([table(capacity=2, eviction=LRU())])
    assert shard.covers(shard.life, 0)
    push(shard, [1, 2], 1)
    before = shard.life
    assert not shard.covers(before, 2)  # that is yet to come
    shard.load([shard.export()], 1)
    assert not shard.covers(before, 1)
    assert shard.covers(shard.life, 1)
    assert not shard.covers(shard.life, 0)  # what was removed before is not known


def test_the_oldest_removals_are_forgotten_when_there_are_many() -> None:
    shard = TableShard([table(capacity=30_000, eviction=LRU())])
    for version in range(1, 6):
        push(shard, range(version * 30_000, (version + 1) * 30_000), version)
    assert not shard.covers(shard.life, 3)
    assert shard.covers(shard.life, 4)
    assert shard.export(since=4).removed_ids.tolist() == list(range(90_000, 150_000))
