"""`steepest doctor` says what it tried and what it had no time for; its status is 0 if that has worked."""

from __future__ import annotations

import os
import platform
import re
import runpy
import sys
from importlib.metadata import version

import pytest

from steepest import __version__
from steepest.cli import doctor

NO_TIME = "no time for {}: 15 s are all it takes"
WELL = "what was tried works: all is well"
NEXT = (
    "next: steepest demo; then a script of your own by "
    "steepest run train.py --workers 2 (steepest run --help)"
)
NOTHING = (
    "no strategy was tried; starting Ray took too long on a busy machine (load 99.0): run it again "
    "when that is less"
)


@pytest.mark.parametrize(
    ("untried", "failed", "status", "said"),
    [
        ([], False, 0, [WELL, NEXT]),
        (["async", "ssp"], False, 0, [NO_TIME.format("async, ssp"), WELL, NEXT]),
        (list(doctor._TRIED), False, 1, [NO_TIME.format(", ".join(doctor._TRIED)), NOTHING]),
        (["ssp"], True, 1, [NO_TIME.format("ssp"), "something is wrong, see above"]),
    ],
)
def test_what_it_says_when_its_time_is_over(
    untried: list[str],
    *,
    failed: bool,
    status: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)  # the extra `demo` is installed
    monkeypatch.setattr(os, "_exit", statuses.append)
    checkup = doctor._Checkup()
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    checkup._untried, checkup._failed, checkup._doing = untried, failed, "starting Ray"
    checkup.give_up()
    assert statuses == [status]
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"^ *[0-9.]+ s  ", "", line) for line in lines] == said


def test_what_needs_no_imports_is_said_before_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import that goes no further
    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    checkup = doctor._Checkup()
    with pytest.raises(ImportError):
        checkup.run()
    checkup.give_up()
    first, second, _, last = capsys.readouterr().out.splitlines()
    assert f"steepest {__version__}, Python {platform.python_version()} on " in first
    importing = f"importing torch {version('torch')} and Ray {version('ray')}"
    assert second.endswith(importing)
    assert last.endswith(f"no strategy was tried; {importing} took too long")


def test_what_to_do_next_names_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor._next_step().startswith("next: pip install 'steepest[demo]' and steepest demo;")


def test_the_command_is_a_module_and_has_a_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["steepest", "--version"])
    monkeypatch.delitem(sys.modules, "steepest.__main__", raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("steepest", run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"steepest {__version__}\n"
