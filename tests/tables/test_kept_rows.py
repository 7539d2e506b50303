"""Evicted rows that are kept come back with their slots and counts."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steepest import AllreduceStrategy, Checkpoints, ParameterServerStrategy
from steepest.checkpoint import files
from steepest.errors import ConfigurationError
from steepest.tables.admission import CounterFilter
from steepest.tables.eviction import LFU, LRU, GlobalStepEvict
from steepest.tables.row_optimizers import Adagrad
from steepest.tables.shard import TableShard
from steepest.tables.state import TableState, increased
from steepest.testing.replay import replay_state
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.table_jobs import trainer, words
from tests.table_tasks import mostly_long, rows_in, same_rows
from tests.table_tools import ids_of, push, same, table

HOW: dict[str, Any] = {"optimizer": Adagrad(lr=0.1)}
FORGETS = {
    "LRU": {"capacity": 15, "eviction": LRU()},
    "ageing LFU": {"capacity": 15, "eviction": LFU(half_life=5)},
    "by age": {"evict": (GlobalStepEvict(7),)},
    "by time": {"ttl": 40},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", FORGETS)
@pytest.mark.parametrize("dtype", mostly_long(["float32", "int8"], "int8"))
def test_with_all_rows_kept_values_are_those_of_a_table_that_evicts_none(
    kind: str, dtype: str
) -> None:
    """To the bit, in pulls and pushes, also in shards that are loaded anew, and from increments."""
    described = table(keep_evicted=1000, **HOW, **FORGETS[kind], dtype=dtype)
    shard, whole = TableShard([described]), TableShard([table(**HOW, dtype=dtype)])
    random, every = np.random.default_rng(0), (np.zeros(120, np.int32), np.arange(120))
    before = chain = shard.export()
    at = 0  # the version of `chain`, of which each increment is one of the last
    for version in range(1, 100):
        ids = np.unique(random.integers(0, 120, 8))
        gradients = random.normal(size=(len(ids), 4)).astype(np.float32)
        for each in (shard, whole):
            each.note_time(1000 + 3 * version)
            each.push(np.zeros(len(ids), np.int32), ids, gradients, version)
            each.evict(version)
            each.end_lives(version)
        assert np.array_equal(shard.pull(*every), whole.pull(*every))
        if random.random() < 0.4:
            chain, at = increased(chain, shard.export(since=at)), version
            assert same(chain, _without_removed(shard.export()))
        if version % 20 == 0:
            state, since = shard.export(), shard.export(since=version - 20)
            assert same(increased(before, since), _without_removed(state))
            state = TableState.of_arrays(state.arrays())
            again = TableShard([described])
            again.load([state], version, shard.clock)
            assert same(again.export(), _without_removed(state))
            shard, before = again, again.export()
            chain, at = before, version
    seen = dict(zip(*_of(whole, "ids", "sightings"), strict=True))
    assert dict(zip(*_of(shard, "ids", "sightings"), strict=True)) == seen
    assert len(shard) < len(whole) == len(seen)
    assert shard.counts["came_back"].sum() > 10


def _of(shard: TableShard, *names: str) -> list[list[int]]:
    state = shard.export()
    return [getattr(state, name).tolist() for name in names]


def _without_removed(state: TableState) -> TableState:
    nothing = {"removed_tables": state.removed_tables[:0], "removed_ids": state.removed_ids[:0]}
    return TableState(**{**vars(state), **nothing})


@pytest.mark.few(2)
@pytest.mark.parametrize("most", [1, 4, 30])
def test_those_evicted_last_are_kept(most: int) -> None:
    """As two ordered dicts say: the rows of a table of at most 10, and those that left it."""
    shard = TableShard([table(capacity=10, eviction=LRU(), keep_evicted=most, **HOW)])
    rows: OrderedDict[int, int] = OrderedDict()
    kept: OrderedDict[int, int] = OrderedDict()
    random, came_back = np.random.default_rng(most), 0
    chain = shard.export()
    for version in range(1, 200):
        ids = np.unique(random.integers(0, 40, 5)).tolist()
        push(shard, ids, version)
        for id in ids:  # those that are kept come back before others leave
            if id not in rows:
                came_back += id in kept
                kept.pop(id, None)
        excess = len(rows.keys() | set(ids)) - 10
        oldest = sorted((rows[id], id) for id in rows if id not in ids)[: max(excess, 0)]
        for _, id in sorted(oldest, key=lambda row: row[1]):
            del rows[id]
            kept[id] = version
        while len(kept) > most:
            kept.popitem(last=False)
        rows |= dict.fromkeys(ids, version)
        state = shard.export()
        chain = increased(chain, shard.export(since=version - 1))
        assert same(chain, _without_removed(state))
        assert state.ids[state.kept == 0].tolist() == sorted(rows)
        assert state.ids[state.kept > 0].tolist() == sorted(kept)
        assert state.kept[state.kept > 0].tolist() == [kept[id] for id in sorted(kept)]
        if version % 60 == 0:
            again = TableShard([table(capacity=10, eviction=LRU(), keep_evicted=most, **HOW)])
            again.load([state], version)
            shard, came_back = again, 0
    assert shard.counts["came_back"].tolist() == [came_back]


def test_a_filter_lets_kept_ids_in_at_once() -> None:
    shard = TableShard(
        [table(capacity=1, eviction=LRU(), keep_evicted=5, admission=CounterFilter(3), **HOW)]
    )
    for version, id in enumerate((1, 1, 1, 2, 2, 2, 1), 1):
        push(shard, [id], version)
    state = shard.export()
    assert state.ids[state.kept == 0].tolist() == [1]
    assert shard.counts["came_back"].tolist() == [1]


def test_a_cut_has_rows_as_they_were_when_they_come_back_or_go_for_good() -> None:
    shard = TableShard([table(capacity=3, eviction=LRU(), keep_evicted=3, **HOW)])
    for version in range(1, 7):
        push(shard, [version], version)
    before = shard.export()
    _, cut = shard.cut()
    for version in range(7, 12):
        push(shard, [version - 5, version + 20], version)
    found = cut.take(100)
    while len(part := cut.take(100)["ids"]):
        raise AssertionError(part)
    order = np.argsort(found["ids"])
    for name, array in found.items():
        assert np.array_equal(array[order], getattr(before, name)), name


@pytest.mark.parametrize("forget", ["evict", "end_lives"])
def test_rows_evicted_without_a_push_are_in_exports(forget: str) -> None:
    """As they are in one's own process: a step pushes to the tables that it looked up, and evicts from all."""
    described = table(keep_evicted=9, ttl=10, evict=(GlobalStepEvict(5),), **HOW)
    shard = TableShard([described])
    shard.note_time(1000)
    push(shard, [1, 2], 1)
    before = shard.export()
    shard.note_time(2000)
    assert getattr(shard, forget)(8) == 2
    state, since = shard.export(), shard.export(since=1)
    assert (state.ids.tolist(), state.kept.tolist()) == ([1, 2], [8, 8])
    assert same(increased(before, since), _without_removed(state))


