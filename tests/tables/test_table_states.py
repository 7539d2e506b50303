"""States of tables: into other shards and capacities, and as plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steepest.errors import ConfigurationError
from steepest.tables.rows.admission import CBFFilter, CounterFilter
from steepest.tables.rows.eviction import LFU, LRU, GlobalStepEvict
from steepest.tables.rows.hashing import shard_of
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.row_optimizers import SGD, Adagrad
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.state import TableState, appended
from tests.table_tools import ids_of, push, same, table


@pytest.mark.parametrize("policy", [LRU(), LFU()])
def test_a_state_is_loaded_into_less_capacity(policy: Any) -> None:
    shard = TableShard([table(initial=Zeros())])
    push(shard, range(20), 1, sightings=np.arange(20) % 5 + 1)
    push(shard, [3, 4, 5], 2)
    state = shard.export()
    small = TableShard([table(initial=Zeros(), capacity=6, eviction=policy)])
    small.load([state], 2)
    assert small.counts["evicted_full"].tolist() == [14]
    uses = state.written if isinstance(policy, LRU) else state.sightings
    expected = sorted(range(20), key=lambda key: (uses[key], key))[-6:]
    assert ids_of(small) == sorted(expected)
    push(small, [50], 3)  # and goes on
    assert ids_of(small) == sorted([*expected[1:], 50])
    none = TableShard([table(initial=Zeros(), capacity=6)])
    push(none, [99], 1)
    with pytest.raises(ConfigurationError, match="20 rows here, its capacity is 6: raise it"):
        none.load([state], 2)
    assert ids_of(none) == [99]


@pytest.mark.parametrize("policy", [LRU(), LFU()])
def test_states_of_several_shards_are_loaded_in_parts(
    policy: Any,
) -> None:
    random = np.random.default_rng(0)
    keys = np.unique(random.integers([0, 0], [3, 90], (120, 2)), axis=0)
    random.shuffle(keys)
    tables, ids = keys.T
    parts = [TableShard([table(name) for name in "abc"], shard=at, num_shards=3) for at in range(3)]
    of = shard_of(tables, ids, Spread.evenly(3, 3))
    for at, part in enumerate(parts):
        mine = of == at
        seen = ids[mine] % 5 + 1
        push(part, ids[mine], 1, tables=tables[mine], sightings=seen)
        push(part, ids[mine][:9], 2, tables=tables[mine][:9])
    states = [part.export() for part in parts]
    whole = appended(states).sorted()
    order = np.lexsort((ids, tables))
    assert (whole.tables.tolist(), whole.ids.tolist()) == (
        tables[order].tolist(),
        ids[order].tolist(),
    )
    less = TableShard([table("a"), table("b", capacity=11, eviction=policy), table("c")])
    less.load(states, 2)
    uses = whole.written if isinstance(policy, LRU) else whole.sightings
    dropped = [at for at in np.lexsort((whole.ids, uses)).tolist() if whole.tables[at] == 1][
        :-11
    ]  # the least used of table b
    kept = np.setdiff1d(np.arange(len(whole.ids)), dropped)
    assert same(less.export(), whole.only(kept, slice(None)))
    assert less.counts["evicted_full"].tolist() == [0, len(dropped), 0]
    assert dropped


def test_what_is_known_of_ids_without_rows_moves_to_other_shards() -> None:
    bloom = CBFFilter(filter_freq=3, max_element_size=500, false_positive_probability=1e-6)
    group = [table("a", admission=CounterFilter(filter_freq=3)), table("b", admission=bloom)]
    ids, tables = np.arange(100).repeat(2), np.array([0, 1] * 100)
    parts = [TableShard(group, shard=at, num_shards=2) for at in range(2)]
    of = shard_of(tables, ids, Spread.evenly(len(group), 2))
    for at, part in enumerate(parts):
        push(part, ids[of == at], 1, tables=tables[of == at], sightings=ids[of == at] % 2 + 1)
    whole = TableShard(group)
    whole.load([part.export() for part in parts], 1)
    push(whole, ids, 2, tables=tables)
    assert ids_of(whole) == list(range(1, 100, 2)) * 2
    assert whole.export().ids.tolist() == ids_of(whole)


def test_a_state_of_other_tables_is_refused() -> None:
    shard = TableShard([table()])
    push(shard, [1], 1)
    state = shard.export()
    for other, said in [
        (table(dim=5), r"a state of 4 values and 0 slots .* for tables of 5 and 0"),
        (table(optimizer=Adagrad()), "for tables of 4 and 4"),
        (table(dtype="float64"), "of float32 a row, for tables of 4 and 0 of float64"),
    ]:
        with pytest.raises(ConfigurationError, match=said):
            TableShard([other]).load([state], 1)
    two = TableShard([table(), table("u")])
    push(two, [1], 1, tables=[1])
    with pytest.raises(ConfigurationError, match="tables hold 1 to 1"):
        shard.load([two.export()], 1)
    assert same(shard.export(), state)
    with pytest.raises(ConfigurationError, match="no states of tables"):
        shard.load([], 1)
    with pytest.raises(ConfigurationError, match="version=-1"):
        shard.load([state], -1)
    with pytest.raises(ConfigurationError, match="version=0.5: give an integer of at least 0"):
        TableShard([table(evict=(GlobalStepEvict(steps_to_live=1),))]).evict(0.5)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigurationError, match=r"export\(since=3\): .* known from version 0 to 0;"
    ):
        TableShard([table()]).export(since=3)


def lively(**settings: Any) -> TableShard:
    """A shard with all that a state can have."""
    bloom = {"filter_freq": 3, "max_element_size": 20}
    group = [
        table("a", admission=CounterFilter(filter_freq=2), **settings),
        table("b", admission=CBFFilter(**bloom), **settings),
        table("c", admission=CBFFilter(**bloom, counter_type="uint32"), **settings),
        table("d", evict=(GlobalStepEvict(steps_to_live=1),), **settings),
    ]
    shard = TableShard(group)
    push(shard, range(12), 1, tables=np.arange(12) % 4, sightings=np.arange(12) % 3 + 1)
    push(shard, range(1, 7), 3, tables=np.arange(6) % 4)
    assert shard.evict(4) > 0
    return shard


@pytest.mark.few(3)
@pytest.mark.parametrize("optimizer", [SGD(), Adagrad()])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "int8"])
def test_a_state_is_plain_arrays_and_back(optimizer: Any, dtype: str) -> None:
    shard = lively(optimizer=optimizer, dtype=dtype)
    state = shard.export(since=0)
    assert min(len(state.ids), len(state.counted_ids), len(state.removed_ids)) > 0
    for whole in (state, TableShard(shard.tables).export(), shard.export(since=3)):
        arrays = whole.arrays()
        assert {"counter.1.uint8", "counter.2.uint32"} < set(arrays)
        assert not any("/" in name for name in arrays)
        through = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        back = TableState.of_arrays({name: tensor.numpy() for name, tensor in through.items()})
        assert same(back, whole)
        again = TableShard(shard.tables)
        again.load([back], 4)
        expected = TableShard(shard.tables)
        expected.load([whole], 4)
        assert same(again.export(), expected.export())


def test_arrays_that_are_no_state_are_refused() -> None:
    arrays = lively().export().arrays()
    rows, counter = len(arrays["ids"]), arrays["counter.2.uint32"]
    for name, wrong, said in [
        ("ids", None, "without the arrays ids"),
        ("ids", arrays["ids"].astype(np.int32), "'ids' .* is of int32 and shape .*: give int64"),
        ("written", arrays["written"].astype(">i8"), "'written' .* is of >i8 .*: give int64"),
        ("values", arrays["values"].astype(np.float16), "give float32 or float64"),
        ("values", arrays["values"][:, 0], rf"'values' .* give shape \({rows}, columns\)"),
        ("slots", arrays["slots"].astype(float), "'slots' .* float64 .*: give float32, as values"),
        ("sightings", arrays["sightings"][1:], rf"'sightings' .* give shape \({rows},\)"),
        ("counted", arrays["counted"][1:], r"'counted' .* give shape \(\d,\)"),
        ("removed_tables", np.zeros(2, np.int32), r"'removed_tables' .* give shape \(0,\)"),
        ("counter.2.uint32", counter[1:], r"give uint8 and shape \(a multiple of 4,\)"),
        ("counter.2.uint32", counter.view(np.int8), "'counter.2.uint32' .* is of int8"),
        ("counter.2.float32", counter, "with an array 'counter.2.float32': known are tables, ids"),
        ("counter.x.uint8", counter, "'counter.x.uint8'"),
        ("other", counter, "an array 'other'"),
    ]:
        changed = {**arrays, name: wrong}
        if wrong is None:
            del changed[name]
        with pytest.raises(ConfigurationError, match=said):
            TableState.of_arrays(changed)
