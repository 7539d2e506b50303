"""Ids without rows have one value: in training, in evaluations, and in what is exported for serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steepest import Embedding, ExportedTable, TorchModel, connect
from steepest.errors import ConfigurationError
from steepest.tables.files.row_values import narrow, wide
from steepest.tables.rows.admission import CounterFilter
from steepest.tables.rows.first_values import constant_without_rows, values_without_rows
from steepest.tables.rows.initial import Constant, Initial, Normal, TruncatedNormal, Uniform, Zeros
from steepest.tables.rows.local import LocalRows
from steepest.tables.rows.row_formats import DTYPES
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.table import Table
from tests.table_jobs import IDS, trainer, words
from tests.table_tools import table

SOME = np.append(np.arange(5000), [2**63 - 1, 2**62 + 12345, 987654321])
WAYS: list[Initial] = [
    Zeros(), Constant(0.3), Constant(-1e5), Uniform(-0.2, 3.0), Normal(0.5, 0.1), Normal(0.0, 1e5),
    TruncatedNormal(0.0, 1.0, 2.5, 9.0),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_without_a_shard_ids_have_the_bits_that_servers_answer(way: Initial, dtype: str) -> None:
    described = Table("words", 6, initial=way, dtype=dtype)
    expected = TableShard([described], seed=3).pull(np.zeros(len(SOME), np.int32), SOME)
    assert np.array_equal(values_without_rows(described, SOME, 3), expected)
    one = expected[0, 0] if isinstance(way, (Zeros, Constant)) else 0.0
    assert constant_without_rows(described) == one


@pytest.mark.parametrize("default", [None, Zeros(), Constant(0.25)])
@pytest.mark.parametrize("admission", [None, CounterFilter(filter_freq=3)])
@pytest.mark.parametrize("trainable", [True, False])
def test_an_id_that_gets_no_row_has_the_default_in_training(
    trainable: bool, admission: Any, default: Any
) -> None:
    settings = {"initial": Constant(0.5), "admission": admission, "trainable": trainable}
    described = table(default=default, **settings)
    embedding = Embedding(described)
    rows = connect(embedding)
    default_value = 0.5 if default is None else default.parameters()[1]
    makes = trainable and admission is None
    values = []
    for _ in range(4):
        with torch.no_grad():
            values.append(float(embedding(torch.tensor(7))[0]))
        found = embedding(torch.tensor(7))
        values.append(float(found.detach()[0]))
        found.sum().backward()
        rows.step()
    assert values[0] == default_value
    if makes:  # the first batch has the values with which the row begins
        assert values == [default_value, 0.5, -0.5, -0.5, -1.5, -1.5, -2.5, -2.5]
    elif not trainable:
        assert set(values) == {default_value}
    else:  # the third sighting makes the row
        assert values == [default_value] * 6 + [-0.5, -0.5]


def test_a_frozen_module_has_the_default() -> None:
    embedding = Embedding(table(default=Constant(2.0))).requires_grad_(False)
    connect(embedding)
    assert embedding(torch.tensor(7)).tolist() == [2.0] * 4


def test_a_default_is_one_of_the_initial_values() -> None:
    with pytest.raises(
        ConfigurationError, match=r"default=0 of table 't': give Zeros\(\), Constant"
    ):
        table(default=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8"])
@pytest.mark.parametrize("default", [None, Constant(0.3)])
def test_an_export_answers_as_an_evaluation_does(default: Any, dtype: str, tmp_path: Path) -> None:
    """Where a default is one for all ids without rows; else such an id has zeros there."""
    settings: Any = {"initial": Normal(), "dtype": dtype, "default": default}
    settings["admission"] = CounterFilter(filter_freq=2)
    ids = torch.arange(60)
    with trainer(words(**settings)) as sgd:
        sgd.fit(steps=3, progress=False)

        def looked_up(model: TorchModel) -> Tensor:
            with torch.no_grad():
                found: Tensor = model.module.words(ids)
            return found

        expected = sgd.for_model(looked_up)
        found = sgd.export_table("words")
        sgd.fit(steps=2, progress=False)
        later = found.updated(sgd.export_table("words", since=found))
        whole = sgd.export_table("words")
    assert 0 < len(found) < len(IDS.unique())
    if default is None:
        expected[~torch.isin(ids, found.ids)] = 0.0
    assert torch.equal(found.look_up(ids.view(6, 10)).view(60, 3), expected)
    found.save(tmp_path / "table")
    again = ExportedTable.load(tmp_path / "table")
    assert again.unknown == found.unknown
    assert found.unknown == (0.0 if default is None else pytest.approx(0.3, rel=1e-2))
    assert torch.equal(again.look_up(ids), expected)
    assert torch.equal(later.look_up(ids), whole.look_up(ids))
    row = found.embedding()(torch.tensor(0))
    assert row.tolist() == [found.unknown] * 3


def test_one_row_of_bytes_is_read_wherever_it_lies() -> None:
    row = np.array([[0.5, -1.0, 0.25]], np.float32)  # an odd number of columns before the scale
    assert np.array_equal(wide(narrow(row, "int8")), row)


def test_a_table_of_ones_own_answers_zeros() -> None:
    own = ExportedTable("t", torch.tensor([7]), torch.ones(1, 3))
    assert own.look_up(torch.tensor([[8], [7]])).tolist() == [[[0.0] * 3], [[1.0] * 3]]


def test_local_rows_have_the_default_of_each_table() -> None:
    rows = LocalRows([table("a", default=Zeros()), table("b", initial=Constant(3.0))], num_shards=3)
    group, a = rows.place(table("a", default=Zeros()))
    _, b = rows.place(table("b", initial=Constant(3.0)))
    numbers = np.array([a, b, a], np.int32)
    found = rows.pull(group, numbers, np.array([5, 5, 6]))
    assert found[:, 0].tolist() == [0.0, 3.0, 0.0]
