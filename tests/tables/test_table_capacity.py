"""Tables on servers that admit, evict, and are full."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steepest import AllreduceStrategy, DistributedSGD, ParameterServerStrategy
from steepest.core.messages.driver import Failure, Result
from steepest.errors import ModelRaisedError, ResourcesError
from steepest.tables.rows import blocks, memory
from steepest.tables.rows.admission import CBFFilter, CounterFilter, ProbabilityFilter
from steepest.tables.rows.eviction import LFU, LRU
from steepest.tables.rows.shard import TableShard
from tests.inside import replay_state
from tests.modes import TOGETHER, make, trained
from tests.reference import same_bits
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.table_jobs import trainer, words
from tests.table_tasks import (
    OPTIMIZERS,
    clicks,
    mostly_long,
    rows_in,
    rows_of,
    same_rows,
    table_task,
)
from tests.table_tools import table
from tests.whole_checkpoints import all_of

STEPS = 12
ADAM = OPTIMIZERS["Adam"].ours
LIVES: dict[str, dict[str, Any]] = {
    "LRU": {"capacity": 12, "eviction": LRU()},
    "LFU": {"capacity": 12, "eviction": LFU()},
    "LFU, some pinned": {"capacity": 12, "eviction": LFU(), "pinned": (2, 17, 19)},
    "LFU, ageing": {"capacity": 12, "eviction": LFU(half_life=3)},
    "counted": {"admission": CounterFilter(filter_freq=3)},
    "by a Bloom filter": {
        "admission": CBFFilter(filter_freq=3, max_element_size=64, false_positive_probability=0.01)
    },
    "by chance": {"admission": ProbabilityFilter(probability=0.5)},
    "counted, and LFU": {
        "admission": CounterFilter(filter_freq=2),
        "capacity": 12,
        "eviction": LFU(),
    },
}


@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("life", mostly_long(LIVES, "counted, and LFU"))
def test_the_same_ids_have_rows_at_any_number_of_servers(life: str) -> None:
    task = table_task(data=clicks(61), row_optimizer=ADAM, **LIVES[life])
    everything = table_task(data=clicks(61), row_optimizer=ADAM)
    expected = make("sync", task, servers=1)
    trained(expected, STEPS)
    rows = rows_of(expected)
    for mode, servers in (("sync", 2), ("copies", 3), ("allreduce", 3)):
        cluster = make(mode, task, servers=servers, shuffle=servers)
        trained(cluster, STEPS)
        assert same_rows(rows_of(cluster), rows)
        for server in cluster.servers:
            for held in server.chunks.values():
                if held.chunk.is_opaque:
                    theirs = expected.servers[0].chunks[held.chunk.index].rows.counts
                    assert {n: c.tolist() for n, c in held.rows.counts.items()} == {
                        n: c.tolist() for n, c in theirs.items()
                    }
    state = replay_state(expected.log(), task.creator())
    assert same_rows({n: v for n, v in state.items() if n.startswith("tables/")}, rows)
    unlimited = make("sync", everything, servers=1)
    trained(unlimited, STEPS)
    fewer = [len(value) for name, value in rows.items() if name.endswith("/ids")]
    most = [len(v) for name, v in rows_of(unlimited).items() if name.endswith("/ids")]
    assert sum(fewer) < sum(most)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", mostly_long([*TOGETHER, "async", "ssp-0"], "copies"))
def test_a_full_table_is_an_error_of_the_step_and_nothing_is_lost(name: str) -> None:
    task = table_task(data=clicks(61), capacity=8)
    cluster = make(name, task, 2)
    taken: list[Result] = []
    failure = None
    while failure is None:
        before = rows_of(cluster), cluster.weights()
        (outcome,) = cluster.step(1)
        if isinstance(outcome, Failure):
            failure = outcome
        else:
            taken.append(outcome)
    assert taken
    assert failure.reason == "raised"
    assert failure.worker in (0, 1)
    assert failure.step == len(taken)
    assert "beside its " in failure.error
    assert "its capacity is 8; " in failure.error
    assert "raise it, or give eviction=LRU() or LFU()" in failure.error
    if name in TOGETHER:
        assert same_rows(rows_of(cluster), before[0])
        assert same_bits(cluster.weights(), before[1])
    (again,) = cluster.step(1)
    assert isinstance(again, Failure)


def test_rows_for_which_two_workers_have_no_room_together_are_counted_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    users = torch.arange(12)
    data = users, torch.zeros(12, 4, dtype=torch.long), torch.zeros(12, 2, dtype=torch.float64)
    task = table_task(data=data, capacity=5)
    cluster = make("sync", task, 3, servers=1)
    while isinstance(cluster.step(1)[0], Result):
        pass
    counts = [
        held.rows.counts["refused_full"].tolist()
        for held in cluster.servers[0].chunks.values()
        if held.chunk.is_opaque
    ]
    assert sum(map(sum, counts)) > 0
    assert "table 'users' is full" in caplog.text


def trainer_of(strategy: Any, **tables: Any) -> DistributedSGD:
    task = table_task(data=clicks(61), row_optimizer=ADAM, **tables)
    return DistributedSGD(task.creator(), 2, strategy=strategy, run_config=run_config())


def saved_by(strategy: Any, path: Path, **tables: Any) -> dict[str, torch.Tensor]:
    with Simulation(1).running(), trainer_of(strategy, **tables) as trainer:
        trainer.fit(steps=6, progress=False)
        trainer.save(path)
    return rows_in(all_of(path))


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.long
@pytest.mark.parametrize("life", LIVES)
def test_what_rows_live_through_goes_on_after_moves_and_checkpoints(
    life: str, tmp_path: Path
) -> None:
    ps = ParameterServerStrategy(num_servers=2)
    with quiet(), Simulation(1).running(), trainer_of(ps, **LIVES[life]) as trainer:
        trainer.fit(steps=18, progress=False)
        trainer.save(tmp_path / "straight")
    expected = rows_in(all_of(tmp_path / "straight"))
    saved_by(ps, tmp_path / "saved", **LIVES[life])
    with (
        quiet(),
        Simulation(1).running(),
        trainer_of(AllreduceStrategy(), **LIVES[life]) as trainer,
    ):
        trainer.restore(tmp_path / "saved")
        trainer.fit(steps=4, progress=False)
        trainer.set_strategy(ParameterServerStrategy(num_servers=3, replication=2))
        trainer.fit(steps=4, progress=False)
        trainer.resize(num_servers=2)
        trainer.fit(steps=4, progress=False)
        trainer.save(tmp_path / "end")
    assert same_rows(rows_in(all_of(tmp_path / "end")), expected)


def test_a_full_table_is_told_with_its_worker_and_step() -> None:
    ps = ParameterServerStrategy(num_servers=2)
    told = (
        r"worker [01].* raised in step \d+: .*table '(users|items)' has no room.* beside its [678] rows: "
        r".*capacity is 8; raise it"
    )
    with quiet(), Simulation(1).running(), trainer_of(ps, capacity=8) as trainer:
        with pytest.raises(ModelRaisedError, match=told):
            trainer.fit(steps=20, progress=False)
        trainer.evaluate(clicks(5))


@pytest.mark.long
def test_no_memory_for_more_rows_is_an_error_of_the_step_and_the_job_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_LEAST", mmap.PAGESIZE)  # what the system allows: a page
    monkeypatch.setattr(blocks, "physical_bytes", lambda: 1)
    few = mmap.PAGESIZE // 24  # three float64 each
    ids = torch.arange(6 * few)
    with trainer(words(ids, shards=1)) as sgd:
        refused = r"table 'words': no room for \d+ rows of 24 bytes: .* Set a table's capacity"
        with pytest.raises(ModelRaisedError, match=refused):
            sgd.fit(epochs=1, progress=False)
        before, weights = sgd.export_table("words"), sgd.weights()
        assert 0 < len(before) <= few
        assert sgd.evaluate((ids[-6:], torch.zeros(6))).samples == 6  # it asks for no room
        after = sgd.export_table("words")
        assert torch.equal(before.ids, after.ids)
        assert torch.equal(before.values, after.values)
        assert same_bits(sgd.weights(), weights)


def test_no_memory_for_the_rows_of_a_push_names_the_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "_LEAST", mmap.PAGESIZE)
    monkeypatch.setattr(blocks, "physical_bytes", lambda: 1)
    shard = TableShard([table("a", 3), table("b", 3), table("c", 3)])
    many = mmap.PAGESIZE // 12
    numbers, ids = np.array([0] * many + [2], np.int32), np.arange(many + 1)
    for ask in (
        lambda: shard.require_room(numbers, ids),
        lambda: shard.push(numbers, ids, np.zeros((many + 1, 3), np.float32), 1),
    ):
        with pytest.raises(ResourcesError, match=f"table 'a', 'c': no room for {many + 1} rows"):
            ask()
    assert (len(shard), shard.version) == (0, 0)
