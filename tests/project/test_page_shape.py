"""Each command of a page exists, and paragraphs are short."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from steepest.cli.main import make_parser
from tests.page_examples import ROOT

FOLDERS = ("tutorials", "howto", "explanation")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
TRACED = ROOT / "docs" / "explanation" / "ways.md"  # lists of files, which a test compares


def options_of(parser: argparse.ArgumentParser, path: str = "steepest") -> dict[str, set[str]]:
    """Return each command's options, by its words."""
    found = {path: {option for each in parser._actions for option in each.option_strings}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                found |= options_of(below, f"{path} {name}")
    return found


def commands_in(text: str) -> Iterator[str]:
    """Yield the calls of `steepest` in a page's shell blocks and in code within its lines."""
    for block in re.findall(r"^\s*```sh\n(.*?)^\s*```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if found := re.search(r"(?:^|\s)(steepest [a-z].*)", line.split("  #")[0]):
                yield found[1]
    prose = re.sub(r"^\s*```.*?^\s*```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`(steepest [a-z][^`]*)`", prose)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_each_command_of_a_page_exists(page: Path) -> None:
    known = options_of(make_parser())
    for command in commands_in(page.read_text()):
        words = command.split(" -- ")[0].split()
        path = max((each for each in known if f"{command} ".startswith(f"{each} ")), key=len)
        assert path != "steepest", f"{command}: there is no such command"
        given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= known[path], f"{command}: {given - known[path]} is no option of {path}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_paragraph_has_at_most_five_lines(page: Path) -> None:
    if page == TRACED:
        return
    prose = re.sub(r"^\s*```.*?^\s*```", "\n", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. ))", prose):
        lines = [line for line in paragraph.splitlines() if line.strip()]
        if lines and not lines[0].startswith(("|", "#", "![")):
            assert len(lines) <= 5, "\n".join(lines)
            assert max(map(len, lines)) <= 140, max(lines, key=len)
