"""The life of a row: counted, admitted, trained, frozen, evicted, beside a model in plain Python."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from steepest import Embedding, TorchModel
from steepest.errors import ConfigurationError
from steepest.tables.files.row_pieces import NewerIds
from steepest.tables.rows.admission import CBFFilter, CounterFilter, ProbabilityFilter
from steepest.tables.rows.compilation import compile_kernels
from steepest.tables.rows.eviction import LFU, LRU, GlobalStepEvict, L2WeightEvict
from steepest.tables.rows.hashing import shard_of
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.state import TableState, appended
from steepest.tables.rows.table import Table, spread_of
from steepest.tables.rows.texts import text_ids
from tests.reference import sgd
from tests.table_tools import ids_of, push, same, table

DIM = 4


@dataclass
class Row:
    pushes: int
    written: int
    sightings: int


@dataclass
class Model:
    """What a table does, told in plain Python. Its rows begin with zeros, and each push subtracts one."""

    table: Table
    rows: dict[int, Row] = field(default_factory=dict)
    counted: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    refused_full: int = 0
    full: int = 0
    removed: set[int] = field(default_factory=set)

    @property
    def pinned(self) -> tuple[int, ...]:
        found: Any = self.table.pinned
        return tuple(found)

    def push(self, ids: dict[int, int], version: int, strict: bool = True) -> bool:
        """Whether it is taken; ids have their sightings."""
        frequency = self.table.admission.filter_freq if self.table.admission else 0
        fresh = [key for key in ids if key not in self.rows]
        pinned = [key for key in fresh if key in self.pinned]
        others = [key for key in fresh if key not in self.pinned]
        admitted = [key for key in others if self.counted.get(key, 0) + ids[key] >= frequency]
        capacity = (self.table.capacity or math.inf) - len(self.pinned)
        rows = [key for key in self.rows if key not in self.pinned]
        known = [key for key in rows if key in ids]
        excess = max(0, len(rows) + len(admitted) - capacity)
        touched = len(admitted) + len(known)
        if excess and (self.table.eviction is None or touched > capacity):
            if strict:
                return False
            taken = len(rows) if self.table.eviction is None else len(known)
            late = admitted[int(capacity) - taken :]
            admitted = admitted[: int(capacity) - taken]
            self.refused_full += len(late)
            self.refused -= len(late)
            excess = max(0, len(rows) + len(admitted) - capacity)
        admitted += pinned
        for key in fresh:
            if key in admitted:
                self.counted.pop(key, None)
            else:
                if self.table.admission is not None:
                    self.counted[key] = self.counted.get(key, 0) + ids[key]
                self.refused += 1
        use = {LRU: "written", LFU: "sightings"}.get(type(self.table.eviction), "written")
        others = [key for key in rows if key not in ids]
        for key in sorted(others, key=lambda key: (getattr(self.rows[key], use), key)):
            if excess > 0:
                self.remove(key)
                self.full += 1
                excess -= 1
        for key, seen in ids.items():
            if key in self.rows or key in admitted:
                row = self.rows.setdefault(key, Row(0, 0, 0))
                row.pushes, row.written, row.sightings = (
                    row.pushes + 1,
                    version,
                    row.sightings + seen,
                )
        return True

    def remove(self, key: int) -> None:
        del self.rows[key]
        self.removed.add(key)

    def evict(self, version: int) -> int:
        ways = {type(way): way for way in self.table.evict}
        gone = []
        for key, row in self.rows.items():
            age, norm = ways.get(GlobalStepEvict), ways.get(L2WeightEvict)
            old = age is not None and version - row.written > age.steps_to_live
            small = norm is not None and math.sqrt(DIM) * row.pushes < norm.l2_weight_threshold
            gone += [key] if (old or small) and key not in self.pinned else []
        for key in gone:
            self.remove(key)
        return len(gone)


def check(shard: TableShard, model: Model) -> None:
    state = shard.export()
    assert state.ids.tolist() == sorted(model.rows)
    for key, values, written, seen in zip(
        state.ids, state.values, state.written, state.sightings, strict=True
    ):
        row = model.rows[int(key)]
        assert values.tolist() == [-row.pushes] * DIM
        assert (written, seen) == (row.written, row.sightings)
    counted = zip(state.counted_ids.tolist(), state.counted.tolist(), strict=True)
    assert dict(counted) == model.counted
    assert shard.counts["refused"][0] == model.refused
    assert shard.counts["refused_full"][0] == model.refused_full
    assert shard.counts["evicted_full"][0] == model.full
    pulled = shard.pull(np.zeros(15, np.int32), np.arange(15))[:, 0]
    assert pulled.tolist() == [
        -model.rows[key].pushes if key in model.rows else 0 for key in range(15)
    ]


TABLES = st.builds(
    lambda capacity, eviction, admission, age, norm, pinned: table(
        dim=DIM,
        initial=Zeros(),
        capacity=capacity,
        eviction=eviction if capacity else None,
        admission=admission,
        evict=tuple(way for way in (age, norm) if way),
        pinned=sorted(pinned)[:capacity],
    ),
    st.one_of(st.none(), st.integers(2, 8)),
    st.sampled_from([None, LRU(), LRU(), LFU(), LFU()]),
    st.one_of(st.none(), st.builds(CounterFilter, filter_freq=st.integers(1, 4))),
    st.one_of(st.none(), st.builds(GlobalStepEvict, steps_to_live=st.integers(1, 4))),
    st.sampled_from([None, L2WeightEvict(l2_weight_threshold=4.0)]),
    st.one_of(st.just(set()), st.sets(st.integers(0, 12), max_size=6)),
)
PUSHES = st.dictionaries(st.integers(0, 12), st.integers(1, 3), max_size=6)
TURNS = st.lists(st.one_of(PUSHES, PUSHES, PUSHES, st.sampled_from(["evict", "load"])), max_size=30)


def has_room(shard: TableShard, ids: list[int]) -> bool:
    """Whether `require_room` takes ids of the first table."""
    try:
        shard.require_room(np.zeros(len(ids), np.int32), ids)
    except ConfigurationError:
        return False
    return True


@pytest.mark.long
@given(TABLES, TURNS, st.booleans())
def test_rows_come_and_go_as_a_model_in_plain_python_says(
    described: Table, turns: Any, strict: bool
) -> None:
    shard, model = TableShard([described]), Model(described)
    version = 0
    for turn in turns:
        if turn == "evict":
            version += 1
            assert shard.evict(version) == model.evict(version)
        elif turn == "load":  # all goes on from it
            loaded = TableShard([described])
            loaded.load([shard.export()], version)
            loaded.counts = shard.counts
            shard = loaded
        else:
            ids, seen = list(turn), list(turn.values())
            told = has_room(shard, [*ids, *ids])
            taken = copy.deepcopy(model).push(turn, version + 1)
            assert told == (described.admission is not None or taken)
            if model.push(turn, version + 1, strict):
                version += 1
                push(shard, ids, version, sightings=seen, strict=strict)
            else:
                before = shard.export()
                with pytest.raises(ConfigurationError, match="capacity"):
                    push(shard, ids, version + 1, sightings=seen)
                assert same(shard.export(), before)
        check(shard, model)


@pytest.mark.long
@pytest.mark.parametrize("policy", [LRU(), LFU()])
def test_the_least_used_rows_go_in_a_long_run_too(policy: Any) -> None:
    described = table(dim=DIM, initial=Zeros(), capacity=12, eviction=policy)
    shard, model = TableShard([described]), Model(described)
    random = np.random.default_rng(0)
    for version in range(1, 300):
        drawn, seen = np.unique(np.minimum(random.zipf(1.5, 9), 14), return_counts=True)
        ids = dict(zip(drawn.tolist(), seen.tolist(), strict=True))
        assert model.push(ids, version)
        push(shard, drawn, version, sightings=seen)
        check(shard, model)
    assert model.full > 20


def increased(base: TableState, increment: TableState) -> TableState:
    """The rows of a state and of a later increment, less those that are older, or removed."""
    newer = NewerIds(1)
    newer.note(increment)
    newer.seal()
    nothing = {
        "removed_tables": increment.removed_tables[:0],
        "removed_ids": increment.removed_ids[:0],
    }
    older = replace(newer.older(base), **nothing)
    return appended([older, replace(increment, **nothing)]).sorted()


def test_an_increment_of_which_no_file_has_a_shard_leaves_its_rows_as_they_are() -> None:
    shard, newer = TableShard([table(dim=DIM, initial=Zeros())]), NewerIds(1)
    push(shard, np.array([3, 5]), 1)
    newer.seal()
    assert newer.older(shard.export()).ids.tolist() == [3, 5]


@pytest.mark.long
@given(TABLES, st.lists(PUSHES, max_size=20), st.integers(0, 19))
def test_a_state_and_its_increments_are_the_whole(
    described: Table, pushes: list[dict[int, int]], cut: int
) -> None:
    described = replace(described, capacity=12, eviction=described.eviction or LRU())
    shard = TableShard([described])
    state = shard.export()
    for version, ids in enumerate(pushes, 1):
        push(shard, list(ids), version, sightings=list(ids.values()))
        if version % 3 == 0:
            shard.evict(version)
        if version % 4 == 0 or version == cut:
            state = increased(state, shard.export(since=max(0, version - 4)))
    last = increased(state, shard.export(since=max(0, len(pushes) - 4)))
    assert same(
        last,
        replace(shard.export(), removed_tables=last.removed_tables, removed_ids=last.removed_ids),
    )


@pytest.mark.long
def test_what_two_processes_decide_is_the_same() -> None:
    def run() -> TableShard:
        random = np.random.default_rng(0)
        shard = TableShard(
            [
                table("a", capacity=20, eviction=LFU(), admission=CounterFilter(filter_freq=2)),
                table(
                    "b", capacity=20, eviction=LRU(), admission=ProbabilityFilter(probability=0.3)
                ),
                table("c", admission=CBFFilter(filter_freq=3, max_element_size=50)),
            ]
        )
        for version in range(1, 60):
            keys = np.unique(random.integers([0, 0], [3, 90], (30, 2)), axis=0)
            gradients = random.normal(size=(len(keys), 4)).astype(np.float32)
            shard.push(keys[:, 0], keys[:, 1], gradients, version)
        return shard

    first, second = run(), run()
    assert same(first.export(), second.export())
    counts = first.counts
    assert all((counts[name] > 0).any() for name in ("admitted", "refused", "evicted_full"))
    assert first.rows_of()[:2].tolist() == [20, 20]
    evicted = counts["evicted_full"]
    assert (first.rows_of() == counts["admitted"] - evicted).all()


def test_nothing_stale_is_inherited_by_a_row_that_comes_back() -> None:
    described = table(optimizer=Adagrad(lr=0.1), capacity=2, eviction=LRU())
    shard, fresh = TableShard([described]), TableShard([described])
    for version in range(1, 6):
        push(shard, [7], version, 100.0)
    push(shard, [1, 2], 6)
    assert ids_of(shard) == [1, 2]
    assert np.array_equal(shard.pull([0], [7]), fresh.pull([0], [7]))
    push(shard, [7], 7)
    push(fresh, [7], 7)
    ours, other = shard.export(), fresh.export()
    at = ours.ids.tolist().index(7)
    assert np.array_equal(ours.values[at], other.values[0])
    assert np.array_equal(ours.slots[at], other.slots[0])
    assert ours.sightings[at] == 1


def test_a_full_table_without_eviction_refuses_a_push_and_loses_nothing() -> None:
    shard = TableShard([table(capacity=3), table("u", capacity=3, eviction=LRU())])
    push(shard, [1, 2, 3], 1)
    before = shard.export()
    with pytest.raises(
        ConfigurationError,
        match="'t' has no room for 1 more ids beside its 3 rows: its capacity is 3; raise",
    ):
        push(shard, [3, 4, 8], 2, tables=[0, 0, 1])
    assert same(shard.export(), before)
    with pytest.raises(
        ConfigurationError, match="'u' has no room for 4 ids at once: its capacity is 3; raise"
    ):
        push(shard, [1, 2, 3, 4], 2, tables=[1, 1, 1, 1])
    push(shard, [3, 8], 2, tables=[0, 1])
    assert shard.rows_of().tolist() == [3, 1]


@pytest.mark.parametrize(
    "admission", [CounterFilter(2), CBFFilter(filter_freq=2, max_element_size=8)]
)
def test_a_load_that_is_refused_changes_nothing(admission: Any) -> None:
    """Neither rows nor what is counted of ids without one, nor the clock."""
    shard, larger = (
        TableShard([table(capacity=capacity, admission=admission)]) for capacity in (3, 9)
    )
    for each, ids, seconds in ((shard, [1, 2], 50), (larger, [3, 4, 5, 6], 90)):
        each.note_time(seconds)
        push(each, [*ids, 7 + len(ids)], 1, sightings=[2] * len(ids) + [1])
    before = shard.export()
    twice = appended([larger.export().only(slice(0, 1), slice(0, 0))] * 2)
    for state, said in ((larger.export(), "capacity"), (twice, "has two rows")):
        with pytest.raises(ConfigurationError, match=said):
            shard.load([state], 5, clock=90)
        assert same(shard.export(), before)
        assert shard.export().counters.keys() == before.counters.keys()
        for name, counter in before.counters.items():
            np.testing.assert_array_equal(shard.export().counters[name], counter)
        assert (shard.version, shard.clock, shard.rows_of().tolist()) == (1, 50, [2])


def test_a_push_that_is_committed_takes_what_fits() -> None:
    group = [
        table("a", initial=Zeros(), capacity=3),
        table("b", initial=Zeros(), capacity=3, eviction=LRU()),
        table("c", initial=Zeros(), capacity=1, admission=CounterFilter(filter_freq=2)),
        table("d", initial=Zeros()),
    ]
    shard = TableShard(group)
    push(shard, [1, 2, 1, 2, 3], 1, tables=[0, 0, 1, 1, 1])
    tables = [0, 0, 0, 1, 1, 1, 1, 2, 2, 3]
    push(shard, [9, 8, 1, 9, 8, 7, 3, 5, 4, 0], 2, tables=tables, sightings=[2] * 10, strict=False)
    state = shard.export()
    rows = zip(state.tables.tolist(), state.ids.tolist(), state.values[:, 0].tolist(), strict=True)
    kept = [(0, 1, -2), (0, 2, -1), (0, 9, -1), (1, 3, -2), (1, 8, -1), (1, 9, -1), (2, 5, -1)]
    assert list(rows) == [*kept, (3, 0, -1)]
    assert shard.counts["refused_full"].tolist() == [1, 1, 1, 0]
    assert shard.counts["evicted_full"].tolist() == [0, 2, 0, 0]
    assert shard.counts["refused"].tolist() == [0] * 4
    assert shard.counts["admitted"].tolist() == [3, 5, 1, 1]
    assert (state.counted_tables.tolist(), state.counted_ids.tolist()) == ([2], [4])
    push(shard, [4], 3, tables=[2], sightings=[2**31 - 1], strict=False)
    assert shard.export().counted.tolist() == [2**31 - 1]
    with pytest.raises(ConfigurationError, match="is in a push twice"):
        push(shard, [4, 4], 4, tables=[0, 0], strict=False)


@pytest.mark.parametrize("policy", [LRU(), LFU(), LFU(half_life=2), None])
def test_pinned_ids_are_kept_by_a_load_into_a_smaller_table(policy: Any) -> None:
    larger = TableShard([table(eviction=policy, capacity=9)])
    for version, ids in enumerate(([0, 1, 2, 8], [2, 3, 4], [2, 3, 5]), 1):
        push(larger, ids, version)
    shard = TableShard([table(eviction=policy, capacity=5, pinned=[8, 0, 77])])
    pieces = [piece.only(slice(None), slice(0)) for piece in larger.pieces(2)]
    if policy is None:
        with pytest.raises(ConfigurationError, match="capacity is 5, 3 of them for pinned ids"):
            shard.load(pieces, 3)
        return
    shard.load(pieces, 3)
    assert ids_of(shard) == ([0, 3, 5, 8] if policy == LRU() else [0, 2, 3, 8])
    assert shard.rows_of().tolist() == [4]  # the fifth place is for 77
    push(shard, [77, 6], 4)
    assert {0, 6, 8, 77} < set(ids_of(shard))


def test_a_pinned_id_gets_its_row_at_once_and_others_leave_room_for_it() -> None:
    settings: dict[str, Any] = {"capacity": 3, "pinned": np.array([7, 7, 5])}
    shard = TableShard([table(admission=CounterFilter(filter_freq=3), **settings)])
    push(shard, [5, 6], 1)
    assert ids_of(shard) == [5]
    push(shard, [6, 4], 2, sightings=[2, 3], strict=False)
    assert ids_of(shard) == [5, 6]
    assert shard.counts["refused_full"].tolist() == [1]
    push(shard, [7], 3)
    assert ids_of(shard) == [5, 6, 7]
    texts = table(hash="blake2b", pinned=["<unknown>", "anna"])
    assert texts.pinned == table(hash="blake2b", pinned=text_ids(["anna", "<unknown>"])).pinned


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pinned": range(4), "capacity": 3}, "'t' has 4 pinned ids and capacity=3: raise it, or"),
        ({"pinned": [1, 9], "num_embeddings": 9}, "num_embeddings=9 and pins id 9"),
        ({"pinned": ["anna"]}, "pinned ids of table 't' are of <U4: give integers"),
        ({"pinned": [-1]}, "pinned ids of table 't' hold -1"),
    ],
)
def test_pins_that_a_table_cannot_have_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        table(**settings)


def test_pins_for_which_a_part_has_no_room_are_refused_where_the_model_is_made() -> None:
    ids = np.arange(200_000)
    of = shard_of(np.zeros(len(ids), np.int32), ids, spread_of([table(capacity=2**15)], 8))
    pinned = ids[of == of[0]][: 2**14 + 1]
    with pytest.raises(ConfigurationError, match="'t' has 16385 pinned ids in one of its parts"):
        TorchModel(
            Embedding(table(capacity=2**15, pinned=pinned)),
            data=([0], [0]),
            batch_size=1,
            optimizer=sgd(0.1),
            loss=nn.functional.mse_loss,
        )


def test_a_pull_in_training_says_that_there_will_be_no_room() -> None:
    shard = TableShard([table(capacity=3), table("u", capacity=3, eviction=LRU()), table("w")])
    push(shard, [1, 2], 1)
    push(shard, [1, 2, 3], 2, tables=[1] * 3)
    before = shard.export()
    shard.require_room([0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [3, 3, 1, 5, 6, 7, 1, 2, 3, 4])
    with pytest.raises(
        ConfigurationError, match="'t' has no room for 2 more ids beside its 2 rows: its capac"
    ):
        shard.require_room([0, 0, 0, 2], [3, 1, 4, 3])
    with pytest.raises(ConfigurationError, match="'u' has no room for 4 ids at once: its capacity"):
        shard.require_room([1, 1, 1, 1, 1], [1, 5, 6, 5, 7])
    assert same(shard.export(), before)
    frozen = TableShard([table(capacity=1, trainable=False), table("w")])
    frozen.require_room([0, 0], [3, 4])


def test_a_frozen_table_stays_as_it_is() -> None:
    settings: dict[str, Any] = {
        "admission": CounterFilter(filter_freq=2),
        "evict": (GlobalStepEvict(steps_to_live=1),),
    }
    trained = TableShard([table("a", **settings), table("b", **settings)])
    ids, both = [1, 1, 2, 2], [0, 1, 0, 1]
    push(trained, ids, 1, tables=both, sightings=[2, 2, 1, 1])
    shard = TableShard([table("a", trainable=False, **settings), table("b", **settings)])
    shard.load([trained.export()], 1)
    frozen = shard.pull(both, ids)[0]
    for version in (2, 3):
        push(shard, ids, version, tables=both)
    assert np.array_equal(shard.pull([0], [1])[0], frozen)
    assert shard.rows_of().tolist() == [1, 2]
    assert shard.counts["ignored"].tolist() == [4, 0]
    assert shard.evict(9) == 2
    assert shard.rows_of().tolist() == [1, 0]
    again = TableShard(trained.tables)  # trained again
    again.load([shard.export()], 9)
    push(again, [1], 10)
    assert not np.array_equal(again.pull([0], [1])[0], frozen)


# -- admission by a Bloom filter and by chance ----------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("counter_type", ["uint8", "uint16", "uint32"])
def test_a_bloom_filter_with_room_admits_as_a_counter_does(counter_type: str) -> None:
    bloom = CBFFilter(
        filter_freq=3,
        max_element_size=2000,
        false_positive_probability=1e-6,
        counter_type=counter_type,
    )
    first = TableShard([table(admission=bloom)])
    other = TableShard([table(admission=CounterFilter(filter_freq=3))])
    random = np.random.default_rng(0)
    for version in range(1, 40):
        ids = np.unique(random.zipf(1.3, 60) % 2000)
        push(first, ids, version)
        push(other, ids, version)
        assert ids_of(first) == ids_of(other)
    assert 0 < len(first) < 1000


def test_a_bloom_filter_that_is_too_small_admits_early_and_never_late() -> None:
    bloom = CBFFilter(filter_freq=3, max_element_size=100, false_positive_probability=0.1)
    shard = TableShard([table(admission=bloom)])
    push(shard, range(2000), 1)
    push(shard, range(2000), 2)
    assert len(shard) > 0
    push(shard, range(2000), 3)
    assert ids_of(shard) == list(range(2000))
    roomy = CBFFilter(filter_freq=2, max_element_size=2000, false_positive_probability=0.02)
    shard = TableShard([table(admission=roomy)])
    push(shard, range(2000), 1)
    push(shard, range(2000, 2100), 2)
    assert len(shard) < 0.02 * 2000 + 5  # of ids that were seen once


def test_counters_do_not_overflow() -> None:
    bloom = CBFFilter(filter_freq=255, max_element_size=10)
    shard = TableShard([table(admission=bloom)])
    push(shard, [1], 1, sightings=[254])
    assert len(shard) == 0
    push(shard, [1, 2], 2, sightings=[2**31 - 1, 3])
    assert ids_of(shard) == [1]
    exact = TableShard([table(admission=CounterFilter(filter_freq=2**31 - 1))])
    push(exact, [1], 1, sightings=[2**31 - 2])
    push(exact, [1], 2, sightings=[2**31 - 1])
    assert ids_of(exact) == [1]
    push(exact, [1], 3, sightings=[2**31 - 1])
    push(exact, [1], 4, sightings=[2**31 - 1])
    assert exact.export().sightings.tolist() == [2**31 - 1]


@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
def test_ids_are_admitted_by_chance(probability: float) -> None:
    shard = TableShard([table(admission=ProbabilityFilter(probability=probability))], seed=3)
    for version in range(1, 4):
        push(shard, range(10_000), version)
        expected = 10_000 * (1 - (1 - probability) ** version)
        assert abs(len(shard) - expected) <= 5 * math.sqrt(
            expected * (1 - expected / 10_000) + 1e-9
        )
    other = TableShard([table(admission=ProbabilityFilter(probability=probability))], seed=4)
    push(other, range(10_000), 1)
    push(other, range(10_000), 2)
    push(other, range(10_000), 3)
    assert probability in (0.0, 1.0) or ids_of(other) != ids_of(shard)


# -- bad settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CounterFilter(filter_freq=0), r"CounterFilter\(filter_freq\)=0"),
        (lambda: CBFFilter(filter_freq=300, max_element_size=9), "counts to 255; give a wider"),
        (lambda: CBFFilter(filter_freq=3, max_element_size=0), "max_element_size"),
        (
            lambda: CBFFilter(filter_freq=3, max_element_size=9, counter_type="int8"),
            "give uint8, uint16 or uint32",
        ),
        (
            lambda: CBFFilter(filter_freq=3, max_element_size=9, false_positive_probability=1.0),
            "from 1e-09 to 0.5",
        ),
        (lambda: ProbabilityFilter(probability=1.5), "give a finite number from 0 to 1"),
        (lambda: GlobalStepEvict(steps_to_live=0), "steps_to_live"),
        (lambda: L2WeightEvict(l2_weight_threshold=0.0), "give a positive number"),
        (lambda: table(eviction=LRU()), r"eviction=LRU\(\) of table 't' without capacity"),
        (lambda: table(capacity=3, eviction="lru"), r"eviction='lru' .* give LRU\(\), LFU\(\)"),
        (
            lambda: table(admission=3),
            "admission=3 of table 't': give CounterFilter",
        ),
        (lambda: table(evict=LRU()), "give a tuple of at most one GlobalStepEvict"),
        (
            lambda: table(evict=(GlobalStepEvict(steps_to_live=1),) * 2),
            "at most one GlobalStepEvict",
        ),
    ],
)
def test_bad_lives_are_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_kernels_of_a_rows_whole_life_are_compiled() -> None:
    from steepest.tables.rows import eviction

    compile_kernels([table(capacity=5, eviction=LFU())])
    before = len(eviction._take.signatures)  # type: ignore[attr-defined]
    shard = TableShard([table(capacity=1, eviction=LFU())])
    push(shard, [1], 1)
    push(shard, [2], 2)
    assert ids_of(shard) == [2]
    assert len(eviction._take.signatures) == before  # type: ignore[attr-defined]
