"""Stand-ins for what makes real threads wait: locks, queues, futures, clocks, on virtual threads.

Each namespace takes the place of a module of Python's, and has what steepest uses of it. Whatever
else is asked of it comes from the module itself, but for other things that make threads wait.
"""

from __future__ import annotations

import queue
import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any, Generic, TypeVar

from steepest.core.system import System
from tests.simulation.virtual_threads import Scheduler, VirtualThread, Waiters, is_virtual

T = TypeVar("T")
EPOCH = 1_700_000_000.0  # what `time.time` returns when the virtual clock is at zero


class Active:
    """The simulation that runs, and its scheduler; None outside of any."""

    scheduler: Scheduler | None = None
    simulation: Any = None


def active() -> Scheduler:
    """Return the scheduler of the simulation that runs."""
    assert Active.scheduler is not None, "no simulation runs"
    return Active.scheduler


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: Waiters = []

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it, and let those who wait go on."""
        self._set = True
        active().wake(self._waiters)

    def clear(self) -> None:
        """Reset it."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; return whether it is."""
        return self._set or active().block(self._waiters, timeout, "an event") or self._set


class RLock:
    """As `threading.RLock`; with `reentrant=False` as `threading.Lock`."""

    def __init__(self, *, reentrant: bool = True) -> None:
        self._reentrant = reentrant
        self._owner: VirtualThread | None = None
        self._count = 0
        self._waiters: Waiters = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; return whether it was taken."""
        me = active().current
        while self._owner is not None and not (self._reentrant and self._owner is me):
            left = None if timeout < 0 else timeout
            try:
                if not blocking or not active().block(self._waiters, left, "a lock"):
                    return False
            except BaseException:
                if self._owner is None and not me.doomed:  # it was let go for this thread
                    active().wake_one(self._waiters)
                raise
        self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        """Give the lock back."""
        self._count -= 1
        if not self._count:
            self._owner = None
            active().wake_one(self._waiters)

    def locked(self) -> bool:
        """Return whether the lock is taken."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: Waiters = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification without the lock; return whether one came."""
        count, self._lock._count, self._lock._owner = self._lock._count, 0, None
        active().wake_one(self._lock._waiters)
        me = active().current
        try:
            return active().block(self._waiters, timeout, "a condition")
        finally:
            if not me.doomed:
                me.shielded = True
                try:
                    self._lock.acquire()
                finally:
                    me.shielded = False
                self._lock._count = count

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until a predicate holds; return its value."""
        end = None if timeout is None else active().now + timeout
        while not (found := predicate()):
            if not self.wait(None if end is None else end - active().now):
                return predicate()
        return found

    def notify(self, count: int = 1) -> None:
        """Let some of those who wait go on."""
        for _ in range(count):
            active().wake_one(self._waiters)

    def notify_all(self) -> None:
        """Let all who wait go on."""
        active().wake(self._waiters)


class Queue(Generic[T]):
    """As `queue.Queue` and `queue.SimpleQueue`, without bounds."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiters: Waiters = []

    def put(self, item: T) -> None:
        """Add an item."""
        self._items.append(item)
        active().wake_one(self._waiters)

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Return the oldest item; raise `queue.Empty` if none comes in time."""
        while not self._items:
            if not block or not active().block(self._waiters, timeout, "a queue"):
                if self._items:
                    break
                raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> T:
        """Return the oldest item; raise `queue.Empty` without any."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Return whether there is no item."""
        return not self._items

    def qsize(self) -> int:
        """Return the number of items."""
        return len(self._items)


class Thread:
    """As `threading.Thread`; it belongs to the process of the thread that starts it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, dict(kwargs or {})
        self.name, self.daemon = name or "thread", daemon
        self.virtual: VirtualThread | None = None

    def run(self) -> None:
        """Call the target."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        """Start the thread."""
        owner = active().current.owner
        of = "" if owner is None else f" of {owner}"
        self.virtual = active().spawn(self.run, f"{self.name}{of}", owner)
        self.virtual.handle = self

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        assert self.virtual is not None
        if not self.virtual.finished:
            active().block(self.virtual.joining, timeout, f"the end of {self.name}")

    def is_alive(self) -> bool:
        """Return whether the thread was started and has not ended."""
        return self.virtual is not None and not self.virtual.finished


class SystemByThread:
    """A `System` that is a simulation's on its threads, and Python's on others.

    Args:
        virtual: the simulation's.
        real: Python's.
    """

    def __init__(self, virtual: System, real: System) -> None:
        self._virtual, self._real = virtual, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._virtual if is_virtual() else self._real, name)


class VirtualSystem:
    """A `System` of virtual threads.

    Args:
        scheduler: of its threads.
        seed: of what is drawn by chance.
    """

    event, lock, queue = Event, RLock, Queue

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self._scheduler = scheduler
        self.chance = random.Random(seed)
        self.now, self.sleep = scheduler.clock, scheduler.sleep

    def time(self) -> float:
        """Return the seconds since the epoch."""
        return EPOCH + self._scheduler.clock()

    def start(self, body: Callable[[], object], name: str, *, daemon: bool = True) -> Thread:
        """Start a thread of the process whose thread this is."""
        thread = Thread(target=body, name=name, daemon=daemon)
        thread.start()
        return thread

    def begin(self, body: Callable[[], object]) -> None:
        """Start a thread without a handle."""
        self.start(body, "thread")

    def current(self) -> Any:
        """Return the thread that runs."""
        return self._scheduler.current.handle or self._scheduler.current

    def result(self, future: futures.Future[T], timeout: float | None = None) -> T:
        """Wait for a future."""
        self.wait([future], timeout)
        return future.result(0)

    def wait(self, several: Collection[futures.Future[Any]], seconds: float | None) -> None:
        """Wait for a future of several."""
        waiters: Waiters = []
        for future in several:
            future.add_done_callback(lambda _: self._scheduler.wake(waiters))
        if not any(future.done() for future in several):
            self._scheduler.block(waiters, seconds, "a future")
