"""Ray on the executors of local-cluster[...]: rows of a frame, an executor that dies; run by make test-spark."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.places.spark_runs import (
    PROGRAM,
    SECONDS,
    TOKEN,
    directory,
    environment,
    found,
    left,
    needs_spark,
)

__all__ = ["directory"]


@pytest.fixture(autouse=True)
def _deadline() -> None:
    """Let a test take longer than others may: its program has a deadline of its own."""


@needs_spark
@pytest.mark.parametrize(
    ("program", "more"),
    [
        ("on_executors", {}),
        pytest.param(  # tests/places/test_parquet_rows.py has these in one process
            "all_on_executors",
            {"visits with 1": [1.0], "visits with 2": [1.0], "visits after a resume": [1.0]},
            marks=pytest.mark.full,
        ),
    ],
)
def test_training_on_executors(program: str, more: dict[str, Any], directory: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, program, directory],
        env=environment(TESTS_TOKEN=TOKEN),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert TOKEN not in done.stdout + done.stderr
    seen = found(done.stdout)
    (blocks, again) = seen.pop("blocks")
    assert (sum(blocks), max(blocks), blocks) == (96, 10, again)
    assert seen == {
        "cpus": [0, 1, 1],
        "rows": True,
        "killed": 1,
        "visits after a death": [1.0],
        "shown": [],
        "ended with": 143,
        "after": [False, None, []],
        "still computes": 10,
        **more,
    }
    assert left(directory) == []
