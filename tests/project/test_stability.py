"""The stability page gives each public name one level, and names nothing that is not there."""

from __future__ import annotations

import importlib.util
import re

import steepest
from tests.page_examples import ROOT

PAGE = (ROOT / "docs" / "reference" / "stability.md").read_text()
LEVELS = {"stable", "beta", "experimental"}


def levels(head: str) -> list[tuple[str, str]]:
    """The names and levels of the table whose first column has this head."""
    table = PAGE.split(f"| {head} | level |")[1].split("\n\n")[0].split("\n")[2:]
    found = []
    for row in table:
        names, level, *_ = (cell.strip() for cell in row.strip("|").split("|"))
        found += [(name, level) for name in re.findall(r"`([\w.]+)`", names)]
    return found


def test_every_public_name_has_one_level() -> None:
    found = levels("names")
    assert {level for _, level in found} <= LEVELS
    names = [name for name, _ in found]
    assert sorted(names) == sorted(set(names))
    # what needs an extra is public, also where the extra is not installed
    assert set(names) == set(steepest.__all__) | {
        "JaxModel", "Embedding", "EmbeddingBag", "EmbeddingCollection", "Table", "connect",
    }  # fmt: skip


def test_modules_with_a_level_are_there() -> None:
    found = levels("modules")
    assert {level for _, level in found} <= LEVELS
    assert all(importlib.util.find_spec(name) for name, _ in found)
    assert {"steepest.errors", "steepest.testing", "steepest.core"} <= {name for name, _ in found}
