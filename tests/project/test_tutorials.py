"""The tutorials do what they say: each file is saved and each command runs in turn, and prints what the page shows."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.page_examples import ROOT

TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(TUTORIALS.glob("*.md"))
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
SAVED = re.compile(r"ave (?:this|the result) as `([\w.]+)`")


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """Return language, text, and the text before, of each of a page's code blocks."""
    parts = re.split(r"^```(\w*)\n(.*?)^```\n", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return list(zip(parts[1::3], parts[2::3], parts[0::3], strict=False))


def is_alike(line: str, shown: str, exact: bool) -> bool:
    """Whether a line is the shown one, its numbers to 5 % or of any value."""
    if NUMBER.sub("#", line) != NUMBER.sub("#", shown):
        return False
    pairs = zip(NUMBER.findall(line), NUMBER.findall(shown), strict=True)
    found = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    return not exact or all(math.isclose(a, b, rel_tol=0.05, abs_tol=0.05) for a, b in found)


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "proves"),
    [*((page, False) for page in PAGES), (TUTORIALS / "first_run.md", True)],
    ids=[*(page.stem for page in PAGES), "first_run, its proof"],
)
def test_a_tutorial_runs_and_prints_what_it_shows(page: Path, proves: bool, tmp_path: Path) -> None:
    """All commands but `steepest verify`, which takes as long as the others together; or that one."""
    for extra in ("sklearn", "numba"):
        pytest.importorskip(extra)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("RAY_ADDRESS", None)
    done: subprocess.CompletedProcess[str] | None = None
    name = ""
    commands = 0
    for language, text, before in blocks(page):
        said = SAVED.findall(before)
        if language == "python" and (said or name):
            name = said[-1] if said else name
            if said:
                (tmp_path / name).write_text(text)
        elif language == "sh" and "pip install" not in text and "doctor" not in text:
            if ("verify" in text) != proves:
                done = None
                continue
            done = subprocess.run(
                ["bash", "-ec", text],
                cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            commands += 1
        elif language == "text" and done:
            printed, logged = done.stdout.splitlines(), done.stderr.splitlines()
            for shown in text.splitlines():
                is_there = any(is_alike(line, shown, True) for line in printed)
                is_there = is_there or any(is_alike(line, shown, False) for line in logged)
                assert is_there, f"{shown}\nis not in\n{done.stdout}\n{done.stderr}"
    assert commands >= (1 if proves else 2)
