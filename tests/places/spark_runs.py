"""Programs that start Ray on Spark, what they report, and what they leave behind."""

from __future__ import annotations

import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_spark = pytest.mark.skipif(
    find_spec("pyspark") is None,
    reason="needs Spark: make test-spark has it",
)
ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "places" / "spark_program.py")
SECONDS = 600.0  # on a busy machine; a minute and a half on an idle one
TOKEN = secrets.token_hex(16)


@pytest.fixture
def directory() -> Iterator[str]:
    """A short path for Ray's sockets, which tests look at when all has ended."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:
        yield folder


def environment(**more: str) -> dict[str, str]:
    """Variables of a program: no Ray but its own, and executors with this Python."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("RAY_", "SPARK_", "PYTEST_"))}
    return kept | {
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "RAY_ON_SPARK_RAY_WORKER_NODE_STARTUP_INTERVAL": "1",
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",  # short lives
        **more,
    }


def found(output: str) -> dict[str, Any]:
    lines = [line.removeprefix("FOUND ") for line in output.splitlines() if "FOUND " in line]
    return dict(json.loads(line[line.index("[") :]) for line in lines)


def left(directory: str) -> list[str]:
    """The processes that name a directory in their arguments, and the files of Ray in it."""
    commands = [
        path.read_text(errors="replace").replace("\0", " ")
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if path.exists()
    ]
    return [c for c in commands if f"{directory}/s-" in c] + [
        str(path) for path in Path(directory).glob("s-*")
    ]
