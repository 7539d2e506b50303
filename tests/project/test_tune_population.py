"""The example of Tune's population: its trials go on from checkpoints."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ray_hosts import ROOT, Place, place  # noqa: F401 - a fixture

SECONDS = 500.0  # trials start seven times, each with a process that imports torch


@pytest.fixture(autouse=True)
def _deadline() -> None:
    """Let the test take longer than others may: its program has a deadline of its own."""


def rows_of(folder: Path) -> list[list[dict[str, Any]]]:
    """What each trial has reported, by the files of Tune."""
    files = sorted(folder.glob("*/trainable_*/result.json"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.full
@pytest.mark.cluster
def test_trials_of_a_population_go_on_from_checkpoints(place: Place) -> None:  # noqa: F811
    """One after its process was killed, the other from the state of the first, which does better."""
    for name in ("ray.tune", "sklearn"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("pip install 'steepest[demo,tune]'")
    example = str(ROOT / "examples" / "ray_tune_population.py")
    kept = place.directory / "kept"
    with place.start(sys.executable, example, "--workers", "1", "--results", str(kept)) as program:
        try:
            printed, _ = program.communicate(timeout=SECONDS)
        finally:
            place.kill()
    assert program.returncode == 0, printed
    died, worse = sorted(rows_of(kept), key=lambda rows: not rows[0]["config"]["dies"])
    for rows in (died, worse):
        assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5], "none twice, none missing"
    assert [row["begun"] for row in died[:3]] == [0, 1, 1], "it went on from before its death"
    assert [row["begun"] for row in worse] == [0, 0, 0, 3, 3]
    assert max(row["accuracy"] for row in worse[:3]) < 0.5 < worse[-1]["accuracy"]
