"""The site's navigation has each page once, and its reference each public name."""

from __future__ import annotations

import re
from pathlib import Path

import steepest
from release.site import CONTENTS, index, navigation, reference, stage
from tests.page_examples import ROOT


def test_each_page_has_one_place_in_the_navigation() -> None:
    named = [page for pages in navigation().values() for page in pages]
    assert len(named) == len(set(named))
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in files if path != CONTENTS}
    assert set(named) == pages | {"reference", "benchmarks/RESULTS"}
    assert all(f"   {page}\n" in index() for page in named)


def test_the_reference_has_each_public_name() -> None:
    text = reference()
    assert ".. autoclass:: steepest.DistributedSGD\n   :members:\n" in text
    assert ".. autofunction:: steepest.run\n" in text
    assert text.count(".. auto") == len(steepest.__all__)


def test_what_sphinx_reads_lies_as_in_the_repository(tmp_path: Path) -> None:
    stage(tmp_path)
    for page in (
        "README.md",
        "docs/howto/guide.md",
        "docs/worker_dies.png",
        "benchmarks/RESULTS.md",
    ):
        assert (tmp_path / page).read_bytes() == (ROOT / page).read_bytes()
    settings: dict[str, object] = {}
    lines = (tmp_path / "conf.py").read_text().splitlines()
    plain = "\n".join(line for line in lines if "lexers" not in line)  # needs no Sphinx
    exec(compile(plain, "conf.py", "exec"), settings)
    assert settings["version"] == steepest.__version__


def test_each_link_of_a_page_leads_to_what_the_site_has(tmp_path: Path) -> None:
    stage(tmp_path)
    for page in tmp_path.rglob("*.md"):
        for link in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.relative_to(tmp_path)}: {link}"
