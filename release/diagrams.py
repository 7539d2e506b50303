"""Draw the diagrams of pages: blocks of Mermaid become pictures, for light and for dark pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_BLOCK = re.compile(r"```mermaid\n(.*?)```\n", flags=re.DOTALL)
#: narrow enough for a phone, where a picture is as wide as the page
_NARROW = {
    "sequence": {
        "wrap": True, "width": 130, "actorMargin": 25, "diagramMarginX": 4, "mirrorActors": False,
    }
}  # fmt: skip
#: by the class that the theme gives to what is shown in one mode alone, Mermaid's theme
_THEMES = {"only-light": "neutral", "only-dark": "dark"}


def drawn(page: str, path: Path, draw: Callable[[str, str], str] | None = None) -> str:
    """Return a page with its diagrams as pictures, which are written beside it.

    Args:
        page: Markdown.
        path: where the page is.
        draw: returns the SVG of a diagram in one of Mermaid's themes; by default mermaidx, of the extra `docs`.
    """
    numbers = iter(range(1, 1 + len(_BLOCK.findall(page))))

    def pictures(found: re.Match[str]) -> str:
        number, text = next(numbers), ""
        for mode, theme in _THEMES.items():
            name = f"{path.stem}_{number}_{theme}.svg"
            path.with_name(name).write_text((draw or _by_mermaid)(found[1], theme))
            text += f"```{{image}} {name}\n:class: {mode}\n:alt: a diagram\n```\n"
        return text

    return _BLOCK.sub(pictures, page)


def _by_mermaid(source: str, theme: str) -> str:
    import mermaidx

    drawing: str = mermaidx.render(source, theme=theme, config=_NARROW).svg()
    return drawing
