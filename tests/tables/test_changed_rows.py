"""Checkpoints whose rows of tables a function changes as they are restored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import ParameterServerStrategy, TableRows, TorchModel
from steepest.errors import CheckpointError, ConfigurationError
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Constant
from steepest.tables.rows.row_optimizers import SGD, Adagrad, RowOptimizer
from steepest.tables.rows.table import Table
from tests.reference import sgd
from tests.table_jobs import trainer

IDS = torch.arange(24) % 13 * 2**40
Rows = Mapping[str, TableRows]


class Summed(nn.Module):
    """The sums of rows of tables, by whose names it has features."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.features = nn.ModuleList(Embedding(table) for table in tables)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = sum(rows(ids).sum(-1) for rows in self.features) + self.bias
        return found


def creator(dims: Mapping[str, int], optimizer: RowOptimizer, shards: int = 3) -> Any:
    def create(worker_index: int, device_index: int) -> TorchModel:
        tables = [
            Table(name, dim, optimizer=optimizer, dtype="float64", initial=Constant(0.5))
            for name, dim in dims.items()
        ]
        return TorchModel(
            Summed(tables),
            loss=lambda output, target: output.mean(),
            data=(IDS, torch.zeros(len(IDS))),
            batch_size=3,
            optimizer=sgd(),
            table_shards=shards,
        )

    return create


def rows_in(job: Any, name: str) -> dict[int, tuple[list[float], list[float], int, int | None]]:
    """What servers say of each row of a table."""
    ids = job.export_table(name).ids.tolist()
    return {
        row.id: (row.values.tolist(), row.slots.tolist(), row.sightings, row.written)
        for row in job.describe_rows(name, ids)
    }


OTHER = ParameterServerStrategy(num_servers=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of tables "a" and "b", and their rows."""
    place = tmp_path_factory.mktemp("saved")
    with trainer(creator({"a": 3, "b": 3}, Adagrad(lr=0.5))) as job:
        job.fit(steps=3, progress=False)
        job.save(place)
        return place, {name: rows_in(job, name) for name in "ab"}


def test_tables_are_merged_and_split_with_all_that_is_known_of_rows(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    place, before = saved

    def merge(name: str, rows: TableRows) -> Rows:
        return {"all": replace(rows, ids=rows.ids + (name == "b"))}

    def split(name: str, rows: TableRows) -> Rows:
        is_b = rows.ids % 2 == 1
        return {"a": rows[~is_b], "b": replace(rows[is_b], ids=rows.ids[is_b] - 1)}

    with trainer(creator({"all": 3}, Adagrad(lr=0.5), shards=5), OTHER) as job:
        job.restore(place, change_rows=merge)
        assert rows_in(job, "all") == before["a"] | {n + 1: row for n, row in before["b"].items()}
        job.save(tmp_path)
    with trainer(creator({"a": 3, "b": 3}, Adagrad(lr=0.5), shards=1)) as job:
        job.restore(tmp_path, change_rows=split)
        assert {name: rows_in(job, name) for name in "ab"} == before
        found = job.export_table("a")
        job.restore(place)  # as it is
        assert torch.equal(job.export_table("a").values, found.values)


@pytest.mark.parametrize("padded", [True, False])
def test_another_dimension_keeps_slots_that_are_given(
    saved: tuple[Path, dict[str, Any]], padded: bool
) -> None:
    """Else they are the optimizer's first ones."""
    place, before = saved
    first = Adagrad(lr=0.5).first_slots(1) * 2

    def widen(name: str, rows: TableRows) -> Rows:
        values = nn.functional.pad(rows.values, (0, 2), value=0.25)
        pad = torch.tensor(first, dtype=torch.float64).expand(len(rows), 2)
        slots = torch.cat([rows.slots, pad], 1) if padded else rows.slots
        return {name: replace(rows, values=values, slots=slots)}

    with trainer(creator({"a": 5}, Adagrad(lr=0.5)), OTHER) as job:
        job.restore(place, change_rows=widen)
        expected = {
            each: ([*values, 0.25, 0.25], [*slots, *first] if padded else [first[0]] * 5, *known)
            for each, (values, slots, *known) in before["a"].items()
        }
        assert rows_in(job, "a") == expected
        job.fit(steps=3, progress=False)


def test_what_a_table_cannot_have_is_refused_and_changes_nothing(
    saved: tuple[Path, dict[str, Any]],
) -> None:
    place, _ = saved
    wrong: list[tuple[Any, str]] = [
        (lambda name, rows: {"a": rows.ids}, "made a Tensor for table 'a'"),
        (
            lambda name, rows: {"a": replace(rows, ids=rows.ids / 2)},
            "made ids of float32 for table 'a': return integers",
        ),
        (lambda name, rows: {"a": rows}, r"values \(\d+, 3\), .* return \(n,\), \(n, 4\)"),
        (
            lambda name, rows: {"a": replace(rows, values=nn.functional.pad(rows.values, (0, 1)))},
            "id .* of table 'a' has two rows",
        ),
    ]
    with trainer(creator({"a": 4}, SGD(lr=0.5))) as job:
        job.fit(steps=1, progress=False)
        before = rows_in(job, "a")
        for change, said in wrong:
            with pytest.raises(CheckpointError, match=said):
                job.restore(place, change_rows=change)
            assert rows_in(job, "a") == before
        with pytest.raises(ConfigurationError, match="change_rows=3: give a function"):
            job.restore(place, change_rows=3)  # type: ignore[arg-type]
