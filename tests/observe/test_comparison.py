"""Which strategy is recommended, and why; all steps as a table."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

import pytest

from steepest.observe.comparison import Outcome, TriedStrategy, csv_of, recommend, told
from steepest.observe.page.document import document
from tests.page_rows import row_of


def trial(
    strategy: str, seconds: float, fall: float, steps: int = 100, **more: Any
) -> TriedStrategy:
    """A run whose loss falls from 1, with steps of so many seconds."""
    rows = [
        row_of(step, seconds=seconds * step, loss=math.exp(-fall * step), **more)
        for step in range(1, steps + 1)
    ]
    return TriedStrategy(strategy, rows, "by itself")


def advice(*trials: TriedStrategy) -> tuple[str | None, str]:
    return recommend([Outcome(each) for each in trials])


def test_the_lowest_loss_is_recommended() -> None:
    best, why = advice(trial("ps", 0.1, 0.01), trial("local", 0.05, 0.001), trial("ssp", 0.1, 0.03))
    assert best == "ssp"
    assert "its loss at the end is" in why
    assert "local computes 2 times as many samples per second, and learns less of each" in why


def test_of_equal_losses_the_first_to_reach_them_is_recommended() -> None:
    best, why = advice(trial("ps", 0.3, 0.01), trial("allreduce", 0.15, 0.01))
    assert best == "allreduce"
    assert "its loss is as low as that of ps" in why
    # of 0.3 s 0.1 are computing
    assert "2 times as many samples per second as ps, whose workers spend 67% of their time" in why


def test_of_those_that_have_converged_the_first_is_recommended() -> None:
    """Though one loss is a millionth of the other: both are nothing beside the first."""
    best, why = advice(
        trial("ps", 0.1, 0.2), trial("allreduce", 0.1, 0.1), trial("local", 1.0, 0.1)
    )
    assert best == "ps"
    assert "its loss is as low as that of allreduce and local" in why


def test_where_the_time_goes_is_said_of_those_that_wait() -> None:
    why = advice(trial("ps", 0.1, 0.01), trial("local", 0.05, 0.01))[1]  # 0.1 s are computing
    assert why.endswith("It computes 2 times as many samples per second as ps.")


def test_what_failed_or_has_no_loss_is_not_recommended() -> None:
    failed = TriedStrategy(
        "async", trial("async", 0.1, 1.0).rows, "NonFiniteError: NaN", failed=True
    )
    best, why = advice(failed)
    assert best is None
    assert why.startswith("None:")
    assert advice(failed, trial("ps", 0.1, 0.0))[0] == "ps"
    assert advice(TriedStrategy("ps", [], "ConfigurationError: no"))[0] is None


def test_of_few_steps_it_is_said_that_they_are_few() -> None:
    assert "But 5 steps at most were taken" in advice(
        trial("ps", 0.1, 0.1, 5), trial("ssp", 0.1, 0.2, 5)
    )[1]  # fmt: skip


def test_an_outcome_sums_up_its_steps() -> None:
    found = Outcome(trial("ps", 0.5, 0.0))
    assert (found.steps, found.samples, found.seconds) == (100, 800, 50.0)
    assert found.speed == pytest.approx(8 / 0.5)
    assert (found.pushed, found.pulled) == (10 / 8, 20 / 8)
    # 125 steps are 1,000 samples
    assert found.parts == pytest.approx([12.5, 0.0, 0.0, 125 * 0.4])
    assert found.seconds_to(0.5) == math.inf


def test_the_table_has_a_line_for_each_step() -> None:
    text = csv_of([trial("ps", 0.5, 0.01, 3)])
    lines = list(csv.DictReader(io.StringIO(text)))
    assert [line["step"] for line in lines] == ["1", "2", "3"]
    assert [line["samples"] for line in lines] == ["8", "16", "24"]
    assert [float(line["loss"]) for line in lines] == [math.exp(-0.01 * n) for n in (1, 2, 3)]
    assert (lines[2]["compute"], lines[2]["wait"]) == ("0.1", "")


def test_the_page_holds_its_data_and_no_script_that_a_name_brings() -> None:
    data = told(
        "</script><b>", "2 workers", [trial("ps", 0.1, 0.01), TriedStrategy("ssp", [], "no")]
    )
    page = document(data, "", "comparison")
    assert "</script><b>" not in page
    held = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(held) == data
    assert [len(row) for row in data["rows"]] == [len(data["head"])] * 2
