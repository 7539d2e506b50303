"""Each row of the results has all that a reader needs, and a command that its benchmark takes."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.page_examples import ROOT

TEXT = (ROOT / "benchmarks" / "RESULTS.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL))
COLUMNS = ["what", "figure", "goal", "rival", "command", "date"]


def rows_of(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of the tables in a text, without heads."""
    for line in text.splitlines():
        if line.startswith("| ") and line.endswith(" |"):
            cells = line[2:-2].split(" | ")
            if cells != COLUMNS:
                yield cells


ROWS = [row for section in SECTIONS.values() for row in rows_of(section)]
COMMANDS = sorted({row[4].strip("`") for row in ROWS if row[4] != "the same"})


def run(words: list[str]) -> None:
    """Run a file, or a module's `main` where the words begin with `-m`."""
    if words[0] == "-m":
        importlib.import_module(words[1]).main()
    else:
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Benchmarks set variables for their processes when they are imported."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


class ParsedError(Exception):
    """A program's arguments were taken."""


def test_each_row_has_a_figure_a_goal_a_rival_a_command_and_a_date() -> None:
    assert len(ROWS) > 100
    for row in ROWS:
        assert len(row) == len(COLUMNS), row
        assert all(row), row
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", row[5]), row
        assert row[4] == "the same" or re.fullmatch(r"`python .+`", row[4]), row


def test_the_first_table_counts_the_goals_that_are_missed() -> None:
    counted = {}
    for name, section in SECTIONS.items():
        goals = [row[2] for row in rows_of(section) if row[2] != "none"]
        missed = sum("**missed**" in goal for goal in goals)
        counted[name.replace("`", "")] = f"{missed} of {len(goals)}" if goals else "no goals"
    said = re.findall(r"^\| \[(.+?)\]\(#.*\| (.+?) \|$", TEXT, flags=re.MULTILINE)
    assert dict(said) == {name: counted[name] for name, _ in said}
    assert {name for name, _ in said} == counted.keys() - {"Without a figure"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_taken_by_its_program(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        parse(self, *given, **named)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    _, *words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", words[words[0] == "-m" :])
    with pytest.raises(ParsedError):
        run(words)
