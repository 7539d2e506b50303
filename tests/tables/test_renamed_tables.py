"""Checkpoints restored into jobs whose embedding tables have other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import Checkpoints, ParameterServerStrategy, TorchModel
from steepest.errors import CheckpointError, ConfigurationError
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.admission import CounterFilter
from steepest.tables.rows.initial import Constant
from steepest.tables.rows.row_optimizers import Adagrad
from steepest.tables.rows.table import Table
from tests.reference import sgd
from tests.table_jobs import FIRST, IDS, trainer

SEEN = IDS % 50  # of tables whose ids are bounded


class Named(nn.Module):
    """Rows of tables, added up; each is called by its number, whatever its name."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.features = nn.ModuleList(Embedding(table) for table in tables)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = sum(rows(ids).sum(-1) for rows in self.features) + self.bias
        return found


def creator(names: str, ids: torch.Tensor = IDS, shards: int = 3, **settings: Any) -> Any:
    """Tables of some names; first values are alike, so that rows do not depend on names."""
    how = {"optimizer": Adagrad(lr=0.5), "dtype": "float64", "initial": Constant(FIRST)} | settings

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Named([Table(name, 3, **how) for name in names]),
            loss=lambda output, target: output.mean(),
            data=(ids, torch.zeros(len(ids))),
            batch_size=3,
            optimizer=sgd(),
            table_shards=shards,
        )

    return create


def rows_in(job: Any, names: str) -> list[Any]:
    """What each table has: ids, values, and all that servers say of its rows."""
    found = []
    for name in names:
        table = job.export_table(name)
        ids = sorted({*IDS.tolist()})
        rows = [str(row).replace(f"'{name}'", "a name") for row in job.describe_rows(name, ids)]
        found.append((table.ids.tolist(), table.values.tolist(), rows))
    return found


SETTINGS: list[dict[str, Any]] = [{}, {"admission": CounterFilter(filter_freq=2)}]


@pytest.mark.parametrize("settings", SETTINGS, ids=["", "counted"])
@pytest.mark.parametrize(("shards", "servers"), [(3, 2), (5, 1)])
def test_a_table_goes_on_under_another_name(
    settings: dict[str, Any], shards: int, servers: int, tmp_path: Path
) -> None:
    """Also where another takes the name that it had."""
    renames = {"a": "z", "b": "c", "c": "b"}
    with trainer(creator("abcd", **settings)) as job:
        job.fit(steps=3, progress=False)
        job.save(tmp_path)
        saved = rows_in(job, "abcd")
        job.fit(steps=3, progress=False)
        later = rows_in(job, "abcd")
    strategy = ParameterServerStrategy(num_servers=servers)
    with trainer(creator("zcbd", shards=shards, **settings), strategy) as job:
        job.restore(tmp_path, rename_tables=renames)
        assert rows_in(job, "zcbd") == saved
        job.fit(steps=3, progress=False)
        assert rows_in(job, "zcbd") == later


def test_a_table_that_workers_hold_goes_on_under_another_name(tmp_path: Path) -> None:
    held: dict[str, Any] = {"ids": SEEN, "num_embeddings": 50}
    with trainer(creator("ab", **held)) as job:
        job.fit(steps=3, progress=False)
        job.save(tmp_path)
        values = [job.export_table(name).values for name in "ab"]
    for replicate in (None, False):
        with trainer(creator("ca", **held, replicate=replicate)) as job:
            job.restore(tmp_path, rename_tables={"a": "c", "b": "a"})
            found = [job.export_table(name) for name in "ca"]
            for table, before in zip(found, values, strict=True):
                assert torch.equal(table.look_up(SEEN), before[SEEN])


def test_a_program_that_is_started_again_renames_once(tmp_path: Path) -> None:
    def day(names: str, steps: int) -> Any:
        renames = {"a": "i"} if names[0] == "i" else None
        kept = Checkpoints(tmp_path, every=1, increments=2, rename_tables=renames)
        with trainer(creator(names), checkpoints=kept) as job:
            job.fit(steps=steps, progress=False)
            return rows_in(job, names)

    day("ab", 2)
    renamed = day("ib", 4)
    assert day("ib", 4) == renamed
    renamed = day("ib", 6)
    assert day("ib", 6) == renamed
    with trainer(creator("ab")) as job:
        job.fit(steps=6, progress=False)
        assert rows_in(job, "ab") == renamed


def test_what_cannot_be_renamed_is_refused(tmp_path: Path) -> None:
    with trainer(creator("ab")) as job:
        job.fit(steps=1, progress=False)
        job.save(tmp_path)
        before = rows_in(job, "ab")
        with pytest.raises(CheckpointError, match="it has no embedding table 'x' to rename 'y'"):
            job.restore(tmp_path, rename_tables={"x": "y"})
        with pytest.raises(CheckpointError, match="'a' and 'b': the former cannot be renamed 'b'"):
            job.restore(tmp_path, rename_tables={"a": "b"})
        for wrong in (["a"], {"a": 1}, {"a": ""}, {"a": "c", "b": "c"}):
            with pytest.raises(ConfigurationError, match="give new names of tables by old ones"):
                job.restore(tmp_path, rename_tables=wrong)
        assert rows_in(job, "ab") == before
    with pytest.raises(ConfigurationError, match="give new names"):
        Checkpoints(tmp_path, rename_tables={"a": 1})  # type: ignore[dict-item]
