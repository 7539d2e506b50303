"""A worker's thread gives way to whoever wakes it, where the system can do that."""

from __future__ import annotations

import os
import threading

import pytest

from steepest.runtime.scheduling import give_way


def in_a_thread(*functions: object) -> list[object]:
    found: list[object] = []

    def body() -> None:
        found.extend(function() for function in functions)  # type: ignore[operator]

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(10.0)
    return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")
def test_the_thread_that_asks_gives_way_and_no_other() -> None:
    before = os.sched_getscheduler(0)
    found = in_a_thread(give_way, lambda: os.sched_getscheduler(0))
    assert found == [None, os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == before


def test_where_it_is_forbidden_or_unknown_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*arguments: object) -> None:
        raise PermissionError("a sandbox")

    monkeypatch.setattr(os, "sched_setscheduler", forbid, raising=False)
    give_way()
    monkeypatch.delattr(os, "SCHED_BATCH", raising=False)
    give_way()
