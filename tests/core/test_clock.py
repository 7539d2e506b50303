"""A clock on which no time passes while its process does not run."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest

from steepest.core.system import MOST_SECONDS, RunningClock, System


class Seconds:
    """A raw clock that is set by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_it_counts_all_time_while_nothing_beats() -> None:
    raw = Seconds()
    clock = RunningClock(raw)
    raw.at += 1000.0
    assert clock.now() == 1100.0


def test_of_a_stop_no_more_counts_than_may_be_between_two_beats() -> None:
    raw = Seconds()
    clock = RunningClock(raw)
    clock.beat()
    raw.at += 1.0
    assert (clock.beat(), clock.now()) == (0.0, 101.0)
    raw.at += 600.0  # stopped: whoever looks before the next beat is not told of it either
    assert clock.now() == 101.0 + MOST_SECONDS
    assert clock.beat() == 600.0 - MOST_SECONDS
    assert clock.now() == 101.0 + MOST_SECONDS
    raw.at += 1.0
    assert clock.now() == 102.0 + MOST_SECONDS


def test_it_never_goes_back() -> None:
    raw, clock = Seconds(), RunningClock(Seconds())
    clock = RunningClock(raw)
    seen = [clock.now()]
    for passed in (0.0, 0.5, 3.0, 0.1, 2.0, 2.1, 90.0, 0.0):
        raw.at += passed
        seen.append(clock.now())
        clock.beat()
        seen.append(clock.now())
    assert seen == sorted(seen)


def test_a_thread_beats_once_in_a_process() -> None:
    clock, started = RunningClock(Seconds()), list[str]()
    for _ in range(2):
        clock.follow(lambda body, name: started.append(name))
    assert started == ["steepest clock"]


def test_the_clock_of_a_process_has_its_thread_as_soon_as_another_is_started() -> None:
    System().start(lambda: None, "any").join()
    assert "steepest clock" in {thread.name for thread in threading.enumerate()}


def test_where_no_thread_can_be_started_all_time_counts() -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    raw = Seconds()
    clock = RunningClock(raw)
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
        clock.follow(refuse)
    raw.at += 600.0
    assert clock.now() == 700.0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_without_the_thread_counts_all_time() -> None:
    raw = Seconds()
    clock = RunningClock(raw)
    clock.beat()
    child = os.fork()
    if child == 0:
        raw.at += 600.0
        os._exit(clock.now() != 700.0)
    assert os.waitpid(child, 0)[1] == 0


class Hasty(System):
    """A system whose clock goes on by a second each time that it is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = Seconds()
        self.now = RunningClock(self._read).now

    def _read(self) -> float:
        self.raw.at += 1.0
        return self.raw.at


def test_a_wait_for_a_future_ends_by_this_clock() -> None:
    system, answer = Hasty(), Future[int]()
    began = system.raw.at
    with pytest.raises(FutureTimeoutError):
        system.result(answer, 3.0)
    assert system.raw.at >= began + 3.0
    answer.set_result(7)
    assert system.result(answer, 60.0) == 7
    system.wait([], 60.0)
