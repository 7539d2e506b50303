"""The owner's queue by itself: what runs at which of its waits, once each, and what an end does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from steepest import Checkpoints, DistributedSGD
from steepest.errors import ShutdownError
from steepest.runtime.job_runtime import JobRuntime, runtime, using
from steepest.runtime.owner import GivenUp, Moment, Owner
from tests.reference import Task
from tests.simulation.run import Simulation, run_config


@pytest.fixture
def owner() -> Iterator[Owner]:
    with using(cast("JobRuntime", SimpleNamespace(is_up=True))):
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


def test_futures_of_other_threads_end_a_wait_and_requests_run_meanwhile(owner: Owner) -> None:
    futures: list[Future[int]] = [Future(), Future(), Future()]
    found: list[bool] = []

    def wait() -> None:
        found.append(owner.attend(30.0, calls=futures, number=2))
        found.append(owner.attend(0.0, calls=futures))
        found.append(owner.attend(0.0, calls=[]))

    waiting = owner.submit(wait, Moment.FREE)
    owner.call(lambda: None, Moment.ANY)
    for number in (2, 0):
        assert not found
        futures[number].set_result(number)
    waiting.future.result(30)
    assert found == [True, False, True]


def test_calls_of_processes_end_a_wait_and_requests_run_between_two_looks(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def those_ended(calls: list[str], *_: object) -> list[str]:
        return [call for call in calls if call in ended]

    monkeypatch.setattr(runtime(), "wait", those_ended, raising=False)
    waiting = owner.submit(lambda: owner.attend(30.0, calls=["a", "b"], number=1), Moment.FREE)
    owner.call(lambda: ended.append("b"), Moment.ANY)
    assert waiting.future.result(30) is True


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


def test_an_end_fails_a_request_that_has_just_left_the_queue() -> None:
    owner = Owner()
    inner = owner._queue

    class Ending:
        """A queue that has another thread end the owner when a request has been taken."""

        put = staticmethod(inner.put)

        def get_nowait(self) -> Any:
            return self.ended(inner.get_nowait())

        def get(self, timeout: float) -> Any:
            return self.ended(inner.get(timeout=timeout))

        def ended(self, taken: Any) -> Any:
            if taken is not None:
                ending = threading.Thread(target=owner._give_up, args=("it has ended",))
                ending.start()
                ending.join()
            return taken

    owner._queue = cast("Any", Ending())
    with using(cast("JobRuntime", SimpleNamespace(is_up=True))):
        owner.start()
        asked = owner.submit(lambda: None, Moment.FREE, when=lambda: False)
        with pytest.raises(ShutdownError, match="it has ended"):
            asked.future.result(30)
        owner.end()


@pytest.mark.parametrize("kept", [False, True])
def test_what_nobody_waits_for_is_given_up_unless_it_is_to_come_to_its_end(
    owner: Owner, kept: bool
) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def work() -> None:
        with owner.for_caller():
            begun.set()
            owner.attend(30.0, go_on.is_set)
        done.append("all of it")

    def whole() -> None:
        with owner.to_its_end():
            work()

    request = owner.submit(whole if kept else work, Moment.FREE)
    assert begun.wait(30)
    request.given_up = True
    go_on.set()
    owner.wake()
    if kept:
        request.future.result(30)
    else:
        with pytest.raises(GivenUp):
            request.future.result(30)
    assert done == (["all of it"] if kept else [])


def test_a_request_that_was_given_up_before_it_ran_does_not_run_and_is_over(owner: Owner) -> None:
    ran: list[int] = []
    request = owner.submit(lambda: ran.append(1), Moment.FREE, when=lambda: request.given_up)
    request.given_up = True
    owner.wake()
    with pytest.raises(GivenUp):
        request.future.result(30)
    assert not ran


def test_a_trainer_whose_owner_has_ended_frees_its_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after the user's own ray.shutdown(): another trainer may keep its checkpoints there."""
    kept = Checkpoints(tmp_path / "kept", every=2)
    with Simulation(1).running():
        first = DistributedSGD(Task().creator(), 2, run_config=run_config(), checkpoints=kept)
        first.fit(steps=4, progress=False)
        first.step()
        first._supervisor.owner.end()
        with pytest.raises(ShutdownError):
            first.step()
        first.shutdown()
        assert "the last state is not kept: its processes are gone" in caplog.text
        with DistributedSGD(
            Task().creator(), 2, run_config=run_config(), checkpoints=kept
        ) as second:
            assert second.stats().step == 4
