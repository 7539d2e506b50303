"""Rows that no push has for a time are removed, by the clock of the coordinator, which is in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from steepest import AllreduceStrategy, ParameterServerStrategy, TorchModel, connect
from steepest.core.system import system
from steepest.errors import ConfigurationError
from steepest.tables.modules.collection import EmbeddingCollection
from steepest.tables.rows.eviction import LFU, LRU
from steepest.tables.rows.initial import Constant, Zeros
from steepest.tables.rows.lives import seconds_of
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.state import TableState
from tests.inside import replay_state
from tests.reference import sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config
from tests.table_jobs import trainer, words
from tests.table_tasks import mostly_long, rows_in, same_rows
from tests.table_tools import ids_of, push, same, table
from tests.whole_checkpoints import all_of

HOUR = 3600
MINUTE = 60
PINNED = (3, 70, 140)
COPIES = ParameterServerStrategy(num_servers=2, replication=2)


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [("90s", 90), ("15m", 900), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600), (5, 5)],
)
def test_times_to_live_are_texts_or_seconds(ttl: Any, seconds: int) -> None:
    assert seconds_of("ttl", ttl) == seconds
    assert table(ttl=ttl).life == seconds


@pytest.mark.parametrize(
    "ttl", ["", "7", "d", "7 d", "1.5h", "0s", "-1d", 0, -3, True, 2.5, "9999999w"]
)
def test_other_times_are_refused(ttl: Any) -> None:
    with pytest.raises(ConfigurationError, match="ttl of table 't'=.*: give a whole number of sec"):
        table(ttl=ttl)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", [None, LRU(), LFU()])
def test_rows_end_as_a_dict_of_last_pushes_says(policy: Any) -> None:
    """Two tables of a group, one of whose rows stay; some moves to other shards."""
    capacity = {} if policy is None else {"capacity": 1000, "eviction": policy}
    one = table("a", initial=Zeros(), ttl=320, pinned=PINNED, **capacity)
    group = [one, table("b", initial=Zeros())]
    shard, random = TableShard(group), np.random.default_rng(0)
    last: dict[tuple[int, int], int] = {}
    now, looked, removed = 10_000, 0, 0
    for version in range(1, 300):
        now += int(random.integers(0, 12))
        looks = shard.note_time(now)
        assert looks == (now // 20 != looked // 20)
        looked = now
        keys = np.unique(random.integers([0, 0], [2, 150], (5, 2)), axis=0)
        push(shard, keys[:, 1], version, tables=keys[:, 0])
        last |= {(int(of), int(id)): now for of, id in keys}
        if looks:
            old = [key for key, when in last.items() if key[0] == 0 and when + 320 < now]
            gone = [key for key in old if key[1] not in PINNED]
            assert shard.end_lives(version) == len(gone)
            removed += len(gone)
            for key in gone:
                del last[key]
        state = shard.export()
        assert sorted(last) == list(zip(state.tables.tolist(), state.ids.tolist(), strict=True))
        if version % 100 == 0:
            again = TableShard(group)
            arrays = TableState.of_arrays(state.arrays())
            again.load([arrays], version, shard.clock)
            assert same(again.export(), state)
            shard = again
    assert removed > 20


def test_a_clock_that_goes_back_stands_still() -> None:
    shard = TableShard([table(ttl=10)])
    for version, now in enumerate((1000, 400, 1005), 1):
        shard.note_time(now)
        push(shard, [version], version)
        assert shard.clock == max(1000, now)
    shard.note_time(1011)
    push(shard, [9], 4)
    assert shard.end_lives(4) == 2
    assert ids_of(shard) == [3, 9]


def test_lives_of_rows_begin_when_a_table_gets_a_time_to_live() -> None:
    before = TableShard([table()])
    push(before, [1, 2], 1)
    shard = TableShard([table(ttl=10)])
    shard.load([before.export()], 1)
    shard.note_time(5000)
    assert shard.end_lives(1) == 0
    shard.note_time(5011)
    push(shard, [2], 2)
    assert shard.end_lives(2) == 1
    assert ids_of(shard) == [2]
    assert shard.counts["evicted_ttl"].tolist() == [1]


def test_a_frozen_tables_rows_stay() -> None:
    rows = TableShard([table()])
    push(rows, [1], 1)
    frozen = TableShard([table(ttl=10, trainable=False)])
    frozen.load([rows.export()], 1)
    frozen.note_time(10**6)
    assert frozen.end_lives(2) == 0


def test_what_was_removed_is_part_of_a_later_export() -> None:
    shard = TableShard([table(ttl="1h")])
    shard.note_time(1000)
    push(shard, [1, 2, 3], 1)
    shard.note_time(1000 + 2 * HOUR)
    push(shard, [2], 2)
    shard.end_lives(2)
    changes = shard.export(since=1)
    assert (changes.ids.tolist(), changes.removed_ids.tolist()) == ([2], [1, 3])


def test_rows_of_ones_own_process_end_by_a_clock() -> None:
    now = [1000.0]
    rows = LocalRows([table(ttl="10m")], num_shards=3, clock=lambda: now[0])
    for ids in ([1, 2, 3], [3, 4]):
        keys = np.zeros(len(ids), np.int32), np.array(ids)
        rows.push(0, *keys, np.ones((len(ids), 4), np.float32), np.ones(len(ids), np.int32))
        rows.step()
        now[0] += 500
    now[0] += 50
    rows.step()
    found = sorted(id for shard in rows.shards[0] for id in shard.export().ids.tolist())
    assert found == [3, 4]


# -- jobs in simulations -----------------------------------------------------------------------------


def wait(seconds: float) -> None:
    """Let virtual time pass."""
    system().event().wait(seconds)


STRATEGIES = [
    ParameterServerStrategy(num_servers=2),
    ParameterServerStrategy(num_servers=2, table_staleness=2),
    ParameterServerStrategy(num_servers=1, mode="async"),
    AllreduceStrategy(),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, *STRATEGIES[:2]), ids=str)
def test_rows_that_no_push_has_for_a_time_go_and_a_replay_makes_the_same(
    strategy: Any, tmp_path: Path
) -> None:
    create = words(ttl="1m")
    with trainer(create, strategy, run_config=run_config(keep_log=True)) as sgd:
        sgd.fit(steps=2, progress=False)
        before = sgd.export_table("words")
        assert len(before) == 8
        wait(1.5 * MINUTE)
        sgd.fit(steps=1, progress=False)
        found = sgd.export_table("words")
        assert 0 < len(found) < 8
        counts = sgd.stats().tables["words"]
        assert counts["rows"] + counts["evicted_ttl"] == counts["admitted"]
        changes = sgd.export_table("words", since=before)
        assert sorted(changes.removed.tolist()) == sorted(
            set(before.ids.tolist()) - set(found.ids.tolist())
        )
        sgd.save(tmp_path / "saved")
        log = sgd.log()
    assert all(commit.clock > 0 for part in log.parts for commit in part.commits)
    rows = rows_in(all_of(tmp_path / "saved"))
    state = replay_state(log, create)
    assert same_rows({n: v for n, v in state.items() if n.startswith("tables/")}, rows)


def test_the_time_between_a_checkpoint_and_its_restore_does_not_count(tmp_path: Path) -> None:
    create = words(torch.arange(24), ttl="1m")  # each step has 6 ids, and each epoch every id

    def go_on(sgd: Any) -> list[int]:
        """Step half a life after the fifth step; it was three quarters after the fourth."""
        wait(0.5 * MINUTE)
        sgd.step()
        ids: list[int] = sgd.export_table("words").ids.tolist()
        return ids

    with trainer(create) as sgd:
        sgd.fit(steps=4, progress=False)
        wait(0.75 * MINUTE)
        sgd.step()
        sgd.save(tmp_path)
        expected = go_on(sgd)
        wait(10 * MINUTE)
        sgd.restore(tmp_path)
        assert go_on(sgd) == expected
    with trainer(create) as sgd:  # of another program
        wait(10 * MINUTE)
        sgd.restore(tmp_path)
        assert go_on(sgd) == expected
    assert len(expected) == 12


def test_commits_say_no_time_where_no_table_needs_it() -> None:
    with trainer(words(), run_config=run_config(keep_log=True)) as sgd:
        sgd.fit(steps=2, progress=False)
        assert [commit.clock for commit in sgd.log().commits] == [0, 0]


@pytest.mark.full
def test_lives_and_pins_go_on_through_deaths_moves_and_checkpoints(tmp_path: Path) -> None:
    create = words(torch.tensor([5, 9, 40, *[2, 3] * 30]), ttl="1m", pinned=[40])
    with trainer(create, COPIES) as sgd:
        sgd.fit(steps=3, progress=False)
        wait(0.7 * MINUTE)
        sgd.fit(steps=1, progress=False)
        wait(0.7 * MINUTE)
        sgd.fit(steps=2, progress=False)
        sgd.save(tmp_path / "straight")
    expected = without_times(rows_in(all_of(tmp_path / "straight")))
    simulation = Simulation(3)
    with quiet(), trainer(create, COPIES, simulation=simulation) as sgd:
        sgd.fit(steps=3, progress=False)
        server = next(each for each in simulation.living() if "server 1" in str(each))
        simulation.world.kill(server, "it was killed. connection error code 2.")
        wait(0.7 * MINUTE)
        sgd.fit(steps=1, progress=False)
        sgd.resize(num_servers=3)
        sgd.save(tmp_path / "saved")
        sgd.fit(steps=2, progress=False)  # to be forgotten
        sgd.restore(tmp_path / "saved")
        sgd.set_strategy(AllreduceStrategy())
        wait(0.7 * MINUTE)
        sgd.fit(steps=2, progress=False)
        sgd.save(tmp_path / "moved")
        assert 40 in sgd.export_table("words").ids  # pushed in the first three steps alone
    assert same_rows(without_times(rows_in(all_of(tmp_path / "moved"))), expected)


def without_times(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows without what differs between jobs that take other times."""
    return {
        name: value
        for name, value in rows.items()
        if name.rpartition("/")[2] not in ("clock", "until")
    }


