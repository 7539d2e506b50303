"""The cells of the notebooks, run one after another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))


def cells(name: str) -> list[str]:
    found = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return ["".join(each["source"]) for each in found if each["cell_type"] == "code"]


def run(name: str) -> dict[str, Any]:
    """The names that a notebook has at its end."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells(name)):
        exec(compile(cell, f"cell {number}", "exec"), names)
    return names


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_no_results_and_its_cells_are_python(name: str) -> None:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    assert notebook["nbformat"] == 4
    assert not any(each.get("outputs") for each in notebook["cells"])
    for number, cell in enumerate(cells(name)):
        compile(cell, f"cell {number}", "exec")


@pytest.mark.long
@pytest.mark.usefixtures("machine")
def test_the_tour_trains_survives_compares_and_keeps_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr("steepest.observe.page.server.chart_script", lambda: "var Plotly = {};")
    names = run("tour")
    assert names["result"].metrics["accuracy"] > 0.85
    assert names["same"]
    assert "replaced" in names["events"]
    assert set(names["found"]) == {"ps", "local", "async"}
    assert min(names["found"][name] for name in ("ps", "local")) > 0.5
    assert names["found"]["async"] > 0.2  # how stale gradients are depends on the machine
    assert names["kept"].metrics["accuracy"] > 0.85


@pytest.mark.full
@pytest.mark.long
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_parameter_server_is_never_read_half_updated() -> None:
    names = run("parameter_server")
    updates = names["WORKERS"] * names["ROUNDS"]
    assert (names["by_hand"] == updates).all()
    assert names["torn"] == 0
    assert (names["values"] == 2 * updates).all()
    weight = names["learned"]["weight"]
    assert ((weight - names["TRUE"]).abs() < 0.1).all()
