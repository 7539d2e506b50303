"""The cells of the notebook, run one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def cells() -> list[str]:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(each["source"]) for each in found if each["cell_type"] == "code"]


def test_the_notebook_holds_no_results_and_its_cells_are_python() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    assert not any(each.get("outputs") for each in notebook["cells"])
    for number, cell in enumerate(cells()):
        compile(cell, f"cell {number}", "exec")


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_its_cells_train_watch_and_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr("steepest.observe.page.server.chart_script", lambda: "var Plotly = {};")
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells()):
        exec(compile(cell, f"cell {number}", "exec"), names)
    assert names["result"].metrics["accuracy"] > 0.85
    assert set(names["found"]) == {"ps", "local", "async"}
    assert min(names["found"][name] for name in ("ps", "local")) > 0.5
    assert names["found"]["async"] > 0.2  # how stale gradients are depends on the machine
