"""Rows that a user brings: pretrained values, and other jobs' exports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from steepest import AllreduceStrategy, ExportedTable, ParameterServerStrategy
from steepest.errors import ConfigurationError
from steepest.strategies.local import LocalStrategy
from steepest.tables.rows.admission import CounterFilter
from steepest.tables.rows.row_optimizers import Adagrad
from tests.table_jobs import FIRST, IDS, trainer, words

MINE = torch.tensor([2**62, 5, 41, 77])
VALUES = torch.arange(12, dtype=torch.float64).view(4, 3)


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServerStrategy(num_servers=2, replication=2),
        pytest.param(AllreduceStrategy(), marks=pytest.mark.long),
        pytest.param(LocalStrategy(sync_every=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_given_rows_take_the_place_of_those_of_their_ids(
    strategy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(words(), strategy) as sgd:
        sgd.fit(epochs=1, progress=False)
        before, others, weights = (
            sgd.export_table("words"),
            sgd.export_table("others"),
            sgd.weights(),
        )
        steps = sgd.stats().step
        sgd.import_table("words", (MINE.numpy(), VALUES.numpy()))
        found, step = sgd.export_table("words"), sgd.stats().step
        assert torch.equal(found.look_up(MINE), VALUES)
        rest = before.ids[~torch.isin(before.ids, MINE)]
        assert torch.equal(found.look_up(rest), before.look_up(rest))
        assert sorted(found.ids.tolist()) == sorted({*before.ids.tolist(), *MINE.tolist()})
        assert torch.equal(sgd.export_table("others").values, others.values)
        assert all(torch.equal(value, weights[name]) for name, value in sgd.weights().items())
        assert step == steps
        assert (
            "'words' has 4 imported rows, 2 of them in place of others; their slots" in caplog.text
        )
        sgd.fit(epochs=1, progress=False)
        assert sgd.stats().step == 2 * steps
        moved = VALUES[1] - sgd.export_table("words").look_up(torch.tensor(5))
    assert torch.allclose(moved, torch.full((3,), 3 / 6).double())  # id 5 is there three times


def test_rows_of_a_job_with_another_optimizer_are_imported() -> None:
    with trainer(words()) as sgd:
        sgd.fit(epochs=1, progress=False)
        table = sgd.export_table("words")
    with trainer(words(optimizer=Adagrad(lr=0.25), shards=5)) as sgd:
        sgd.import_table("others", table)
        assert torch.equal(sgd.export_table("others").values, table.values)
        sgd.step()
        found = sgd.export_table("others").look_up(table.ids)
    moved = {round(float(by), 6) for by in (table.values - found).flatten()}
    assert moved == {0.0, 0.25}  # the first step of new slots


def test_an_imported_id_is_admitted() -> None:
    settings: Any = {"admission": CounterFilter(3)}
    with trainer(words(**settings)) as sgd:
        sgd.fit(steps=1, progress=False)
        sgd.import_table("words", (MINE, VALUES))
        sgd.fit(steps=2, progress=False)
        found = sgd.export_table("words")
    assert torch.isin(MINE, found.ids).all()
    assert not torch.isin(torch.tensor(40), found.ids).any()  # seen twice
    assert not torch.equal(found.look_up(torch.tensor(41)), VALUES[2])  # it was trained


def test_rows_that_do_not_fit_are_refused_and_nothing_has_changed() -> None:
    changes = ExportedTable("words", MINE, VALUES, base=[[0, 1, 2]])
    with trainer(words(capacity=12, shards=1)) as sgd:
        sgd.step()
        before = sgd.export_table("words")
        for rows, said in [
            (MINE, "are a Tensor: give an ExportedTable, or"),
            (
                (MINE, VALUES[:, :2]),
                r"values of shape \(4, 2\): give integers \(n,\) and values \(n, 3\)",
            ),
            ((MINE.float(), VALUES), "ids of torch.float32"),
            ((torch.tensor([1, -2, 3, 4]), VALUES), "have the id -2"),
            ((torch.tensor([1, 2, 1, 4]), VALUES), "have an id twice"),
            ((MINE, VALUES / 0), "hold NaN or infinity"),
            ((["a"], VALUES), "are no tensors or arrays"),
            (changes, "are changes alone"),
            (
                (np.arange(100, 120), np.ones((20, 3))),
                "'words' has .* rows here, its capacity is 12",
            ),
        ]:
            with pytest.raises(ConfigurationError, match=said):
                sgd.import_table("words", rows)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="no embedding table 'x'"):
            sgd.import_table("x", (MINE, VALUES))
        after = sgd.export_table("words")
        assert torch.equal(after.values, before.values)
        assert after.look_up(MINE[:1]).tolist() == [[FIRST] * 3]
        sgd.step()
    assert len(IDS) == 12
