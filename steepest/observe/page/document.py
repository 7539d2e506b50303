"""The page as one HTML document that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from steepest.errors import ConfigurationError

#: Of pages: that of one run, and that of several.
Kind = Literal["page", "comparison"]
_HERE = Path(__file__).parent


def chart_script() -> str:
    """Return the script of plotly.js, which draws the charts.

    Raises:
        ConfigurationError: it is not installed.
    """
    plotly = find_spec("plotly")
    folders = [] if plotly is None else list(plotly.submodule_search_locations or ())
    for folder in folders:
        file = Path(folder) / "package_data" / "plotly.min.js"
        if file.exists():
            return file.read_text(encoding="utf-8")
    raise ConfigurationError(
        "the page of a job draws its charts with plotly, which is not installed: pip install 'steepest[page]'"
    )


def document(data: Mapping[str, Any], charts: str, kind: Kind = "page") -> str:
    """Return a page of some data, with the script that draws its charts.

    Args:
        data: as `RunView.as_json` has them; of a comparison as `steepest.observe.comparison.page_data` has them.
        charts: the script of `chart_script`.
        kind: "page" for that of a job, "comparison" for that of several runs.
    """
    # a script ends at "</script" and changes its mode at "<!--", wherever they are in it
    kept = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [
        f'<script type="application/json" id="data">{kept}</script>',
        f'<script type="text/plain" id="charts-script">{charts}</script>',
        f"<script>{page_script(kind)}</script>",
    ]
    return _page("\n".join(scripts), kind)


def shell(kind: Kind = "page") -> str:
    """Return the page without data, which fetches them, and its scripts, from where it comes from."""
    return _page('<script src="page.js"></script>', kind)


def page_script(kind: Kind = "page") -> str:
    """Return the script that puts data on a page of that kind."""
    parts = ((_HERE / name).read_text(encoding="utf-8") for name in ("drawing.js", f"{kind}.js"))
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _page(scripts: str, kind: Kind) -> str:
    page = (_HERE / f"{kind}.html").read_text(encoding="utf-8")
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    before, _, after = page.partition("%SCRIPTS%")
    return before.replace("%STYLE%", style) + scripts + after
