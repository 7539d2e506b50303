"""The coordinator by text scripts: what it is told, and all that it sends then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.protocol.script import played, scripts


@pytest.mark.parametrize("path", scripts("protocol"), ids=lambda path: path.stem)
def test_script(path: Path) -> None:
    text = path.read_text()
    assert played(text).split("\n") == text.split("\n")
