"""Which strategy is recommended, and why; all steps as a table."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest

from steepest.errors import ConfigurationError
from steepest.observe.comparison import (
    Criterion,
    Outcome,
    TriedStrategy,
    csv_of,
    outcomes_of,
    page_data,
    recommend,
    table_of,
)
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
    return recommend(outcomes_of(trials))


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
    found = Outcome([trial("ps", 0.5, 0.0)])
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
    data = page_data(
        "</script><b>", "2 workers", [trial("ps", 0.1, 0.01), TriedStrategy("ssp", [], "no")]
    )
    page = document(data, "", "comparison")
    assert "</script><b>" not in page
    held = page.split('id="data">')[1].split("</script>")[0]
    assert json.loads(held) == data
    assert [len(row) for row in data["rows"]] == [len(data["head"])] * 2


def seeded(strategy: str, *falls: float, seconds: float = 0.1) -> list[TriedStrategy]:
    """Runs of one strategy, each with another seed."""
    return [replace(trial(strategy, seconds, fall), seed=seed) for seed, fall in enumerate(falls)]


def test_several_seeds_are_compared_by_their_means() -> None:
    """One lucky seed decides nothing; ranges are told."""
    lucky = advice(trial("ps", 0.1, 0.02), trial("local", 0.1, 0.04))
    assert lucky[0] == "local"
    trials = seeded("ps", 0.02, 0.02, 0.02) + seeded("local", 0.04, 0.001, 0.005)
    best, why = advice(*trials)
    assert best == "ps"
    assert "means over 3 seeds" in why
    head, first, second = table_of(outcomes_of(trials))
    assert [first[0], second[0]] == ["ps", "local"]
    assert " to " in second[1]
    assert " to " not in first[1]
    assert head[1] == "loss"
    lines = list(csv.DictReader(io.StringIO(csv_of(trials))))
    assert [line["seed"] for line in lines] == [str(n) for n in (0, 1, 2) for _ in range(100)] * 2
    data = page_data("a", "b", trials)
    assert [run["colour"] for run in data["runs"]] == [0, 0, 0, 1, 1, 1]
    assert data["runs"][1]["strategy"] == "ps, seed 1"
    assert [each["strategy"] for each in data["spent"]] == ["ps", "local"]


def test_one_seed_that_fails_is_told_and_the_strategy_is_not_recommended() -> None:
    broken = TriedStrategy("ssp", [], "NonFiniteError: NaN", failed=True, seed=1)
    best, _ = advice(*seeded("ssp", 0.05)[:1], broken, *seeded("ps", 0.01, 0.01))
    assert best == "ps"
    assert Outcome([*seeded("ssp", 0.05), broken]).ended == "NonFiniteError: NaN"


def validated(strategy: str, fall: float, **values: float) -> TriedStrategy:
    """A run that reports values behind its last step, and worse ones in the middle."""
    made = trial(strategy, 0.1, fall)
    made.rows[49]["metrics"] = {name: value / 2 for name, value in values.items()}  # type: ignore[index]
    last = {"kind": "report", "step": 100, "time": 0.0, "metrics": values}
    return replace(made, rows=[*made.rows, last])


def test_what_the_script_reports_of_held_out_data_may_decide() -> None:
    """The loss of one strategy is lower, and what it knows of other data less."""
    trials = [validated("ps", 0.05, right=0.5), validated("local", 0.01, right=0.9)]
    assert advice(*trials)[0] == "ps"
    more, less = Criterion.read("right:max"), Criterion.read("right")
    best, why = recommend(outcomes_of(trials, more))
    assert best == "local"
    assert "its right at the end is 0.9, that of the next best, ps, 0.5" in why
    assert recommend(outcomes_of(trials, less))[0] == "ps"
    evaluated = [
        replace(each, rows=[*each.rows[:-1], {**each.rows[-1], "kind": "evaluation"}])
        for each in trials
    ]
    assert recommend(outcomes_of(evaluated, more)) == (best, why)
    assert table_of(outcomes_of(trials, more))[0][1] == "right"
    found = recommend(outcomes_of(trials, Criterion.read("no_such")))
    assert found == (None, "None: no strategy has trained with 'no_such', see how each ended.")
    assert page_data("a", "b", trials, by=more)["by"] == "metrics/right"


def test_of_equal_reports_the_first_to_reach_them_is_recommended() -> None:
    slow = replace(validated("ps", 0.05, right=0.9))
    fast = validated("local", 0.05, right=0.9)
    for row in slow.rows:
        if row["kind"] == "step":
            row["seconds"] *= 2  # type: ignore[index]
    best, why = recommend(outcomes_of([slow, fast], Criterion("right", "max")))
    assert best == "local"
    assert "its right is as high as that of ps" in why


@pytest.mark.parametrize("text", [":max", "accuracy:best", ":"])
def test_a_validation_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="such as accuracy:max"):
        Criterion.read(text)
