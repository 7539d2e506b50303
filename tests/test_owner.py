"""The owner's queue by itself: what runs at which of its waits, once each, and what an end does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from steepest.cluster import owner as module
from steepest.cluster.owner import Moment, Owner
from steepest.errors import ShutdownError


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    monkeypatch.setattr(module.ray, "is_initialized", lambda: True)
    found = Owner()
    found.start()
    yield found
    found.end()


def test_requests_that_one_runs_at_its_waits_are_not_run_again_after_it(owner: Owner) -> None:
    """Three come together: the first one waits, and the second and third run meanwhile, once each."""
    ran: list[int] = []
    go_on = threading.Event()

    def first() -> None:
        assert go_on.wait(30)
        owner.attend(30.0, lambda: len(ran) == 2)
        ran.append(1)

    def gate() -> None:
        """Keep the owner until all three are in its queue."""
        assert go_on.wait(30)

    begun = owner.submit(gate, Moment.FREE)
    several = [owner.submit(first, Moment.WHOLE)]
    several += [owner.submit(lambda n=n: ran.append(n), Moment.ANY) for n in (2, 3)]
    go_on.set()
    for request in (begun, *several):
        request.future.result(30)
    assert sorted(ran) == [1, 2, 3]
    assert ran[-1] == 1


def test_what_needs_the_job_whole_waits_while_it_is_changed(owner: Owner) -> None:
    ran: list[str] = []
    come = threading.Event()

    def change() -> None:
        with owner.amid_change():
            come.set()
            assert owner.attend(30.0, lambda: "any" in ran)
        ran.append("changed")

    changing = owner.submit(change, Moment.FREE)
    assert come.wait(30)
    whole = owner.submit(lambda: ran.append("whole"), Moment.WHOLE)
    owner.call(lambda: ran.append("any"), Moment.ANY)
    changing.future.result(30)
    whole.future.result(30)
    assert ran == ["any", "changed", "whole"]


def test_an_end_fails_what_waits_and_what_comes_later(owner: Owner) -> None:
    waiting = owner.submit(lambda: None, Moment.FREE, when=lambda: False)
    owner.end()
    with pytest.raises(ShutdownError, match="make another one"):
        waiting.future.result(30)
    assert owner.has_ended
