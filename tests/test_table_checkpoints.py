"""Checkpoints of embedding tables: into other shards, servers, strategies and capacities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, ExportedTable, ParameterServerStrategy
from steepest.checkpoint import files
from steepest.errors import CheckpointError
from steepest.tables.admission import CBFFilter, CounterFilter
from steepest.tables.eviction import LRU
from steepest.tables.row_optimizers import Adagrad
from tests.table_jobs import trainer, words


def same(one: ExportedTable, other: ExportedTable) -> bool:
    """Whether two exports have the same bits."""
    return torch.equal(one.ids, other.ids) and torch.equal(one.values, other.values)


@pytest.mark.parametrize("shards", [1, 3, 5])
@pytest.mark.parametrize(
    "strategy",
    [ParameterServerStrategy(num_servers=3), AllreduceStrategy()],
    ids=["ps", "allreduce"],
)
def test_a_job_with_other_shards_and_servers_goes_on(
    shards: int, strategy: Any, tmp_path: Path
) -> None:
    settings: Any = {"optimizer": Adagrad(), "admission": CounterFilter(filter_freq=2)}
    with trainer(words(**settings)) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path)
        sgd.fit(steps=3, progress=False)
        expected = sgd.export_table("words")
    assert len(expected) > 0
    with trainer(words(shards=shards, **settings), strategy) as sgd:
        sgd.restore(tmp_path)
        sgd.fit(steps=3, progress=False)
        assert same(sgd.export_table("words"), expected)
        sgd.save(tmp_path / "again")
    saved = files.read(tmp_path / "again").optimizer
    names = {name.split("/")[1] for name in saved if name.startswith("tables/")}
    assert names == set(map(str, range(shards)))


def test_counters_of_a_bloom_filter_go_on_in_other_shards(tmp_path: Path) -> None:
    ids = torch.arange(12).repeat_interleave(2)  # each twice in an epoch of four steps
    settings: Any = {"admission": CBFFilter(filter_freq=3, max_element_size=100)}
    with trainer(words(ids, **settings)) as sgd:
        sgd.fit(epochs=1, progress=False)
        assert len(sgd.export_table("words")) == 0
        sgd.save(tmp_path)
    for shards in (5, 2):
        with trainer(words(ids, shards=shards, **settings)) as sgd:
            sgd.restore(tmp_path)
            assert len(sgd.export_table("words")) == 0
            sgd.save(tmp_path)
            sgd.fit(epochs=1, progress=False)
            assert len(sgd.export_table("words")) == 12


def test_a_job_with_other_capacities_goes_on(tmp_path: Path) -> None:
    with trainer(words(shards=1)) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path)
        before = sgd.export_table("words")
    with trainer(words(shards=1, capacity=5, eviction=LRU())) as sgd:
        sgd.restore(tmp_path)
        fewer = sgd.export_table("words")
        assert len(fewer) == 5 < len(before)
        assert torch.isin(fewer.ids, before.ids).all()
    with trainer(words(shards=1, capacity=7)) as sgd:
        sgd.fit(steps=1, progress=False)
        kept = sgd.export_table("words")
        with pytest.raises(
            CheckpointError, match=r"not of this job: .*'words' has 8 rows here, its capacity is 7"
        ):
            sgd.restore(tmp_path)
        assert same(sgd.export_table("words"), kept)
    with trainer(words(capacity=100)) as sgd:
        sgd.restore(tmp_path)
        assert same(sgd.export_table("words"), before)
