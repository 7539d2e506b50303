"""A clock that a test moves by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from steepest.core.system import System, using


class HandMovedClock(System):
    """Python's system, but for the time.

    Attributes:
        seconds: what the clock shows.
    """

    def __init__(self, seconds: float = 100.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.now = lambda: self.seconds  # an attribute of Python's, too


@pytest.fixture
def clock() -> Iterator[HandMovedClock]:
    """The clock of all of steepest during a test."""
    clock = HandMovedClock()
    with using(clock):
        yield clock
