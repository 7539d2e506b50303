"""Ray on the executors of local-cluster[...]: rows of a frame, an executor that dies; run by make test-spark."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.test_spark import (
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
def test_training_on_executors(directory: str) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, "on_executors", directory],
        env=environment(TESTS_TOKEN=TOKEN),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = found(done.stdout)
    assert seen["cpus"] == [0, 1, 1]
    (blocks, again) = seen["blocks"]
    assert (sum(blocks), max(blocks), blocks) == (96, 10, again)
    assert seen["rows"]
    assert (seen["visits with 1"], seen["visits with 2"]) == ([1.0], [1.0])
    assert seen["shown"] == []
    assert TOKEN not in done.stdout + done.stderr
    assert seen["killed"] == 1
    assert (seen["visits after a death"], seen["visits after a resume"]) == ([1.0], [2.0])
    assert seen["ended with"] == 143
    assert seen["after"] == [False, None, []]
    assert seen["still computes"] == 10
    assert left(directory) == []
