"""A connection that its callers drive: no thread of its own unless something is left in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from steepest.client import Client
from steepest.comm.router import Router
from steepest.errors import DeadlineError
from steepest.pusher import Pusher

T = TypeVar("T")
_TURN_SECONDS = 0.05


class Connection:
    """A user's end of a parameter server in one process; may be used from any thread.

    Whoever waits moves the bytes itself, so that a small request costs no hand-over between threads. A
    thread of the connection's own does so only while pushes that nobody waits for are in flight.

    Args:
        router: with its transport; nobody else runs it.
        pusher, client: which it hosts.
        name: for errors.
        timeout: seconds that a call may take.
        max_in_flight: pushes; a further one waits until one of them is committed.
    """

    def __init__(
        self, router: Router, pusher: Pusher, client: Client, *, name: str, timeout: float, max_in_flight: int
    ) -> None:
        self.client = client
        self.pusher = pusher
        self._router = router
        self._name = name
        self._timeout = timeout
        self._max_in_flight = max_in_flight
        self._turning = threading.Lock()
        self._in_flight = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, begin: Callable[[], Future[T]], what: str) -> T:
        """Begins something and waits for it.

        Args:
            begin: called on the thread that owns the roles; its future is waited for.
            what: for errors.

        Raises:
            DeadlineError: it takes longer than `timeout`.
            PeerLostError, NonFiniteError, ShutdownError
        """
        deadline = time.monotonic() + self._timeout
        return self._wait(self._begin(begin, deadline, what), deadline, what).result()

    def push_async(self, begin: Callable[[], Future[int]], memory: list[torch.Tensor]) -> Future[int]:
        """Begins a push that nobody waits for; its memory may be changed as soon as this returns."""
        deadline = time.monotonic() + self._timeout
        what = "a push to leave"
        while self.pusher.pushing >= self._max_in_flight:
            self._turn(deadline, what)

        def begin_and_own() -> Future[int]:
            future = begin()
            for part in memory:
                self._router.own_pending(part)
            return future

        future = self._begin(begin_and_own, deadline, what)
        if self._thread is None:
            self._thread = threading.Thread(target=self._drive, name="steepest pushes", daemon=True)
            self._thread.start()
        self._in_flight.set()
        return future

    def flush(self) -> None:
        """Waits until no push is in flight.

        Raises:
            DeadlineError: that takes longer than `timeout`.
        """
        deadline = time.monotonic() + self._timeout
        while self.pusher.pushing:
            self._turn(deadline, "its pushes to be committed")

    def close(self) -> None:
        """Closes the connection; whatever waits fails."""
        self._closed = True
        self._in_flight.set()
        with self._turning:
            self.pusher.close()
            self.client.close()
            if self._router.transport is not None:
                self._router.transport.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._closed

    def _begin(self, begin: Callable[[], Future[T]], deadline: float, what: str) -> Future[T]:
        if self._turning.acquire(blocking=False):  # nobody else is at it: no hand-over
            try:
                return begin()
            finally:
                self._turning.release()
        return self._wait(self._router.call(begin), deadline, what).result()

    def _wait(self, future: Future[T], deadline: float, what: str) -> Future[T]:
        while not future.done():
            self._turn(deadline, what, future)
        return future

    def _turn(self, deadline: float, what: str, future: Future[T] | None = None) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"{self._name}: waited {self._timeout:g} s in vain for {what}")
        if self._turning.acquire(timeout=min(left, _TURN_SECONDS)):
            try:
                if not self._closed and (future is None or not future.done()):
                    self._router.turn(min(left, _TURN_SECONDS))
            finally:
                self._turning.release()

    def _drive(self) -> None:
        """Moves bytes while pushes are in flight that nobody waits for."""
        while not self._closed:
            self._in_flight.wait()
            self._in_flight.clear()
            while self.pusher.pushing and not self._closed:
                with self._turning:
                    if not self._closed:
                        self._router.turn(_TURN_SECONDS)
