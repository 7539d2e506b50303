"""Checkpoints restored into jobs whose embedding tables are others: added, dropped, of another optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steepest import AllreduceStrategy, ParameterServerStrategy, RunConfig, TorchModel
from steepest.core.engine.job import ModelCreator
from steepest.errors import CheckpointError
from steepest.strategies.local import LocalStrategy
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.admission import CBFFilter, CounterFilter
from steepest.tables.rows.initial import Constant
from steepest.tables.rows.row_optimizers import SGD, Adagrad
from steepest.tables.rows.table import Table
from steepest.testing import replay
from tests.reference import same_bits, sgd
from tests.table_jobs import FIRST, IDS, trainer


class Sums(nn.Module):
    """Rows of some tables, added up."""

    def __init__(self, tables: list[Table]) -> None:
        super().__init__()
        self.features = nn.ModuleDict({table.name: Embedding(table) for table in tables})
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = sum(self.features[name](ids).sum(-1) for name in self.features) + self.bias
        return found


def tables_of(names: str, dim: int = 3, **settings: Any) -> list[Table]:
    """One table for each letter: lower-case ones together, upper-case ones in a group of their own."""
    found = []
    for name in names:
        how = {"optimizer": SGD(lr=1.0 if name.islower() else 0.5), "dtype": "float64"} | settings
        found.append(Table(name, dim, initial=Constant(FIRST), **how))
    return found


def model_of(tables: list[Table], shards: int = 3) -> ModelCreator:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Sums(tables),
            loss=lambda output, target: output.mean(),
            data=(IDS, torch.zeros(len(IDS))),
            batch_size=3,
            optimizer=sgd(),
            table_shards=shards,
        )

    return create


def rows_of(sgd: Any, names: str) -> dict[str, tuple[list[int], Tensor]]:
    exports = {name: sgd.export_table(name) for name in names}
    return {name: (table.ids.tolist(), table.values) for name, table in exports.items()}


def equal(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(
        one[name][0] == other[name][0] and torch.equal(one[name][1], other[name][1]) for name in one
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("before", "after", "shards"),
    [
        ("abA", "cbA", 3),
        pytest.param("abA", "BAb", 5, marks=pytest.mark.long),
        pytest.param("abA", "Aab", 5, marks=pytest.mark.long),
        pytest.param("A", "bA", 3, marks=pytest.mark.long),
        pytest.param("abA", "cCa", 3, marks=pytest.mark.long),
    ],
)
def test_rows_are_found_by_the_names_of_their_tables(
    before: str, after: str, shards: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(model_of(tables_of(before))) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path)
        saved = rows_of(sgd, before)
        sgd.fit(steps=3, progress=False)
        later = rows_of(sgd, before)
    with trainer(model_of(tables_of(after), shards)) as sgd:
        fresh = rows_of(sgd, after)
        sgd.restore(tmp_path)
        found = rows_of(sgd, after)
        assert equal(found, {name: saved.get(name, fresh[name]) for name in after})
        sgd.fit(steps=3, progress=False)
        found = rows_of(sgd, after)
        kept = [name for name in after if name in before]
        assert equal({n: found[n] for n in kept}, {n: later[n] for n in kept})
    text = caplog.text
    new = [name for name in after if name not in before]
    dropped = [name for name in before if name not in after]
    assert ("new, without rows yet: " + ", ".join(map(repr, new)) in text) == bool(new)
    assert ("dropped with their rows: " + ", ".join(map(repr, dropped)) in text) == bool(dropped)


@pytest.mark.parametrize(
    "admission", [CounterFilter, pytest.param(CBFFilter, marks=pytest.mark.long)]
)
def test_what_filters_have_counted_stays_with_its_table(admission: Any, tmp_path: Path) -> None:
    more = {"max_element_size": 100} if admission is CBFFilter else {}
    how: dict[str, Any] = {"admission": admission(filter_freq=4, **more)}
    with trainer(model_of(tables_of("ab", **how))) as sgd:
        sgd.fit(epochs=1, progress=False)
        assert rows_of(sgd, "b")["b"][0] == []
        sgd.save(tmp_path)
        sgd.fit(epochs=1, progress=False)
        expected = rows_of(sgd, "b")
        assert expected["b"][0]
    with trainer(model_of(tables_of("cdb", **how))) as sgd:
        sgd.restore(tmp_path)
        sgd.fit(epochs=1, progress=False)
        assert equal(rows_of(sgd, "b"), expected)
        assert rows_of(sgd, "c")["c"][0] == []


def test_slots_of_another_optimizer_begin_anew_and_this_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(model_of(tables_of("ab"))) as sgd:
        sgd.fit(steps=2, progress=False)
        sgd.save(tmp_path)
        before = rows_of(sgd, "ab")
    lr = 0.25
    with trainer(model_of(tables_of("ab", optimizer=Adagrad(lr=lr)))) as sgd:
        sgd.restore(tmp_path)
        assert equal(rows_of(sgd, "ab"), before)
        sgd.step()
        moved = (rows_of(sgd, "a")["a"][1] - before["a"][1]).abs()
    assert sorted({round(float(by), 6) for by in moved.flatten()}) == [0.0, lr]  # of a first push
    said = [record.message for record in caplog.records if "slots" in record.message]
    assert len(said) == 1
    assert (
        "another optimizer, whose slots begin anew: 'a' (SGD before, Adagrad now), 'b'" in said[0]
    )


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.5), (0.5, 0.0)])
def test_slots_of_the_same_class_begin_anew_where_their_number_is_another(
    before: float, after: float, tmp_path: Path
) -> None:
    """A first push with momentum is one without."""
    with trainer(model_of(tables_of("ab", optimizer=SGD(lr=1.5, momentum=before)))) as sgd:
        sgd.fit(steps=2, progress=False)
        sgd.save(tmp_path)
        saved = rows_of(sgd, "ab")
    with trainer(model_of(tables_of("ba", optimizer=SGD(lr=1.5, momentum=after)))) as sgd:
        sgd.restore(tmp_path)
        assert equal(rows_of(sgd, "ab"), saved)
        sgd.step()
        moved = rows_of(sgd, "a")["a"][1] - saved["a"][1]
    assert torch.allclose(moved.sum(0), torch.tensor(-1.5).double())
    assert torch.allclose((moved / 0.25).round() * 0.25, moved)  # of each of the 6 samples


@pytest.mark.parametrize("name", ["c", "C"])  # in the group of the others, and in one of its own
def test_a_table_that_workers_held_joins_two_of_one_group_on_servers(
    name: str, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"num_embeddings": 1001}
    before = tables_of("ab") + tables_of(name, replicate=True, **how)
    with trainer(model_of(before)) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.save(tmp_path)
        sgd.fit(steps=3, progress=False)
        expected = [sgd.export_table(each).look_up(IDS) for each in "ab" + name]
    after = tables_of("ab") + tables_of(name, replicate=False, **how)
    with trainer(model_of(after)) as sgd:
        sgd.restore(tmp_path)
        sgd.fit(steps=3, progress=False)
        found = [sgd.export_table(each).look_up(IDS) for each in "ab" + name]
    assert all(map(torch.equal, found, expected))


@pytest.mark.few(1)
@pytest.mark.parametrize("other", [{"dim": 4}, {"dtype": "float32"}])
def test_another_dimension_is_refused_by_name(other: dict[str, Any], tmp_path: Path) -> None:
    with trainer(model_of(tables_of("ab"))) as sgd:
        sgd.step()
        sgd.save(tmp_path)
    with trainer(model_of(tables_of("c") + tables_of("b", **other))) as sgd:
        with pytest.raises(
            CheckpointError, match=r"its embedding table 'b' has dimension 3 and .*another name"
        ):
            sgd.restore(tmp_path)
        sgd.step()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(AllreduceStrategy(), id="allreduce", marks=pytest.mark.long),
        pytest.param(LocalStrategy(sync_every=2), id="local"),
        pytest.param(ParameterServerStrategy(num_servers=2, table_staleness=2), id="hybrid"),
    ],
)
def test_every_strategy_goes_on_with_other_tables(strategy: Any, tmp_path: Path) -> None:
    with trainer(model_of(tables_of("abA")), strategy) as sgd:
        sgd.fit(steps=4, progress=False)
        sgd.save(tmp_path)
        sgd.fit(steps=4, progress=False)
        expected = rows_of(sgd, "bA")
    with trainer(model_of(tables_of("cAb"), 5), strategy) as sgd:
        sgd.restore(tmp_path)
        sgd.fit(steps=4, progress=False)
        assert equal(rows_of(sgd, "bA"), expected)
        assert rows_of(sgd, "c")["c"][0]


@pytest.mark.long
def test_a_model_may_lose_all_tables_and_get_its_first(tmp_path: Path) -> None:
    with trainer(model_of(tables_of("ab"))) as sgd:
        sgd.step()
        sgd.save(tmp_path / "with")
    with trainer(model_of([])) as sgd:
        sgd.restore(tmp_path / "with")
        assert sgd.stats().step == 1
        sgd.step()
        sgd.save(tmp_path / "without")
    with trainer(model_of(tables_of("a"))) as sgd:
        sgd.fit(steps=3, progress=False)
        sgd.restore(tmp_path / "without")
        assert rows_of(sgd, "a")["a"][0] == []
        sgd.step()
        assert rows_of(sgd, "a")["a"][0]


@pytest.mark.full
def test_a_log_after_such_a_restore_is_replayed(tmp_path: Path) -> None:
    with trainer(model_of(tables_of("abA"))) as sgd:
        sgd.fit(steps=2, progress=False)
        sgd.save(tmp_path)
    create = model_of(tables_of("cAb"))
    with trainer(create, run_config=RunConfig(keep_log=True)) as sgd:
        sgd.restore(tmp_path)
        sgd.fit(steps=3, progress=False)
        weights, log = sgd.weights(), sgd.log()
    assert same_bits(replay(log, create, tmp_path), weights)
