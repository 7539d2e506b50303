"""Notebooks as pages: their text and their cells."""

from __future__ import annotations

import json


def as_markdown(notebook: str) -> str:
    """Return the Markdown of a notebook, given as JSON of the format nbformat 4, without results."""
    text = ""
    for cell in json.loads(notebook)["cells"]:
        source = "".join(cell["source"]).rstrip()
        text += f"```python\n{source}\n```\n\n" if cell["cell_type"] == "code" else f"{source}\n\n"
    return text
