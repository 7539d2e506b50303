"""The coordinator of a parameter server by itself, by text scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.script import played, scripts


@pytest.mark.parametrize("path", scripts("parameter_server"), ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    text = path.read_text()
    assert played(text).split("\n") == text.split("\n")
