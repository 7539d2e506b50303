"""A user's connection to a parameter server, driven by the threads that call it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from steepest.core.messages.message import COORDINATOR, Peer
from steepest.core.status import Status
from steepest.core.tensors.allocator import Recycler
from steepest.core.tensors.memory import Bytes
from steepest.core.tensors.shared_memory import lendable_if_possible
from steepest.core.transport.router import Router
from steepest.errors import DeadlineError, PeerLostError, ShutdownError, SteepestError
from steepest.parameter_server.pusher import Pusher

if TYPE_CHECKING:
    from steepest.core.engine.client import Client

T = TypeVar("T")
_TURN_SECONDS = 0.05


@dataclass(frozen=True)
class Reach:
    """Access to the servers that a connection does not have by itself."""

    # returns whether the transport can still be used, if only to close it
    usable: Callable[[], bool] = lambda: True
    # connects to the servers' successors within so many seconds, on the roles' thread while `pusher.broken`; returns
    # whether it has
    mend: Callable[[float], bool] = lambda seconds: False


class Connection:
    """The connection of one process to a parameter server; may be used from any thread.

    The thread that waits for a result moves the bytes itself, so that a small request costs no
    hand-over between threads. A thread of the connection's own moves them only while asynchronous
    pushes are in flight. One thread at a time runs the router; while it does, it owns the roles.

    Args:
        router: with its transport; run by the connection alone.
        pusher: the role on the router that pushes and pulls.
        host_client: hosts a client on the router; called when state is read or set for the first
            time.
        name: of the parameter server in error messages.
        timeout: seconds that a call may take.
        max_in_flight: pushes that may be uncommitted; a further asynchronous one waits.
        reach: of the servers.
        clock: returns the time, in seconds, by which `timeout` is measured.
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
        reach: Reach = Reach(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pusher = pusher
        self.recycler = Recycler()  # of memory for arrays that are pulled
        # servers may still read the memory of a push whose caller has given up
        # of memory for arrays that are pushed, which servers of this host read without a copy
        self.updates = Recycler(lendable_if_possible, lambda: pusher.pushing == 0)
        self._router = router
        self._host_client = host_client
        self._client: Client | None = None
        self._name = name
        self._timeout = timeout
        self._max_in_flight = max_in_flight
        self._reach = reach
        self._clock = clock
        self._changed = threading.Condition()
        self._turner: int | None = None  # the thread that moves bytes
        self._in_flight = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def client(self) -> Client:
        """The role that reads and installs state, for the thread that owns the roles; PeerLostError, ShutdownError."""
        if self._client is None:
            if (failure := self.pusher.failure) is not None:  # a new client would not learn of it
                raise failure
            self._client = self._host_client()
        return self._client

    def doing(self) -> list[tuple[Peer, Status]]:
        """Return what the roles of this user wait for; any thread may ask."""
        return self._router.doing()

    def run(self, begin: Callable[[], Future[T]], what: str, memory: Iterable[Bytes] = ()) -> T:
        """Begin a request, wait for it, and return its result.

        Args:
            begin: begins the request and returns its future; called on the thread that owns the
                roles.
            what: the request in error messages.
            memory: of what the request sends; it may be changed when this returns or raises.

        Raises:
            DeadlineError: the request takes longer than `timeout` seconds; it may still be carried
                out, but nothing more is written to memory that it was given.
            PeerLostError: a server is lost.
            ShutdownError: the connection is closed.
            SteepestError: this thread runs a callback of a future, which may not wait.
            Exception: of the request's future, such as NonFiniteError.
        """
        self._require_another_thread()
        deadline = self._clock() + self._timeout
        begun: list[Future[T]] = []

        def begin_and_keep() -> Future[T]:
            begun.append(begin())
            return begun[0]

        try:
            return self._wait(self._begin(begin_and_keep, deadline, what), deadline, what).result()
        except (PeerLostError, ShutdownError) as error:
            raise self.pusher.failure or error from None
        except BaseException:  # its deadline, Ctrl-C: some of it may leave, or arrive, later
            given_up = self._router.call(lambda: self._give_up(begun, memory))
            while not given_up.done() and not self._closed:
                self._turn_once(_TURN_SECONDS, given_up)
            self._wait_while_closing()
            raise

    def push_async(self, begin: Callable[[], Future[int]], memory: list[Bytes]) -> Future[int]:
        """Begin a push without waiting for its commit.

        Args:
            begin: begins the push and returns its future; called on the thread that owns the roles.
            memory: of the update; it may be changed when this returns.

        Returns:
            The future of the version that the push makes.

        Raises:
            DeadlineError: `max_in_flight` pushes stay uncommitted for `timeout` seconds.
            ShutdownError: the connection is closed.
            SteepestError: this push would have to wait, and this thread runs a callback of a
                future, which may not.
        """
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
        """Wait until no push is in flight.

        Raises:
            DeadlineError: a push is in flight for longer than `timeout` seconds.
            PeerLostError, ShutdownError: pushes that were in flight may be committed or not.
            SteepestError: this thread runs a callback of a future, which may not wait.
        """
        self._require_another_thread()
        deadline = self._clock() + self._timeout
        while self.pusher.pushing:
            self._turn(deadline, "its pushes to be committed")
        if self.pusher.failure is not None:
            raise self.pusher.failure

    def close(self) -> None:
        """Close the connection; every request that is waited for raises ShutdownError."""
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
        """Fail all requests and close the transport, on the thread that runs the router."""
        self._closed = True
        self.pusher.close(why)
        if self._client is not None:
            self._client.close()
        if self._router.transport is not None and self._reach.usable():
            self._router.transport.close()

    @property
    def closed(self) -> bool:
        """Whether the connection was closed, or broke off."""
        return self._closed

    @property
    def turning_here(self) -> bool:
        """Whether this thread runs the router, as callbacks of futures and finalizers may."""
        return self._turner == threading.get_ident()

    def lost(self) -> bool:
        """Look at the transport, hardly waiting; return whether a server is lost for good."""
        if not self._closed and not self.turning_here:
            self._turn_once(0.0)
            if self.pusher.broken:
                self._turn_once(_TURN_SECONDS)
        return self.pusher.failure is not None

    def _require_another_thread(self) -> None:
        """Raise SteepestError if this thread runs the router, and so may not wait."""
        if self.turning_here:
            raise SteepestError(
                f"{self._name}: a callback of a future may push_async, but not wait: no other "
                "thread would move its bytes"
            )

    def _give_up(self, begun: list[Future[T]], memory: Iterable[Bytes]) -> None:
        """Leave the memory of a request to its caller: what it sends, and what it receives into."""
        self._own(memory)
        for future in begun:
            self.pusher.withdraw(future)

    def _wait_while_closing(self) -> None:
        """Return when no other thread moves bytes any more, if the connection is closed."""
        try:
            while self._closed and not self.turning_here and not self._acquire(_TURN_SECONDS):
                pass
        finally:
            self._release()

    def _own(self, memory: Iterable[Bytes]) -> None:
        """Let the router copy the parts of some memory that are not sent yet."""
        for part in memory:
            self._router.own_pending(part)

    def _begin(self, begin: Callable[[], Future[T]], deadline: float, what: str) -> Future[T]:
        """Call `begin` on the thread that owns the roles, this one if it can; return its future."""
        if self.turning_here:
            return begin()
        try:
            if self._acquire(0.0):  # no other thread runs the router: no hand-over
                return begin()
        finally:
            self._release()
        return self._wait(self._router.call(begin), deadline, what).result()

    def _wait(self, future: Future[T], deadline: float, what: str) -> Future[T]:
        """Run the router until a future is done or the deadline has passed; return the future."""
        while not future.done():
            self._turn(deadline, what, future)
        return future

    def _turn(self, deadline: float, what: str, future: Future[T] | None = None) -> None:
        """Run the router once, see `_turn_once`, or raise DeadlineError (on `clock`), ShutdownError if it is closed."""
        self._require_another_thread()
        remaining = deadline - self._clock()
        if remaining <= 0:
            why = f": {self.pusher.broken}" if self.pusher.broken else ""
            raise DeadlineError(f"{self._name}: waited {self._timeout:g} s in vain for {what}{why}")
        if self._closed:
            self._wait_while_closing()
            raise ShutdownError(f"{self._name}: it is shut down")
        self._turn_once(min(remaining, _TURN_SECONDS), future)

    def _turn_once(self, seconds: float, future: Future[Any] | None = None) -> None:
        """Run the router once, or wait while another thread does.

        This takes at most `seconds`, and ends early when something happens or `future` is done.
        """
        try:
            if self._acquire(seconds, future) and not self._closed:
                if self._reach.usable():
                    self._router.turn(0.0 if self.pusher.broken else seconds)
                    if self.pusher.broken and seconds and self._reach.mend(seconds):
                        self._leave_client()
                else:
                    self._close("what this parameter server is reached through is shut down")
        except BaseException:
            if self.turning_here:  # Ctrl-C, most likely: the roles' state is unknown
                self._close("the connection broke off: what was in flight may be committed or not")
            raise
        finally:
            self._release()

    def _leave_client(self) -> None:
        """Fail the requests about state, which were asked of servers before their successors."""
        if self._client is not None:
            self._client.lost(COORDINATOR, "a server has died")
            self._client = None

    def _acquire(self, timeout: float, future: Future[Any] | None = None) -> bool:
        """Become the thread that runs the router; False if another is for `timeout` seconds, or `future` is done."""
        with self._changed:
            done = future is not None and future.done()
            if self._turner is not None and timeout and not done:
                # until that thread stops, which may have completed the request
                self._changed.wait(timeout)
            if self._turner is not None or (future is not None and future.done()):
                return False
            self._turner = threading.get_ident()
            return True

    def _release(self) -> None:
        """Let other threads run the router, if this thread did."""
        with self._changed:
            if self.turning_here:
                self._turner = None
                self._changed.notify_all()

    def _drive(self) -> None:
        """Run the router while pushes are in flight; the body of the connection's own thread."""
        while not self._closed:
            self._in_flight.wait()
            self._in_flight.clear()
            while self.pusher.pushing and not self._closed:
                self._turn_once(_TURN_SECONDS)
