"""Threads that run one at a time, in an order drawn from a seed, on virtual time."""

from __future__ import annotations

import contextlib
import contextvars
import heapq
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

_MOST_LOOKS = 50_000  # at the clock without a switch: more are a loop without an end
_TICK = 1e-6  # seconds that pass at each look at the clock, so that a busy loop sees its deadline


class Killed(BaseException):
    """Unwinds a thread of a process that was killed."""


class HangError(BaseException):
    """The program does not come to its end; the message says what each thread waits for.

    Not an `Exception`, lest the program under test handles it.
    """


#: Threads that wait for something, each with the number of its wait.
Waiters = list[tuple["VirtualThread", int]]


class VirtualThread:
    """A thread that runs only while it has the baton.

    Attributes:
        name: for errors.
        owner: the simulated process to which it belongs, which has a flag `stopped`; None for the
            driver.
        waits_for: what it waits for, in words.
        wait: the number of its waits so far.
        blocked: whether it waits.
        doomed: whether its process was killed: it ends instead of going on.
        thrown: what `Scheduler.throw` has it raise when it goes on; None for nothing.
        shielded: whether it goes on for the moment without raising that.
        finished: whether it has ended.
        joining: threads that wait for its end.
        handle: as which the program knows it.
    """

    def __init__(self, name: str, owner: Any) -> None:
        self.name = name
        self.owner = owner
        self.waits_for = ""
        self.wait = 0
        self.blocked = False
        self.late = False  # whether the last wait ended by its timeout
        self.doomed = False
        self.thrown: BaseException | None = None
        self.shielded = False
        self.finished = False
        self.joining: Waiters = []
        self.handle: Any = None
        self.body: Callable[[], None] | None = None  # until it begins
        self.baton = threading.Lock()
        self.baton.acquire()
        self.reaper: VirtualThread | None = None  # goes on when this thread has ended
        self.reaping = False  # whether it waits for the end of one that it has doomed
        self.unwound: list[BaseException] = []  # by what it was ended


class _Carrier:
    """A real thread that runs the bodies of virtual threads, one after the other."""

    idle: list[_Carrier] = []

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None
        self._go = threading.Lock()
        self._go.acquire()
        threading.Thread(target=self._run, name="virtual", daemon=True).start()

    @classmethod
    def start(cls, work: Callable[[], None]) -> None:
        """Run a function on a real thread that is free."""
        carrier = cls.idle.pop() if cls.idle else cls()
        carrier._work = work
        carrier._go.release()

    def _run(self) -> None:
        _here.carrier = self
        while True:
            self._go.acquire()
            assert self._work is not None
            work, self._work = self._work, None
            contextvars.Context().run(work)  # what a body sets in its context goes with it
            del work


