"""The page of what equals what names all scripts, and what is found of each now is what it says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steepest.testing import verify
from tests.verified_scripts import PAGE, STEPS, WORKERS, lines_of_page, page, row, scripts


def test_the_page_has_all_scripts_and_its_words_as_they_are_written(tmp_path: Path) -> None:
    assert list(lines_of_page()) == [name for name, _ in scripts(tmp_path)]
    assert PAGE.read_text() == page(lines_of_page())


@pytest.mark.full
@pytest.mark.long
@pytest.mark.skipif("STEEPEST_DATA" not in os.environ, reason="needs STEEPEST_DATA")
@pytest.mark.parametrize("name", lines_of_page())
def test_what_the_page_says_of_a_script(tmp_path: Path, name: str) -> None:
    script = dict(scripts(tmp_path))[name]()
    found = verify(script, steps=STEPS, num_workers=WORKERS)
    assert row(name, found) == lines_of_page()[name], str(found)
