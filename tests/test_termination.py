"""SIGTERM's handler: which one it replaces, and what a second signal does."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from steepest.cluster import termination


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Puts the handler back, and forgets that this process began to end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    termination._began = -float("inf")


def rays(number: int, frame: object) -> None:
    """Stands for what `ray.init` installs."""


rays.__module__, rays.__qualname__ = "ray._private.worker", "init.<locals>.sigterm_handler"


def own(number: int, frame: object) -> None:
    """A user's."""


def test_a_users_handler_stays() -> None:
    signal.signal(signal.SIGTERM, own)
    termination.end_on_sigterm()
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_signal_ends_the_process_and_its_repetition_does_not_cut_that_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signal.signal(signal.SIGTERM, rays)
    termination.end_on_sigterm()
    for passed in (0.0, 31.0):  # a notebook goes on, and gets another one later
        now[0] += passed
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
        now[0] += 2.0
        signal.raise_signal(signal.SIGTERM)
