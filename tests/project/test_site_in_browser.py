"""The site of the documentation as a person sees it, in a Chromium. See make test-site, which builds it first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.observe.browser import browser, program

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
PICTURES = (
    "[...document.images].filter((one) => !one.complete || !one.naturalWidth).map((one) => one.src)"
)

pytestmark = [
    pytest.mark.skipif(program() is None, reason="needs Chromium: make test-site"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: make test-site"),
]


def test_each_page_fits_its_window_and_loads_all_that_it_names() -> None:
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > 40
    with browser() as page:
        for width, dark in ((390, True), (1440, False)):
            page.size(width, dark=dark)
            for each in pages:
                name = each.relative_to(SITE)
                page.go(each.as_uri())
                page.wait_for(
                    f"document.readyState === 'complete' && location.href.endsWith('{name}')"
                )
                assert page.value(SIDEWAYS) == 0, (name, width)
                assert page.value(PICTURES) == [], name
                assert page.complaints == [], name
