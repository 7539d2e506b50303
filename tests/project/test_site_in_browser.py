"""The site of the documentation as a person sees it, in a Chromium. See make test-site, which builds it first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.browser import Browser, browser, program

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PICTURES = (
    "[...document.images].filter((one) => !one.complete || !one.naturalWidth).map((one) => one.src)"
)
#: what a page would show of its source if something were not rendered
RAW = r"""
(document.querySelector("article").innerText.match(/```|:(class|func|ref|doc):`|sequenceDiagram|flowchart LR/) ?? [])
"""
#: pixels of code that do not fit: lines of over 88 columns are wrapped
CUT = r"""
[...document.querySelectorAll("article .highlight pre")]
  .map((one) => one.scrollWidth - one.clientWidth).filter((cut) => cut > 1)
"""
#: tables of which a part is out of sight
WIDE = """
[...document.querySelectorAll(".table-wrapper")].filter((one) => one.scrollWidth > one.clientWidth + 1).length
"""

pytestmark = [
    pytest.mark.skipif(program() is None, reason="needs Chromium: make test-site"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: make test-site"),
]


def opened(page: Browser, path: Path) -> None:
    """Open a page of the site."""
    name = path.relative_to(SITE)
    page.go(path.as_uri())
    page.wait_for(f"document.readyState === 'complete' && location.href.endsWith('{name}')")


def test_each_page_fits_its_window_and_loads_all_that_it_names() -> None:
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > 100
    with browser() as page:
        for width, dark in ((390, True), (1440, False)):
            page.size(width, dark=dark)
            for each in pages:
                opened(page, each)
                name = each.relative_to(SITE)
                assert page.value(SIDEWAYS) == 0, (name, width)
                assert page.value(PICTURES) == [], name
                assert page.value(RAW) == [], name
                assert page.value(CUT) == [], (name, width)
                # on a phone a table of many columns is moved sideways by itself
                assert width < 1440 or page.value(WIDE) == 0, name
                assert page.complaints == [], name


def test_the_four_doors_of_the_front_page_lead_to_all_pages() -> None:
    with browser() as page:
        page.size(1440)
        opened(page, SITE / "index.html")
        assert page.value("document.querySelectorAll('.door').length") == 4
        at = "[...document.querySelectorAll('.door a')]"
        doors = page.value(f"{at}.map((one) => one.href)")
        assert page.value("document.querySelector('.sidebar-search') !== null")
        for door in doors:
            opened(page, Path(door.removeprefix("file://")))
            assert page.value("document.querySelectorAll('article li a').length") > 0, door


def test_a_diagram_is_drawn_in_the_colours_of_the_page() -> None:
    shown = (
        "[...document.images].filter((one) => one.checkVisibility() && one.src.endsWith('.svg'))"
    )
    with browser() as page:
        for dark in (False, True):
            page.size(1440, dark=dark)
            opened(page, SITE / "ARCHITECTURE.html")
            (source,) = page.value(f"{shown}.map((one) => one.src)")
            assert ("dark" in source) == dark


def test_the_search_finds_a_name() -> None:
    with browser() as page:
        page.size(1440)
        page.go((SITE / "search.html").as_uri() + "?q=ParameterServer")
        assert page.wait_for("document.querySelectorAll('#search-results li a').length > 0")
