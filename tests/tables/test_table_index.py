"""An index of ids: as a dict is, at every size; distinct ids; shards."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepest.errors import ResourcesError
from steepest.tables.rows.hashing import Distinct, add_up, mix, shard_of
from steepest.tables.rows.index import BUCKETS, Index
from steepest.tables.rows.kernels import kernel
from steepest.tables.rows.memory import Reserved
from steepest.tables.rows.spread import Spread

GREATEST = 2**63 - 1
# few ids, so that they meet again; and all of them
IDS = st.one_of(st.integers(0, 30), st.integers(0, GREATEST))
KEYS = st.lists(st.tuples(st.integers(0, 2), IDS), max_size=40)


def columns(keys: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([k[0] for k in keys], np.int32), np.array([k[1] for k in keys], np.int64)


@pytest.mark.long
@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=20))
def test_an_index_is_as_a_dict(turns: list[tuple[bool, list[tuple[int, int]]]]) -> None:
    index, model = Index(3, 10_000), dict[tuple[int, int], int]()
    for number, (inserts, keys) in enumerate(turns):
        distinct = list(dict.fromkeys(keys))
        if inserts:
            fresh = [key for key in distinct if key not in model]
            rows = np.arange(len(fresh), dtype=np.int32) + 100 * number
            index.insert(*columns(fresh), rows)
            model |= dict(zip(fresh, rows.tolist(), strict=True))
        else:
            there = [key for key in distinct if key in model]
            index.remove(*columns(there))
            model = {key: row for key, row in model.items() if key not in there}
        found, missing = index.find(*columns(keys))
        assert found.tolist() == [model.get(key, -1) for key in keys]
        assert missing == sum(key not in model for key in keys)
    tables, ids, rows = index.entries()
    entries = zip(tables.tolist(), ids.tolist(), rows.tolist(), strict=True)
    assert {(table, key): row for table, key, row in entries} == model


@kernel
def _first_bits(ids: Any, bits: Any) -> None:
    for at in range(len(ids)):
        bits[at] = mix(np.uint64(ids[at])) & np.uint64(BUCKETS - 1)


def of_one_bucket(count: int) -> list[int]:
    """0, and other ids that an index keeps in its bucket as long as there is room."""
    ids = np.arange(count * BUCKETS)
    bits = np.empty(len(ids), np.int64)
    _first_bits(ids, bits)
    found: list[int] = ids[bits == bits[0]].tolist()
    return found


@pytest.mark.long
@given(st.data())
def test_ids_of_one_bucket_come_and_go(data: st.DataObject) -> None:
    ids = of_one_bucket(9)
    assert ids[0] == 0
    assert len(ids) > 5  # entries of a bucket
    index, model = Index(1, 10_000), dict[tuple[int, int], int]()
    for row, key in enumerate(data.draw(st.lists(st.sampled_from(ids), max_size=30))):
        if (0, key) in model:
            del model[0, key]
            index.remove(*columns([(0, key)]))
        else:
            model[0, key] = row
            index.insert(*columns([(0, key)]), np.array([row], np.int32))
        every = [(0, key) for key in ids]
        assert index.find(*columns(every))[0].tolist() == [model.get(key, -1) for key in every]


@pytest.mark.parametrize("kind", ["counted", "random", "multiples"])
def test_an_index_grows_to_many_ids_and_shrinks_again(kind: str) -> None:
    count = 60_000
    random = np.random.default_rng(0).integers(0, GREATEST, 2 * count)
    ids = {
        "counted": np.arange(count),
        "random": np.unique(random)[:count],
        "multiples": np.arange(count) << 40,
    }[kind].astype(np.int64)
    tables = (ids % 3 == 0).astype(np.int32)  # two tables, one of twice the size
    index, rows = Index(2), np.arange(count, dtype=np.int32)
    for part in np.array_split(rows, 50):
        index.insert(tables[part], ids[part], rows[part])
        assert np.array_equal(index.find(tables, ids)[0][: part[-1] + 1], rows[: part[-1] + 1])
    assert index.nbytes < 25 * count + 2 * BUCKETS * 64
    found, missing = index.find(1 - tables, ids)  # an id of one table is not one of the other
    assert missing == count
    assert (found == -1).all()
    half = rows[::2]
    index.remove(tables[half], ids[half])
    found, missing = index.find(tables, ids)
    assert missing == len(half)
    assert np.array_equal(found[1::2], rows[1::2])
    before = index.nbytes
    index.insert(tables[half], ids[half], half)
    assert np.array_equal(index.find(tables, ids)[0], rows)
    assert index.nbytes < 1.2 * before  # removed entries leave room for others


def test_an_index_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steepest.tables.rows.memory._LEAST", 1 << 12)
    index = Index(1, most=1)
    ids = np.arange(10_000)
    with pytest.raises(ResourcesError, match="no room for more ids.*capacity"):
        index.insert(np.zeros(len(ids), np.int32), ids, ids.astype(np.int32))


@given(KEYS)
def test_distinct_ids_stand_in_order_of_first_sight(keys: list[tuple[int, int]]) -> None:
    found = Distinct(*columns(keys))
    pairs = list(zip(found.tables.tolist(), found.ids.tolist(), strict=True))
    assert pairs == list(dict.fromkeys(keys))
    assert [pairs[at] for at in found.inverse] == keys
    assert found.counts.tolist() == [keys.count(key) for key in pairs]


def test_rows_are_added_up_by_their_numbers() -> None:
    rows = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    inverse = np.random.default_rng(1).integers(0, 7, 200).astype(np.int32)
    expected = np.zeros((9, 3), np.float32)
    np.add.at(expected, inverse, rows)
    assert np.array_equal(add_up(rows, inverse, 9), expected)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_ids_spread_evenly_over_shards(count: int) -> None:
    for ids in (np.arange(7000), np.arange(7000) << 32):
        of = shard_of(np.zeros(7000, np.int32), ids, Spread.evenly(1, count))
        sizes = np.bincount(of, minlength=count)
        assert len(sizes) == count
        assert abs(sizes - 7000 / count).max() < 6 * np.sqrt(7000 / count)
    # as on every machine
    assert shard_of(np.array([0, 1, 2]), np.array([5, 5, 5]), Spread.evenly(3, 1000)).tolist() == [
        735,
        775,
        14,
    ]


def test_memory_is_taken_when_it_is_used_and_never_moves() -> None:
    memory = Reserved(1 << 36, np.float32, 4)  # 1 TiB
    rows = memory.array
    assert rows.shape == (1 << 36, 4)
    rows[1 << 35] = 1.0
    assert rows[1 << 35].tolist() == [1.0] * 4
    assert not rows[(1 << 35) + 1].any()
    with pytest.raises(ResourcesError, match="no room for .* rows of 16 bytes"):
        memory.require((1 << 36) + 1)


LIMITED = """
import resource
import numpy as np
from steepest.errors import ResourcesError
from steepest.tables.rows.kernels import kernel
from steepest.tables.rows.memory import Reserved
before = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (before + (1 << 30), -1))
memory = Reserved(1 << 40, np.int64)
assert 1 << 26 <= memory.array.nbytes <= 1 << 30, memory.array.nbytes
memory.array[-1] = 7
try:
    memory.require(1 << 40)
except ResourcesError as error:
    print(error)
"""


def test_where_the_system_promises_less_memory_there_is_less_room() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=120, check=False
    )
    assert "allow more (sysctl vm.overcommit_memory, ulimit -v)" in done.stdout, done.stderr


def test_where_no_machine_code_can_be_kept_a_process_compiles_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compile_one = numba.njit

    def without_directory(function: Any, cache: bool = False, **settings: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_one(function, **settings)

    monkeypatch.setattr(numba, "njit", without_directory)

    def twice(value: int) -> int:
        return 2 * value

    assert kernel(twice)(21) == 42
