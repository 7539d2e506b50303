"""A connection that its callers drive: no thread of its own unless something is left in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from steepest.errors import DeadlineError, PeerLostError, ShutdownError, SteepestError
from steepest.parameter_server.pusher import Pusher
from steepest.tensors.allocator import Recycler, empty_bytes
from steepest.tensors.memory import Bytes
from steepest.tensors.shared_memory import lendable
from steepest.transport.router import Router

if TYPE_CHECKING:
    from steepest.engine.client import Client

T = TypeVar("T")
_TURN_SECONDS = 0.05


class Connection:
    """A user's end of a parameter server in one process; may be used from any thread.

    Whoever waits moves the bytes itself, so that a small request costs no hand-over between
    threads. A thread of the connection's own does so only while pushes that nobody waits for are in
    flight.

    Args:
        router: with its transport; nobody else runs it.
        pusher: which it hosts.
        host_client: hosts a client on the router, when state is read or set for the first time.
        name: for errors.
        timeout: seconds that a call may take.
        max_in_flight: pushes; a further one waits until one of them is committed.
        usable: whether its transport can still be used, if only to close it.
        clock: tells the time, in seconds, against which `timeout` is held.
    """

    def __init__(
        self,
        router: Router,
        pusher: Pusher,
        host_client: Callable[[], Client],
        *,
        name: str,
        timeout: float,
        max_in_flight: int,
        usable: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pusher = pusher
        self.recycler = Recycler()  # for what is pulled
        # for what is pushed; a push that nobody waits for any more may still be read
        self.updates = Recycler(_for_updates, lambda: pusher.pushing == 0)
        self._router = router
        self._host_client = host_client
        self._client: Client | None = None
        self._name = name
        self._timeout = timeout
        self._max_in_flight = max_in_flight
        self._usable = usable
        self._clock = clock
        self._changed = threading.Condition()
        self._turner: int | None = None  # the thread that moves bytes
        self._in_flight = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def client(self) -> Client:
        """Reads and installs state; for use on the thread that owns the roles.

        Raises:
            PeerLostError, ShutdownError: there is no server to ask any more.
        """
        if self._client is None:
            if (failure := self.pusher.failure) is not None:  # of which a new client would not hear
                raise failure
            self._client = self._host_client()
        return self._client

    def run(self, begin: Callable[[], Future[T]], what: str, memory: Iterable[Bytes] = ()) -> T:
        """Begins something and waits for it.

        Args:
            begin: called on the thread that owns the roles; its future is waited for.
            what: for errors.
            memory: of what is sent; it may be changed when this returns or raises.

        Raises:
            DeadlineError: it takes longer than `timeout`.
            PeerLostError, NonFiniteError, ShutdownError
        """
        self._require_another_thread()
        deadline = self._clock() + self._timeout
        try:
            return self._wait(self._begin(begin, deadline, what), deadline, what).result()
        except (PeerLostError, ShutdownError) as error:
            raise self.pusher.failure or error from None
        except BaseException:  # its deadline, Ctrl-C: some of it may leave later
            owned = self._router.call(lambda: self._own(memory))
            while not owned.done() and not self._closed:
                self._turn_once(_TURN_SECONDS, owned)
            raise

    def push_async(self, begin: Callable[[], Future[int]], memory: list[Bytes]) -> Future[int]:
        """Begins a push that nobody waits for; its memory may be changed as soon as this returns."""
        deadline = self._clock() + self._timeout
        what = "a push to leave"
        while self.pusher.pushing >= self._max_in_flight:
            self._turn(deadline, what)

        def begin_and_own() -> Future[int]:
            future = begin()
            self._own(memory)
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
            PeerLostError, ShutdownError: those that were in flight may be lost.
        """
        self._require_another_thread()
        deadline = self._clock() + self._timeout
        while self.pusher.pushing:
            self._turn(deadline, "its pushes to be committed")
        if self.pusher.failure is not None:
            raise self.pusher.failure

    def close(self) -> None:
        """Closes the connection; whatever waits fails."""
        self._closed = True
        self._in_flight.set()
        if self.turning_here:
            self._close("this parameter server is shut down")
            return
        try:
            while not self._acquire(_TURN_SECONDS):
                pass
            self._close("this parameter server is shut down")
        finally:
            self._release()

    def _close(self, why: str) -> None:
        self._closed = True
        self.pusher.close(why)
        if self._client is not None:
            self._client.close()
        if self._router.transport is not None and self._usable():
            self._router.transport.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or broke: another one is needed."""
        return self._closed

    @property
    def turning_here(self) -> bool:
        """Whether this thread is moving bytes: it runs a callback of a future, or a finalizer."""
        return self._turner == threading.get_ident()

    def lost(self) -> bool:
        """Whether a server is known, or found now, to be gone."""
        if not self._closed and not self.turning_here:
            self._turn_once(0.0)
        return self.pusher.failure is not None

    def _require_another_thread(self) -> None:
        if self.turning_here:
            raise SteepestError(
                f"{self._name}: a callback of a future may push_async, but not wait: nobody else "
                "would move its bytes"
            )

    def _own(self, memory: Iterable[Bytes]) -> None:
        for part in memory:
            self._router.own_pending(part)

    def _begin(self, begin: Callable[[], Future[T]], deadline: float, what: str) -> Future[T]:
        if self.turning_here:
            return begin()
        try:
            if self._acquire(0.0):  # nobody else is at it: no hand-over
                return begin()
        finally:
            self._release()
        return self._wait(self._router.call(begin), deadline, what).result()

    def _wait(self, future: Future[T], deadline: float, what: str) -> Future[T]:
        while not future.done():
            self._turn(deadline, what, future)
        return future

    def _turn(self, deadline: float, what: str, future: Future[T] | None = None) -> None:
        self._require_another_thread()
        left = deadline - self._clock()
        if left <= 0:
            raise DeadlineError(f"{self._name}: waited {self._timeout:g} s in vain for {what}")
        if self._closed:
            raise ShutdownError(f"{self._name}: it is shut down")
        self._turn_once(min(left, _TURN_SECONDS), future)

    def _turn_once(self, seconds: float, future: Future[Any] | None = None) -> None:
        """Moves bytes, or waits while another thread does, until something happens or the future is done."""
        try:
            if self._acquire(seconds, future) and not self._closed:
                if self._usable():
                    self._router.turn(seconds)
                else:
                    self._close("what this parameter server is reached through is shut down")
        except BaseException:
            if self.turning_here:  # Ctrl-C, most likely: nobody knows what was left half done
                self._close("the connection broke off: what was in flight may be committed or not")
            raise
        finally:
            self._release()

    def _acquire(self, timeout: float, future: Future[Any] | None = None) -> bool:
        """Becomes the thread that moves bytes; False when another one does, or when the future is done."""
        with self._changed:
            done = future is not None and future.done()
            if self._turner is not None and timeout and not done:
                self._changed.wait(
                    timeout
                )  # for its turn to end, which may have done what is awaited
            if self._turner is not None or (future is not None and future.done()):
                return False
            self._turner = threading.get_ident()
            return True

    def _release(self) -> None:
        """Lets others move bytes, if this thread did."""
        with self._changed:
            if self.turning_here:
                self._turner = None
                self._changed.notify_all()

    def _drive(self) -> None:
        """Moves bytes while pushes are in flight that nobody waits for."""
        while not self._closed:
            self._in_flight.wait()
            self._in_flight.clear()
            while self.pusher.pushing and not self._closed:
                self._turn_once(_TURN_SECONDS)


def _for_updates(nbytes: int) -> Bytes:
    """New memory that servers of this host read where it lies, if there is any."""
    memory = lendable(nbytes)
    return empty_bytes(nbytes) if memory is None else memory
