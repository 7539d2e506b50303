"""Python examples of the documents: found, run as they stand, and their output."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.run import Simulation

ROOT = Path(__file__).parent.parent


def run_block(block: str, folder: Path, address: str = "") -> str:
    """What a page's example prints when it runs as it stands; on that cluster, if it uses Ray."""
    script = folder / "example.py"
    script.write_text(block)
    environment = os.environ | {"RAY_ADDRESS": address}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks_of(page: str) -> list[str]:
    """Its Python examples."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def said_by(page: str, monkeypatch: pytest.MonkeyPatch, number: int = 0) -> str:
    """What one of a page's examples prints when it runs on a simulated Ray."""
    text = (ROOT / "docs" / page).read_text()
    block = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[number]
    # workers are threads of this process, whose memory is left as it is
    monkeypatch.setattr("steepest.runtime.process.keep_freed_memory", lambda: False)
    printed = io.StringIO()
    with Simulation(1).running(), contextlib.redirect_stdout(printed):
        exec(compile(block, page, "exec"), {"__name__": "__main__"})
    return printed.getvalue()
