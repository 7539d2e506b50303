"""The page as one HTML document that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError

_HERE = Path(__file__).parent


def chart_script() -> str:
    """Return the script of plotly.js, which draws the charts.

    Raises:
        ConfigurationError: it is not installed.
    """
    found = find_spec("plotly")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    for folder in folders:
        file = Path(folder) / "package_data" / "plotly.min.js"
        if file.exists():
            return file.read_text(encoding="utf-8")
    raise ConfigurationError(
        "the page of a job draws its charts with plotly, which is not installed: pip install 'steepest[page]'"
    )


def document(data: Mapping[str, Any], charts: str) -> str:
    """Return the page of some data, as `RunView.told` has them, with the script that draws its charts."""
    # a script ends at "</script" and changes its mode at "<!--", wherever they are in it
    kept = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [
        f'<script type="application/json" id="data">{kept}</script>',
        f'<script type="text/plain" id="charts-script">{charts}</script>',
        f"<script>{page_script()}</script>",
    ]
    return _page("\n".join(scripts))


def shell() -> str:
    """Return the page without data, which fetches them, and its scripts, from where it comes from."""
    return _page('<script src="page.js"></script>')


def page_script() -> str:
    """Return the script that puts data on the page."""
    return (_HERE / "page.js").read_text(encoding="utf-8")


def _page(scripts: str) -> str:
    page = (_HERE / "page.html").read_text(encoding="utf-8")
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    before, _, after = page.partition("%SCRIPTS%")
    return before.replace("%STYLE%", style) + scripts + after