class Scheduler:
    """Passes the baton from thread to thread.

    The calling thread becomes the first virtual thread, the driver's main one.

    Args:
        seed: of the order in which threads run.
        seconds: of virtual time after which the program hangs.
        switches: from thread to thread after which it hangs.

    Attributes:
        now: virtual time, in seconds.
        current: the thread that runs.
        switches: passes of the baton so far.
        on_switch: called at each pass of the baton; must not block.
        on_wait: called with False when the main thread begins to wait, with True when it goes on.
    """

    def __init__(self, seed: int, seconds: float = 3600.0, switches: int = 60_000) -> None:
        self.now = 1000.0
        self.switches = 0
        self.random = random.Random(seed)
        self.main = self.current = VirtualThread("driver", None)
        self.on_switch: Callable[[], None] = lambda: None
        self.on_wait: Callable[[bool], None] = lambda over: None
        self._end, self._most = self.now + seconds, switches
        self._runnable: list[VirtualThread] = []
        # (time, number, thread that is woken unless its wait has another number, or function)
        self._timers: list[tuple[float, int, VirtualThread | None, int, Callable[[], None]]] = []
        self._number = 0
        self._looks = 0  # at the clock since the last switch
        self._parked: list[VirtualThread] = []  # those of stopped processes
        self._living: dict[VirtualThread, None] = {self.main: None}
        self._over: HangError | None = None

    # -- time ----------------------------------------------------------------------------------

    def clock(self) -> float:
        """Return virtual time, in seconds; a moment passes."""
        self.now += _TICK
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            self._looks = 0
            self._hang("a busy loop")
            self.check()
        return self.now

    def at(self, when: float, function: Callable[[], None]) -> None:
        """Call a function, which must not block, at a virtual time."""
        self._push(when, None, 0, function)

    def _push(
        self, when: float, thread: VirtualThread | None, wait: int, function: Callable[[], None]
    ) -> None:
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, thread, wait, function))

    # -- threads -------------------------------------------------------------------------------

    def spawn(self, body: Callable[[], None], name: str, owner: Any) -> VirtualThread:
        """Start a thread, which runs when its turn comes.

        A thread that ends starts none of its own process. It may be the one in whose turn time
        passes, and what is due then starts threads of other processes.
        """
        thread = VirtualThread(name, owner)
        if self.current.doomed and owner is self.current.owner:
            thread.doomed = thread.finished = True
            return thread
        thread.body = body
        self._living[thread] = None
        self._runnable.append(thread)
        return thread

    def sleep(self, seconds: float) -> None:
        """Let the current thread wait for a while."""
        self.block(None, seconds, "sleep")

    def block(self, waiters: Waiters | None, timeout: float | None, what: str) -> bool:
        """Let the current thread wait; return False if the timeout has ended the wait.

        Args:
            waiters: the list by which `wake` finds the thread; None if it only waits for the time.
            timeout: in virtual seconds; None or infinity for none.
            what: it waits for, in words.

        Raises:
            Killed: the thread's process was killed.
            HangError: the program hangs.
            BaseException: what `throw` was given for the thread.
        """
        me = self.current
        if me is self.main:
            me.waits_for = what
            self.on_wait(False)
        self.check()
        me.wait += 1
        me.blocked, me.late, me.waits_for = True, False, what
        if waiters is not None:
            waiters.append((me, me.wait))
        if timeout is not None and timeout < math.inf:
            expire = partial(self._expire, me, me.wait)
            self._push(self.now + max(timeout, 0.0), me, me.wait, expire)
        self._pass_from(me)
        if me is self.main:
            self.on_wait(True)
        self.check()
        return not me.late

    def check(self) -> None:
        """Raise what ends the current thread or its wait, if anything does."""
        me = self.current
        if me.doomed:
            self.unwind()
        if self._over is not None:
            raise self._over
        if me.thrown is not None and not me.shielded:
            error, me.thrown = me.thrown, None
            raise error

    def unwind(self) -> NoReturn:
        """End the current thread, whose process was killed, by an exception."""
        error = Killed()
        self.current.unwound.append(error)
        raise error

    def throw(self, thread: VirtualThread, error: BaseException) -> None:
        """Let a thread raise an exception where it waits, or else where it waits next."""
        if thread.finished:
            return
        thread.thrown = error
        if thread.blocked and not thread.shielded:
            self.wake([(thread, thread.wait)])

    def living(self, owner: Any) -> list[VirtualThread]:
        """Return the threads of a process that have not ended, the oldest first.

        Args:
            owner: the process; None for the driver.
        """
        return [thread for thread in self._living if thread.owner is owner]

    def wake(self, waiters: Waiters) -> None:
        """Let threads go on that wait in a list, which is empty afterwards."""
        for thread, wait in waiters:
            if thread.blocked and thread.wait == wait:
                thread.blocked = False
                self._runnable.append(thread)
        waiters.clear()

    def wake_one(self, waiters: Waiters) -> bool:
        """Let the first thread of a list go on; return whether there was one."""
        while waiters:
            thread, wait = waiters.pop(0)
            if thread.blocked and thread.wait == wait:
                self.wake([(thread, wait)])
                return True
        return False

    def _expire(self, thread: VirtualThread, wait: int) -> None:
        if thread.blocked and thread.wait == wait:
            thread.late = True
            self.wake([(thread, wait)])

    # -- the baton -----------------------------------------------------------------------------

    def _pass_from(self, me: VirtualThread) -> None:
        thread = self._next()
        if thread is me:
            return
        self._pass_to(thread)
        me.baton.acquire()

    def _pass_to(self, thread: VirtualThread) -> None:
        self.current = thread
        if thread.body is not None:
            body, thread.body = thread.body, None
            _Carrier.start(partial(self._run, thread, body))
        else:
            thread.baton.release()

    def _run(self, thread: VirtualThread, body: Callable[[], None]) -> None:
        try:
            self.check()
            body()
        except (Killed, HangError):
            pass
        except BaseException:  # noqa: BLE001 - told as Python tells it; the others go on
            raised = (*sys.exc_info(), threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(raised))
        del body
        _forget(thread)
        thread.finished = True
        del self._living[thread]
        self.wake(thread.joining)
        _Carrier.idle.append(_of_this_thread())
        self._pass_to(thread.reaper or self._next())

    def _next(self) -> VirtualThread:
        """Return the thread that runs next; let time pass until there is one."""
        while True:
            self.on_switch()
            if self._runnable:
                self.switches += 1
                self._looks = 0
                if self.switches > self._most:
                    return self._hang(f"{self.switches} switches between threads")
                chosen = self.random.randrange(len(self._runnable))
                last = self._runnable.pop()
                if chosen < len(self._runnable):
                    last, self._runnable[chosen] = self._runnable[chosen], last
                if last.owner is not None and last.owner.stopped:
                    self._parked.append(last)
                    continue
                return last
            if not self._timers:
                return self._hang("nothing moves any more")
            when, _, thread_, wait, function = heapq.heappop(self._timers)
            if thread_ is not None and not (thread_.blocked and thread_.wait == wait):
                continue
            if when > self._end:
                return self._hang("it takes too long")
            self.now = max(self.now, when)
            function()

    def _hang(self, why: str) -> VirtualThread:
        """Have the main thread raise HangError; return it."""
        if self._over is None:
            lines = [f"{why}, at {self.now:.3f} s:"]
            lines += [f"    {thread.name}: {thread.waits_for}" for thread in self._living]
            self._over = HangError("\n".join(lines))
        self.main.blocked = False
        if self.main in self._runnable:
            self._runnable.remove(self.main)
        return self.main

    def resume(self, owner: Any) -> None:
        """Let the threads of a process go on that was stopped."""
        self._runnable += [thread for thread in self._parked if thread.owner is owner]
        self._parked = [thread for thread in self._parked if thread.owner is not owner]

    # -- ends ----------------------------------------------------------------------------------

    def kill(self, owner: Any) -> None:
        """End all threads of a process; the current one, if it is one of them, at its next wait."""
        for thread in [thread for thread in self._living if thread.owner is owner]:
            self._doom(thread)

    def end(self) -> None:
        """End all threads but the main one, which calls this."""
        for thread in list(self._living):
            if thread is not self.main:
                self._doom(thread)

    def _doom(self, thread: VirtualThread) -> None:
        if thread.doomed or thread.finished:
            return
        thread.doomed = True
        if thread is self.current:
            if thread.blocked:  # it passes the baton on just now
                thread.blocked = False
                self._runnable.append(thread)
            return
        if thread.reaping:  # it sees it when it goes on
            return
        thread.blocked = False
        for waiting in (self._runnable, self._parked):
            if thread in waiting:
                waiting.remove(thread)
        if thread.body is not None:  # it never began
            thread.body, thread.finished = None, True
            del self._living[thread]
            return
        me = self.current
        thread.reaper, me.reaping = me, True
        self._pass_to(thread)
        me.baton.acquire()
        me.reaping = False


def _forget(thread: VirtualThread) -> None:
    """Let go of what a thread that ends has left, as the end of its process would."""
    # Errors that were kept have frames with graphs of torch: the collector sees no circle that leads through one.
    for error in thread.unwound:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for caller, _ in traceback.walk_stack(
                frame
            ):  # also of those from where another error went on
                with contextlib.suppress(RuntimeError):  # it runs
                    caller.clear()
    thread.unwound.clear()


_here = threading.local()


def _of_this_thread() -> _Carrier:
    carrier: _Carrier = _here.carrier
    return carrier


def is_virtual() -> bool:
    """Return whether this thread is one of a simulation's: those of processes of tests before may still run."""
    return hasattr(_here, "carrier")


@contextlib.contextmanager
def being_virtual() -> Iterator[None]:
    """Have this thread be one of a simulation's in a block."""
    _here.carrier = None
    try:
        yield
    finally:
        del _here.carrier