def test_a_table_that_keeps_none_any_more_forgets_them() -> None:
    shard = TableShard([table(capacity=2, eviction=LRU(), keep_evicted=9, **HOW)])
    for version in range(1, 6):
        push(shard, [version], version)
    other = TableShard([table(capacity=9, eviction=LRU(), **HOW)])
    other.load([shard.export()], 5)
    assert ids_of(other) == [4, 5]
    fewer = TableShard([table(capacity=2, eviction=LRU(), keep_evicted=1, **HOW)])
    fewer.load([shard.export()], 5)
    assert ids_of(fewer) == [3, 4, 5]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_how_many_are_kept_is_a_count(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="keep_evicted of table 't'="):
        table(keep_evicted=wrong, ttl=5)


def test_a_table_that_evicts_none_keeps_none() -> None:
    with pytest.raises(ConfigurationError, match="of table 't' that evicts no row: give eviction="):
        table(keep_evicted=5)


# -- jobs in simulations -----------------------------------------------------------------------------

IDS = torch.arange(90) * 7 % 30


@pytest.mark.full
@pytest.mark.parametrize("disk", mostly_long([False, True], True))
def test_kept_rows_live_through_deaths_moves_checkpoints_and_replays(
    tmp_path: Path, disk: bool
) -> None:
    copies = ParameterServerStrategy(num_servers=2, replication=2)
    how: dict[str, Any] = {"capacity": 8, "eviction": LRU(), "keep_evicted": 100}
    if disk:
        how |= {"directory": str(tmp_path), "memory_rows": 5}
    create = words(IDS, **how)
    with trainer(words(IDS), copies) as sgd:  # without a capacity
        sgd.fit(steps=12, progress=False)
        loss = sgd.evaluate((IDS, torch.zeros(90))).loss
    with trainer(create, copies, run_config=run_config(keep_log=True)) as sgd:
        sgd.fit(steps=12, progress=False)
        assert sgd.evaluate((IDS, torch.zeros(90))).loss == pytest.approx(loss, rel=1e-12)
        before = sgd.export_table("words")
        assert len(before) == 8
        assert sgd.stats().tables["words"]["rows"] == 8
        described = {row.id: row.has_row for row in sgd.describe_rows("words", list(range(30)))}
        assert sorted(id for id, has in described.items() if has) == before.ids.tolist()
        sgd.save(tmp_path / "straight")
        log = sgd.log()
        sgd.fit(steps=1, progress=False)
        changes = sgd.export_table("words", since=before)
        after = set(sgd.export_table("words").ids.tolist())
        removed = set(changes.removed.tolist())
        assert set(before.ids.tolist()) - after <= removed
        assert not removed & after
    expected = rows_in(files.read(tmp_path / "straight"))
    state = replay_state(log, create)
    assert same_rows({n: v for n, v in state.items() if n.startswith("tables/")}, expected)
    simulation = Simulation(3)
    with quiet(), trainer(create, copies, simulation=simulation) as sgd:
        sgd.fit(steps=4, progress=False)
        server = next(each for each in simulation.living() if "server 1" in str(each))
        simulation.world.kill(server, "it was killed. connection error code 2.")
        sgd.fit(steps=4, progress=False)
        sgd.resize(num_servers=3)
        sgd.save(tmp_path / "saved")
        sgd.fit(steps=2, progress=False)  # to be forgotten
        sgd.restore(tmp_path / "saved")
        sgd.set_strategy(AllreduceStrategy())
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path / "moved")
    assert same_rows(rows_in(files.read(tmp_path / "moved")), expected)


def test_increments_of_a_job_are_its_full_checkpoints(tmp_path: Path) -> None:
    """At each step, whatever was evicted in the update before the base, in it, and after it."""
    how: dict[str, Any] = {"capacity": 12, "eviction": LRU(), "keep_evicted": 20, **HOW}
    kept = Checkpoints(tmp_path / "kept", every=2, keep=20, increments=20)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 60, 96))
    with quiet(), trainer(words(ids, **how), checkpoints=kept) as sgd:
        for step in range(2, 14, 2):
            sgd.fit(steps=2, progress=False)
            sgd.save(tmp_path / f"full-{step}")
    sizes = []
    for step in range(2, 14, 2):
        (increment,) = (tmp_path / "kept").glob(f"*-step-{step}")
        expected = rows_in(files.read(tmp_path / f"full-{step}"))
        assert same_rows(rows_in(files.read(increment)), expected)
        sizes.append(sum(len(v) for name, v in expected.items() if name.endswith("/kept")))
    assert sizes[-1] > 20
