"""The site has each page behind one door, its front page says what the README says, and each public name has a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import steepest
from release.diagrams import drawn
from release.notebooks import as_markdown
from release.site import CONTENTS, DOORS, door_pages, front_page, navigation, settings, stage
from tests.page_examples import ROOT

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Sphinx reads, with diagrams as text."""
    folder = tmp_path_factory.mktemp("site")
    stage(folder, draw=False)
    return folder


def test_each_page_is_behind_one_door() -> None:
    named = [page for group in navigation() for page in group.pages]
    assert len(named) == len(set(named))
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    files += [*(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "examples").glob("*.ipynb")]
    files = [path for path in files if path not in (CONTENTS, ROOT / "README.md")]
    assert set(named) == {str(path.relative_to(ROOT).with_suffix("")) for path in files}
    pages = [(door, text) for door in DOORS for text in door_pages(door).values()]
    for page in named:
        assert sum(f"\n{page}\n" in text for _, text in pages) == 1
    assert {door for door, text in pages if "\n- [" in text} == {*DOORS}


def test_the_front_page_is_the_readmes_first_screen() -> None:
    page = front_page(README)
    first = README.split("\n\n")[1]
    assert first in page
    assert re.search(r"```sh\n(?:.*\n)*?.*pip install.*\n```", page)
    assert re.findall(r"^!\[.*$", README, flags=re.MULTILINE)[0] in page
    assert f"Version {steepest.__version__}" in page
    assert "(https://host/owner/name)" in front_page(README, "https://host/owner/name")
    assert [door for door in DOORS if f"**[{door}](" in page] == [*DOORS]


def test_what_sphinx_reads_lies_as_in_the_repository(staged: Path) -> None:
    for page in ("CHANGELOG.md", "docs/worker_dies.png", "benchmarks/RESULTS.md"):
        assert (staged / page).read_bytes() == (ROOT / page).read_bytes()


def test_each_link_of_a_page_leads_to_what_the_site_has(staged: Path) -> None:
    for page in staged.rglob("*.md"):
        for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(staged)}: {link}"


def test_a_notebook_becomes_a_page(staged: Path) -> None:
    page = (staged / "examples" / "tour.md").read_text()
    assert page.startswith("# A tour")
    assert "\n```python\nfound = {}\nfor strategy in" in page
    assert as_markdown('{"cells": [{"cell_type": "code", "source": ["a\\n", "b"]}]}') == (
        "```python\na\nb\n```\n\n"
    )


def test_the_settings_of_sphinx_name_version_and_repository() -> None:
    found: dict[str, object] = {}
    exec(settings("https://host/owner/name"), found)
    assert found["version"] == steepest.__version__
    assert steepest.__version__ in str(found["html_title"])
    assert "https://host/owner/name" in str(found["html_theme_options"])


def test_a_diagram_becomes_a_picture_for_light_and_one_for_dark_pages(tmp_path: Path) -> None:
    page = "before\n```mermaid\nflowchart LR\n```\nbetween\n```mermaid\nx\n```\n"
    found = drawn(page, tmp_path / "page.md", lambda source, theme: f"{theme} {source}")
    assert "mermaid" not in found
    assert found.count(":class: only-dark") == found.count(":class: only-light") == 2
    assert found.startswith("before\n```{image} page_1_")
    assert (tmp_path / "page_2_dark.svg").read_text() == "dark x\n"
