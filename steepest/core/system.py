"""A process' clock, threads, waits and random numbers: Python's own, or a simulation's.

All code of the package that reads a clock, waits, or starts a thread uses `system()`, so that a
simulation can replace it.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


_PAUSE_SECONDS = 0.5  # between two beats
#: The most that passes on the clock between two beats. More is time in which the process was stopped (Ctrl-Z, a virtual
#: machine that is moved, a laptop that sleeps), or code in C kept Python's lock.
MOST_SECONDS = 2.0


class RunningClock:
    """A monotonic clock in seconds that does not count time in which the process did not run.

    So a process that was stopped and goes on does not take its own absence for the silence of others: each deadline is
    as far away as before. A thread beats while the process runs; without it, before `follow` and in a forked child,
    all time counts. Any thread may read it.

    Args:
        raw: a monotonic clock in seconds that counts all time.
    """

    def __init__(self, raw: Callable[[], float] = time.monotonic) -> None:
        self._raw = raw
        # of `raw`: up to when time counts without a further beat, and how much of it did not count
        self._state = (math.inf, 0.0)
        self._followed_by = 0  # pid of the process whose thread beats
        _clocks.add(self)

    def now(self) -> float:
        """Return the time, in seconds."""
        (last, absent), raw = self._state, self._raw()
        return (raw if raw < last else last) - absent

    def beat(self) -> float:
        """Note that the process runs; return the seconds for which it did not."""
        (last, absent), raw = self._state, self._raw()
        more = max(raw - last, 0.0)
        self._state = raw + MOST_SECONDS, absent + more
        return more

    def follow(self, start: Callable[[Callable[[], object], str], object]) -> None:
        """Have a thread beat from now on; `start` starts it, given its body and a name. Once in a process."""
        if self._followed_by != (here := os.getpid()):
            self._followed_by = here
            self.beat()
            try:
                start(self._beat_on, "steepest clock")
            except RuntimeError:  # the interpreter ends
                self.stand_alone()
                raise

    def stand_alone(self) -> None:
        """Count all time from now on, as in a forked child, where no thread beats."""
        self._state = math.inf, self._state[1]

    def _beat_on(self) -> None:
        """Beat until the process ends."""
        while True:
            time.sleep(_PAUSE_SECONDS)
            self.beat()


_clocks = weakref.WeakSet[RunningClock]()


def _stand_alone() -> None:
    for clock in _clocks:
        clock.stand_alone()


os.register_at_fork(after_in_child=_stand_alone)


class System:
    """Python's own clock, threads, waits and random numbers, which a simulation replaces; any thread may use it.

    Attributes:
        chance: the generator of random values such as tokens.
        now: returns the time in seconds, on a monotonic clock that stands still while the process is stopped.
        time: returns the seconds since the epoch.
        current: returns the calling thread, as `start` has.
        event, queue: return a new event, and a new queue without bounds.
        lock: returns a new lock, which its thread may take again.
    """

    time: Callable[[], float] = staticmethod(time.time)
    current = staticmethod(threading.current_thread)
    event, queue = threading.Event, SimpleQueue
    lock = staticmethod(threading.RLock)  # a function of Python's, which would be a method here

    def __init__(self) -> None:
        self.chance: random.Random = random.SystemRandom()
        self._clock = RunningClock()
        self.now: Callable[[], float] = self._clock.now

    def sleep(self, seconds: float) -> None:
        """Let the calling thread wait."""
        time.sleep(seconds)

    def start(self, body: Callable[[], object], name: str, *, daemon: bool = True) -> Thread:
        """Start a thread that runs a function; RuntimeError if the interpreter is ending."""
        self._clock.follow(_start_daemon)
        thread = Thread(target=body, name=name, daemon=daemon)
        thread.start()
        return thread

    def begin(self, body: Callable[[], object]) -> None:
        """Start a thread without a handle and without taking a lock, for signal handlers and garbage collection."""
        _thread.start_new_thread(body, ())

    def wait(self, futures: Collection[Future[Any]], seconds: float) -> None:
        """Return when one of some futures is done, or after some seconds."""
        until = self.now() + seconds
        while futures and not wait(futures, max(until - self.now(), 0.0), FIRST_COMPLETED).done:
            if self.now() >= until:  # else the process was stopped meanwhile
                return

    def result(self, future: Future[T], timeout: float | None = None) -> T:
        """Wait for a future; return its result, or raise as `Future.result` does."""
        if timeout is not None:
            self.wait([future], timeout)
        return future.result(timeout if timeout is None else 0)


def _start_daemon(body: Callable[[], object], name: str) -> None:
    """Start a thread that ends with the process."""
    Thread(target=body, name=name, daemon=True).start()


_used = System()


def system() -> System:
    """Return the system of this process."""
    return _used


@contextlib.contextmanager
def using(other: System) -> Iterator[None]:
    """Have all threads of this process use another system in a block."""
    global _used
    before, _used = _used, other
    try:
        yield
    finally:
        _used = before