# -- lives by feature --------------------------------------------------------------------------------


class TwoFeatures(nn.Module):
    """A table that two features share; rows of the second stay longer."""

    def __init__(self) -> None:
        super().__init__()
        shared = table("shared", 3, ttl="1m", initial=Constant(0.5), dtype="float64")
        self.found = EmbeddingCollection({"now": shared, "long": shared}, ttl={"long": "3m"})
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, now: torch.Tensor, long: torch.Tensor) -> torch.Tensor:
        found = self.found({"now": now, "long": long})
        out: torch.Tensor = found["now"].sum(1) + found["long"].sum(1) + self.bias
        return out


def test_a_row_stays_as_long_as_the_last_of_its_features_says() -> None:
    """As a dict of ends says, which pushes move on and never back."""
    now, random = [10_000], np.random.default_rng(0)
    net = TwoFeatures()
    (shared,) = net.found.tables
    rows = LocalRows([shared], num_shards=3, clock=lambda: now[0])
    connect(net, rows)
    ends: dict[int, int] = {}
    looked, removed = 0, 0
    for _ in range(150):
        now[0] += int(random.integers(0, 10))
        short, long = (torch.tensor(random.integers(0, 60, 2)) for _ in range(2))
        net(short, long).sum().backward()
        rows.step()
        for ids, life in ((short, 60), (long, 180)):
            for id in ids.tolist():
                ends[id] = max(ends.get(id, 0), now[0] + life)
        if now[0] // 3 != looked // 3:
            gone = [id for id, end in ends.items() if end < now[0]]
            removed += len(gone)
            for id in gone:
                del ends[id]
        looked = now[0]
        held = np.concatenate([shard.export().ids for shard in rows.shards[0]])
        assert sorted(held.tolist()) == sorted(ends)
    assert removed > 20


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", mostly_long(STRATEGIES, STRATEGIES[1]), ids=str)
def test_lives_by_feature_travel_and_are_replayed(strategy: Any, tmp_path: Path) -> None:
    data = torch.arange(24) % 8, torch.arange(24) % 8 + 100, torch.zeros(24)

    def create(worker_index: int, device_index: int) -> TorchModel:
        loss = lambda output, target: output.mean()  # noqa: E731
        return TorchModel(TwoFeatures(), loss=loss, data=data, batch_size=2, optimizer=sgd())

    with trainer(create, strategy, run_config=run_config(keep_log=True)) as found:
        found.fit(steps=6, progress=False)
        assert len(found.export_table("shared")) == 16
        wait(1.5 * MINUTE)
        found.fit(steps=1, progress=False)
        held = found.export_table("shared").ids
        assert (held >= 100).sum() == 8
        assert 0 < (held < 100).sum() < 8
        found.save(tmp_path / "saved")
        wait(4 * MINUTE)
        found.fit(steps=1, progress=False)
        assert len(found.export_table("shared")) < 16
        log = found.log()
        found.save(tmp_path / "end")
    state = replay_state(log, create)
    expected = rows_in(all_of(tmp_path / "end"))
    assert same_rows({n: v for n, v in state.items() if n.startswith("tables/")}, expected)
    with trainer(
        create, strategy, workers=1
    ) as found:  # gradients that are not pushed yet among them
        found.restore(tmp_path / "saved")
        found.fit(steps=1, progress=False)


@pytest.mark.parametrize(
    ("ttl", "said"),
    [
        ({"other": "1d"}, "ttl={'other': '1d'}: give a dict with some of the features 'a', 'b'"),
        ({"a": "soon"}, "ttl of feature 'a'='soon': give a whole number"),
        ({"b": "1d"}, r"ttl of feature 'b', whose table 'u' keeps its rows: give Table\(ttl"),
    ],
)
def test_wrong_lives_of_features_are_refused(ttl: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        EmbeddingCollection({"a": table("t", ttl=5), "b": table("u")}, ttl=ttl)
