"""Results that one thread waits for and another one sets, safe if a signal's handler raises during the wait."""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from steepest.core.system import system

T = TypeVar("T")


class Answer(Generic[T]):
    """A result that another thread sets; the first one counts.

    It is used as `concurrent.futures.Future` is. A handler of a signal, such as Ctrl-C's, may raise
    in a thread that has just taken the lock inside a `Future`, an `Event` or a `Condition`; that lock
    is never released, and the thread that sets the result waits for ever. Here nothing is locked.
    """

    def __init__(self) -> None:
        self._outcomes: list[tuple[T | None, BaseException | None]] = []
        self._callbacks: list[Callable[[Answer[T]], object]] = []

    def done(self) -> bool:
        """Return whether there is a result."""
        return bool(self._outcomes)

    def set_result(self, result: T) -> None:
        """Set the result, unless there is one."""
        self._outcomes.append((result, None))
        self._tell()

    def set_exception(self, error: BaseException) -> None:
        """Set an exception that `result` raises, unless there is a result."""
        self._outcomes.append((None, error))
        self._tell()

    def add_done_callback(self, callback: Callable[[Answer[T]], object]) -> None:
        """Have a function called with this answer when there is a result, on the thread that sets it."""
        self._callbacks.append(callback)
        if self.done():
            self._tell()

    def remove_done_callback(self, callback: Callable[[Answer[T]], object]) -> None:
        """Stop a function from being called, unless it is being called at this moment."""
        with contextlib.suppress(ValueError):  # it is called, or was never added
            self._callbacks.remove(callback)

    def result(self, timeout: float | None = None) -> T:
        """Return the result, or raise the exception, when it is there.

        Raises:
            concurrent.futures.TimeoutError: it is not there within so many seconds.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return cast(T, self._outcomes[0][0])

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception, or None with a result, as soon as there is one of the two.

        Raises:
            concurrent.futures.TimeoutError: it is not there within so many seconds.
        """
        if not self.wait(timeout):
            raise FutureTimeoutError
        return self._outcomes[0][1]

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a result, for `timeout` seconds at most; return whether there is one."""
        if not self.done():
            woken: SimpleQueue[Any] = system().queue()
            self.add_done_callback(woken.put)
            until = math.inf if timeout is None else system().now() + timeout
            while not self.done() and (left := until - system().now()) > 0:
                with contextlib.suppress(queue.Empty):
                    woken.get(timeout=None if timeout is None else left)
            self.remove_done_callback(woken.put)
        return self.done()

    def _tell(self) -> None:
        """Call the waiting functions; each is taken out by one thread only."""
        while self._callbacks:
            try:
                callback = self._callbacks.pop()
            except IndexError:  # another thread was faster
                return
            callback(self)
