"""Capacities are those of tables: a small table's rows are together, in one of the shards."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from steepest import ParameterServerStrategy, connect
from steepest.errors import ConfigurationError
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.eviction import LFU, LRU
from steepest.tables.rows.hashing import deal, shard_of
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import shards_for, spread_of
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation
from tests.table_jobs import trainer, words
from tests.table_tasks import rows_in, same_rows
from tests.table_tools import push, table
from tests.whole_checkpoints import all_of

PART = 1 << 14  # rows of a capacity for each part


def spread_over(capacities: list[int | None], count: int) -> Spread:
    return spread_of([table(f"t{at}", capacity=each) for at, each in enumerate(capacities)], count)


def test_small_tables_are_dealt_into_as_few_shards_as_have_their_parts() -> None:
    small = [table(f"t{at}", num_embeddings=each) for at, each in enumerate([5, PART, 2 * PART])]
    assert spread_of(small, 8).parts.tolist() == [1, 1, 2]
    assert shards_for(small, 8) == 4
    assert shards_for(small[:1], 8) == 1
    assert shards_for([*small, table("other", 3)], 8) == 8
    assert shards_for(small, 2) == 2


def test_tables_have_as_many_parts_as_their_capacity_asks_for() -> None:
    capacities = [None, 1, 2 * PART - 1, 2 * PART, 5 * PART + 3, 10**9]
    spread = spread_over(capacities, 8)
    assert spread.parts.tolist() == [8, 1, 1, 2, 5, 8]
    given = np.array([each or 0 for each in capacities])
    shares = np.array([spread.shares(shard, given) for shard in range(8)])
    assert shares.sum(0).tolist() == given.tolist()  # never more than was given
    for of, parts in zip(shares.T[1:], spread.parts[1:], strict=True):
        assert (of > 0).sum() == parts
        assert np.ptp(of[of > 0]) <= 1
    random = np.random.default_rng(0)
    tables, ids = random.integers(0, 6, 9000), random.integers(0, 2**62, 9000)
    shards = shard_of(tables, ids, spread)
    for number in range(6):
        used = np.unique(shards[tables == number])
        assert len(used) == spread.parts[number]
        if capacities[number]:
            assert (shares[used, number] > 0).all()  # there is room where ids go
    order, begins = deal(tables, ids, spread)
    assert order is not None
    assert shards[order].tolist() == sorted(shards.tolist())
    assert np.diff(begins).tolist() == np.bincount(shards, minlength=8).tolist()


def test_a_dealing_that_was_sent_has_arrays_for_which_kernels_are_compiled() -> None:
    dealing = Dealing((table("a"), table("b", capacity=5)), 8, 0, 0)
    assert dealing.spreads[0].parts.tolist() == [8, 1]
    sent = pickle.loads(pickle.dumps(dealing))
    assert sent == dealing
    assert sent.spreads[0].parts.tolist() == [8, 1]
    assert not sent.spreads[0].parts.flags.writeable


def test_small_tables_of_a_group_are_in_shards_of_their_own() -> None:
    firsts = spread_over([10] * 8, 8).firsts
    assert sorted(firsts.tolist()) == list(range(8))


@pytest.mark.parametrize("count", [1, 8])
def test_a_table_is_full_when_it_has_as_many_rows_as_its_capacity(count: int) -> None:
    described = table(capacity=16)
    rows = LocalRows([described], num_shards=count)
    keys = np.zeros(16, np.int32), np.arange(16) * 2**40
    assert len(rows.pull(0, *keys, training=True)) == 16
    rows.push(0, *keys, np.ones((16, 4), np.float32), np.ones(16, np.int32))
    rows.step()
    assert sum(len(shard) for shard in rows.shards[0]) == 16
    with pytest.raises(ConfigurationError, match="no room for 1 more ids beside its 16 rows"):
        rows.pull(0, keys[0][:1], np.array([3]), training=True)


def test_a_part_that_is_full_says_what_it_has_of_the_capacity() -> None:
    described = table(capacity=2 * PART)
    full = TableShard([described], shard=0, num_shards=2)
    said = f"its capacity is {2 * PART}, of which this one of its 2 parts has {PART}; raise it"
    with pytest.raises(ConfigurationError, match=said):
        push(full, np.arange(PART + 1), 1)


@pytest.mark.parametrize("policy", [LRU(), LFU()])
def test_which_rows_are_kept_does_not_depend_on_shards(policy: Any) -> None:
    found = []
    for count in (1, 5):
        rows = LocalRows([table(capacity=9, eviction=policy)], num_shards=count)
        random = np.random.default_rng(1)
        for _ in range(30):
            ids = np.unique(random.integers(0, 40, 6))
            size = len(ids)
            keys = np.zeros(size, np.int32), ids
            rows.push(0, *keys, np.ones((size, 4), np.float32), np.ones(size, np.int32))
            rows.step()
        found.append(sorted(id for shard in rows.shards[0] for id in shard.export().ids.tolist()))
    assert found[0] == found[1]
    assert len(found[0]) == 9


def test_a_bounded_table_lives_through_deaths_and_moves(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"capacity": 6, "eviction": LRU(), "shards": 8}
    with trainer(words(**settings)) as sgd:
        sgd.fit(steps=6, progress=False)
        assert sgd.stats().tables["words"]["rows"] == 6  # the least of all shards would have none
        sgd.save(tmp_path / "straight")
    expected = rows_in(all_of(tmp_path / "straight"))
    simulation = Simulation(3)
    copies = ParameterServerStrategy(num_servers=2, replication=2)
    with quiet(), trainer(words(**settings), copies, simulation=simulation) as sgd:
        sgd.fit(steps=2, progress=False)
        server = next(each for each in simulation.living() if "server 1" in str(each))
        simulation.world.kill(server, "it was killed. connection error code 2.")
        sgd.fit(steps=2, progress=False)
        sgd.resize(num_servers=3)
        sgd.fit(steps=2, progress=False)
        sgd.save(tmp_path / "moved")
    assert same_rows(rows_in(all_of(tmp_path / "moved")), expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("capacities", [(None, 50), (50, None), (50, 40)])
def test_a_checkpoint_is_restored_where_rows_lie_otherwise(
    tmp_path: Path, capacities: tuple[int | None, int | None]
) -> None:
    before, after = capacities
    with trainer(words(capacity=before)) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path / "saved")
        expected = sgd.export_table("words")
        sgd.fit(steps=3, progress=False)
        later = sgd.export_table("words")
    with trainer(words(capacity=after)) as sgd:
        sgd.restore(tmp_path / "saved")
        found = sgd.export_table("words")
        assert torch.equal(found.ids, expected.ids)
        assert torch.equal(found.values, expected.values)
        sgd.fit(steps=3, progress=False)
        again = sgd.export_table("words")
        assert torch.equal(again.ids, later.ids)
        assert torch.equal(again.values, later.values)
        assert sgd.describe_rows("words", [5])[0].has_row


def test_a_module_of_a_bounded_table_looks_up_as_any_other() -> None:
    module = Embedding(table(capacity=20, dim=3))
    free = Embedding(table(dim=3))
    ids = torch.tensor([[1, 7], [7, 2**50]])
    found = []
    for one in (module, free):
        rows = connect(one, LocalRows([one.tables[0]], num_shards=4))
        one(ids).sum().backward()
        rows.step()
        found.append(one(ids).detach())
    assert torch.equal(*found)
