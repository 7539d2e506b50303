"""What is known of single ids of a table, for debugging."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.errors import ConfigurationError
from steepest.tables.rows.admission import CounterFilter
from steepest.tables.rows.row_optimizers import Adagrad
from tests.table_jobs import FIRST, IDS, trainer, words


@pytest.mark.parametrize(
    "strategy",
    [ParameterServerStrategy(num_servers=2), AllreduceStrategy()],
    ids=["ps", "allreduce"],
)
def test_a_description_is_of_the_row_as_it_is(strategy: Any) -> None:
    settings: Any = {"optimizer": Adagrad(lr=0.25), "admission": CounterFilter(2)}
    with trainer(words(**settings), strategy) as sgd:
        sgd.fit(epochs=2, progress=False)
        sgd.step()
        found = sgd.describe_rows("words", [5, 999, 7])
        table = sgd.export_table("words")
        sgd.fit(steps=1, progress=False)
        later = {each.id: each for each in sgd.describe_rows("words", IDS.tolist())}
        assert sgd.describe_rows("words", []) == []
    five, unseen, seven = found
    assert [each.id for each in found] == [5, 999, 7]
    assert [each.has_row for each in found] == [True, False, True]
    assert torch.equal(five.values, table.look_up(torch.tensor(5)))
    assert five.slots is not None
    assert five.slots.shape == (3,)
    assert (five.slots > 0).all()
    assert 4 <= five.sightings <= 9
    assert {each.version for each in found} == {5}
    assert (unseen.slots, unseen.sightings, unseen.written) == (None, 0, None)
    assert unseen.values.tolist() == [FIRST] * 3
    assert seven.sightings in (1, 2)  # from the second on, with which its row was made
    assert 7 <= later[5].sightings <= 9  # three epochs
    assert later[7].sightings == 2
    assert {each.written for each in later.values()} <= {5, 6}
    assert {each.written for each in later.values()} & {6}


def test_sightings_of_ids_that_are_not_admitted_yet_are_told() -> None:
    with trainer(words(admission=CounterFilter(9))) as sgd:
        sgd.fit(epochs=2, progress=False)
        found = sgd.describe_rows("words", [5, 7])
        assert [(each.has_row, each.sightings) for each in found] == [(False, 6), (False, 2)]
        for ids, said in [
            ([-1], "hold -1"),
            (["a"], "give integers"),
            ([[1]], r"of shape \(1, 1\)"),
        ]:
            with pytest.raises(ConfigurationError, match=said):
                sgd.describe_rows("words", ids)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="no embedding table 'x'"):
            sgd.describe_rows("x", [1])
