"""The pages of the seams: their examples run as they stand, and they name all that the seams have."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import pytest

from steepest.core.engine.chunk_store import ChunkStore
from steepest.core.engine.exchange import Exchange
from steepest.core.engine.extension import Extension
from steepest.core.models.protocol import Model
from tests.page_examples import ROOT, blocks_of

SAID = {
    "docs/howto/own_model.md": "[1.0, 2.0, 3.0]\n",
    "docs/explanation/extensions.md": "True 1e-04\n",
}


@pytest.mark.parametrize("page", SAID)
def test_an_example_of_a_seam_runs(page: str) -> None:
    (block,) = blocks_of(page)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, page, "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == SAID[page]


def _public(seam: type[Any]) -> set[str]:
    return {name for name in vars(seam) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("page", "seam"),
    [("docs/howto/own_model.md", Model), ("docs/explanation/extensions.md", Extension)],
)
def test_a_page_says_when_each_part_of_a_seam_is_called(page: str, seam: type[Any]) -> None:
    told = set(re.findall(r"`(\w+)", (ROOT / page).read_text()))
    assert _public(seam) <= told


def test_no_seam_names_what_it_has_not() -> None:
    page = (ROOT / "docs/explanation/extensions.md").read_text()
    of = {"Exchange": Exchange, "ChunkStore": ChunkStore}
    for title, seam in of.items():
        part = page[page.index(f"## {title}") :].split("\n## ")[0]
        for row in re.findall(r"^\| (`.*?) \|", part, flags=re.MULTILINE):
            for name in re.findall(r"`(\w+)`", row):
                assert hasattr(seam, name), f"{title} has no {name}"
