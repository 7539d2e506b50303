"""`steepest doctor` says what it tried and what it had no time for; its status tells of failures alone."""

from __future__ import annotations

import os
import re

import pytest

from steepest.cli import main

NO_TIME = "no time for {}: 15 s are all it takes"
WELL = "what was tried works: all is well"


@pytest.mark.parametrize(
    ("untried", "failed", "said"),
    [
        ([], False, [WELL]),
        (["async", "ssp"], False, [NO_TIME.format("async, ssp"), WELL]),
        (list(main._TRIED), False, [NO_TIME.format(", ".join(main._TRIED)), "nothing was tried"]),
        (["ssp"], True, [NO_TIME.format("ssp"), "something is wrong, see above"]),
    ],
)
def test_what_it_says_when_its_time_is_over(
    untried: list[str],
    *,
    failed: bool,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    checkup = main._Checkup()
    checkup._untried, checkup._failed = untried, failed
    checkup.give_up()
    assert statuses == [int(failed)]
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"^ *[0-9.]+ s  ", "", line) for line in lines] == said
