"""The benchmark of observed jobs: what its pairs tell, and that a recorded step calls few functions more."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.observing import Reader, Spent, calls_of_a_step, median_of, pair_of, table
from steepest.observe.page.run_view import Known, RunView
from steepest.observe.page.server import PageServer
from tests.page_rows import row_of


def spent(seconds: float) -> Spent:
    return Spent(seconds, {"driver": seconds}, {"driver": seconds / 2})


def test_a_slow_spell_strikes_both_turns_of_a_pair() -> None:
    slow = [1.0, 3.0, 1.5, 9.0, 1.1] * 5
    pairs = [(spent(each), spent(1.02 * each)) for each in slow]
    assert "clock       1.020 (1.020 to 1.020)" in table("page", pairs)


def test_an_interval_has_the_median_and_narrows_with_more_values() -> None:
    few, many = (median_of([float(n % 10) for n in range(count)]) for count in (20, 500))
    for middle, low, high in (few, many):
        assert low <= middle <= high
    assert many[2] - many[1] < few[2] - few[1]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_pair_is_without_and_with_in_either_order(reverse: bool) -> None:
    taken: list[str] = []

    def turn(name: str, seconds: float) -> Spent:
        taken.append(name)
        return spent(seconds)

    pair = pair_of(lambda: turn("off", 1.0), lambda: turn("on", 2.0), reverse)
    assert [each.clock for each in pair] == [1.0, 2.0]
    assert taken == (["on", "off"] if reverse else ["off", "on"])


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_recorded_step_calls_few_functions_more(strategy: str) -> None:
    plain, recorded = (calls_of_a_step(strategy, each) for each in (False, True))
    # one for each span, and two for its two looks at the clock
    assert plain < recorded < 1.05 * plain


class Looked:
    """A run of three steps that keeps what a page knows when it asks."""

    def __init__(self) -> None:
        self.view, self.known = RunView("a run"), list[Known]()
        self.view.add_all(map(row_of, (1, 2, 3)))

    def as_json(self, known: Known) -> Any:
        self.known.append(known)
        return self.view.as_json(known)

    def stacks(self) -> str:
        raise AssertionError


def test_who_looks_at_a_page_asks_for_what_is_new_and_rests_when_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("steepest.observe.page.server.chart_script", lambda: "")
    run = Looked()
    server = PageServer(run)
    with Reader(server.url) as reader:
        reader.say("on", "seen")
        reader.say("off", "rests")
        before = len(run.known)
        reader.say("on", "seen")
        reader.say("off", "rests")
    server.close()
    assert run.known[0].since == 0
    assert all(known.since == 2 for known in run.known[1:])
    assert len(run.known) > before
