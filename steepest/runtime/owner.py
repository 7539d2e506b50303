"""The one thread of the driver that owns a job: other threads send it requests through one queue."""

from __future__ import annotations

import contextlib
import functools
import queue
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from queue import SimpleQueue
from threading import Thread
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from steepest.core.system import system
from steepest.errors import ShutdownError
from steepest.runtime.answers import Answer
from steepest.runtime.job_runtime import runtime

T = TypeVar("T")
P = ParamSpec("P")
_CALLS_SECONDS = 0.05  # between two looks at the queue while calls of processes are waited for
_CLOSE_SECONDS = 5.0
_GONE = "Ray was shut down, and the processes of this trainer with it: make another trainer"


class Moment(IntEnum):
    """When the owner may run a request; greater moments are rarer."""

    ANY = 0  # at each of its waits, also during a change of the job's processes
    WHOLE = 1  # while no change is made, also during another request
    FREE = 2  # when nothing else runs


class GivenUp(BaseException):
    """Ends a request whose caller does not wait any more."""


@dataclass
class Request:
    """A function that the owner is asked to run."""

    function: Callable[[], Any]
    moment: Moment
    when: Callable[[], bool] | None = None  # runs it not before this returns True
    future: Answer[Any] = field(default_factory=lambda: Answer())
    given_up: bool = False  # the caller has stopped waiting

    def run(self) -> None:
        """Run the function, unless the caller has stopped waiting, and set the future."""
        try:
            if self.given_up:
                raise GivenUp
            result = self.function()
        except (Exception, GivenUp) as error:  # noqa: BLE001 - raised on the thread that has asked
            self.fail(error)
        except BaseException as error:
            self.fail(error)
            raise
        else:
            self.future.set_result(result)  # of no effect where the job has ended meanwhile
        finally:
            self.function = lambda: None  # which may hold what the caller wants to be collected

    def fail(self, error: BaseException) -> None:
        """Set an error as the future's result, unless the future is done."""
        self.future.set_exception(error)


class Owner:
    """Runs everything that reads or changes a job's processes on one thread, in the order of one queue.

    Until `start` the constructing thread is the owner; after `end`, the thread that ends the job.

    Attributes:
        look: called when there is no other work; returns the seconds until it should be called again.
            It must handle its own exceptions.
    """

    def __init__(self) -> None:
        self.look: Callable[[], float] = lambda: 1.0
        self._queue: SimpleQueue[Request | None] = system().queue()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._level = Moment.FREE  # the rarest moment of requests that may run at the present wait
        self._shielded = True  # whether the present request goes on if no caller waits for it
        self._kept = False  # whether it also goes on in blocks of `for_caller`
        self._thread: Thread | None = None
        self._ended = system().event()
        self._waking: weakref.WeakSet[Future[Any]] = (
            weakref.WeakSet()
        )  # end a wait when they are done
        self._why = "this trainer is shut down: make another one"

    def start(self) -> None:
        """Begin to own the job, in place of the constructing thread."""
        self._thread = system().start(self._run, "steepest owner")

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread owns the job."""
        return self._thread in (None, system().current()) or self._ended.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the owner has ended."""
        return self._ended.is_set()

    # -- asking ----------------------------------------------------------------------------------

    def submit(
        self,
        function: Callable[[], T],
        moment: Moment,
        when: Callable[[], bool] | None = None,
    ) -> Request:
        """Have a function run by the owner; return the request, which has a future, without waiting.

        On the owner's own thread it runs at once.
        """
        request = Request(function, moment, when)
        if self.is_mine:
            request.run()
            return request
        self._queue.put(request)
        if self._ended.is_set():
            self._refuse()
        return request

    def call(
        self,
        function: Callable[[], T],
        moment: Moment = Moment.FREE,
        when: Callable[[], bool] | None = None,
    ) -> T:
        """Have the owner run a function, and return its result or raise its exception.

        An exception during the wait, such as Ctrl-C's, ends the wait. A function that has begun goes
        on, except in blocks of `for_caller`.

        Raises:
            ShutdownError: the owner has ended.
        """
        if self.is_mine:
            return function()
        request = self.submit(function, moment, when)
        try:
            result: T = request.future.result()
        except BaseException:
            request.given_up = True
            self.wake()
            raise
        return result

    def wake(self) -> None:
        """End the owner's present wait, so that it looks again; any thread may call it."""
        self._queue.put(None)

    # -- the owner's own ---------------------------------------------------------------------------

    def _run(self) -> None:
        """Run requests, and look after the job in between; runs on the owner's thread."""
        while not self._ended.is_set():
            if not runtime().is_up:
                self._give_up(_GONE)
                return
            try:
                self._level = Moment.WHOLE
                pause = self.look()
                self._level = Moment.FREE
                self.attend(pause)
            except ShutdownError:
                return
            except BaseException as error:  # a defect of ours: told, and not hidden by a hang
                self._give_up(f"the thread that owns the job has failed: {error!r}")
                raise

    def attend(
        self,
        seconds: float,
        until: Callable[[], bool] | None = None,
        *,
        calls: Collection[Any] | None = None,
        number: int | None = None,
    ) -> bool:
        """Wait, and run requests meanwhile; return whether the condition holds, or the calls have ended.

        It is the only wait of the owner's thread.

        Args:
            seconds: the most that it waits.
            until: the condition, tested after each event. None, and no calls, to return after one
                event.
            calls: of processes, or futures of other threads.
            number: of these calls that have to end; None for all.

        Raises:
            ShutdownError: the job has ended.
            GivenUp: no caller waits for the present request, see `for_caller`.
        """
        assert self.is_mine, "only the owner's thread waits here"
        deadline = system().now() + seconds
        if calls is not None:
            number = len(calls) if number is None else min(number, len(calls))
            futures = [call for call in calls if isinstance(call, Future)]
            if len(futures) < len(calls):
                return self._attend_calls(calls, deadline, number)
            if (until := self._enough(futures, number))():
                return True
        while True:
            self._check()
            served = self._serve()
            if until is not None and until():
                return True
            left = deadline - system().now()
            if left <= 0 or (until is None and served):
                return until is None and served
            try:
                request = self._queue.get(timeout=left)
            except queue.Empty:
                continue
            if request is not None:
                self._keep(request)
            elif until is None:
                self._check()
                return True

    def _attend_calls(self, calls: Collection[Any], deadline: float, number: int) -> bool:
        """Wait for calls of processes, see `attend`: poll the runtime and the queue in turn."""
        while True:
            left = max(deadline - system().now(), 0.0)
            if len(runtime().wait(calls, min(left, _CALLS_SECONDS), number)) >= number:
                return True
            if left <= 0:
                return False
            self._check()
            self._serve()

    def _enough(self, futures: Collection[Future[Any]], number: int) -> Callable[[], bool]:
        """Return a function that tells whether `number` futures are done; each wakes the owner when it is."""
        for future in futures:
            if future not in self._waking:
                self._waking.add(future)
                future.add_done_callback(lambda _: self.wake())
        return lambda: sum(future.done() for future in futures) >= number

    @contextlib.contextmanager
    def amid_change(self) -> Iterator[None]:
        """Run no request that needs the job whole in a block; complete the block even if no caller waits."""
        before, self._level = self._level, Moment.ANY
        try:
            with self.to_its_end():
                yield
        finally:
            self._level = before

    @contextlib.contextmanager
    def to_its_end(self) -> Iterator[None]:
        """Complete a block even if no caller waits, also parts of it that are `for_caller`."""
        before = self._shielded, self._kept
        self._shielded = True
        self._kept = True
        try:
            yield
        finally:
            self._shielded, self._kept = before

    @contextlib.contextmanager
    def for_caller(self) -> Iterator[None]:
        """Give up a block, at one of its waits, if its caller has stopped waiting."""
        before, self._shielded = self._shielded, self._kept
        try:
            yield
        finally:
            self._shielded = before

    def _serve(self) -> bool:
        """Run the requests that may run now; return whether one did, or a wait was ended."""
        served = False
        for arrived in self._arrived():
            served = True
            if arrived is not None:
                self._keep(arrived)
        while (request := self._next()) is not None:
            served = True
            before = self._level, self._shielded, self._kept
            self._level = Moment(max(request.moment - 1, Moment.ANY))
            self._shielded, self._kept = True, False
            self._running.append(request)
            try:
                request.run()
            finally:
                self._running.remove(request)
                self._level, self._shielded, self._kept = before
            self._check()
        return served

    def _arrived(self) -> Iterator[Request | None]:
        """Yield the requests that have arrived, without waiting."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._queue.get_nowait()

    def _keep(self, request: Request) -> None:
        """Keep a request waiting; fail it if another thread has ended the owner since it left the queue."""
        self._waiting.append(request)
        if self._ended.is_set():
            request.fail(ShutdownError(self._why))

    def _next(self) -> Request | None:
        """Take the first request that may run now; None if there is none."""
        waiting = self._waiting  # an end puts another list there
        for request in waiting:
            if request.moment <= self._level and (request.when is None or request.when()):
                waiting.remove(request)
                return request
        return None

    def _check(self) -> None:
        self.raise_ended()
        if not self._shielded and self._running and self._running[-1].given_up:
            raise GivenUp

    # -- ending ------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the owner, also in the middle of a request; waiting and later requests raise `ShutdownError`."""
        self._give_up(self._why)
        thread = self._thread
        if thread is not None and thread is not system().current():
            thread.join(_CLOSE_SECONDS)

    def _give_up(self, why: str) -> None:
        if not self._ended.is_set():
            self._why = why
            self._ended.set()
            self.look = lambda: 1.0  # there is no job to look after any more
        self.wake()
        self._refuse()

    def _refuse(self) -> None:
        """Fail the requests that wait."""
        waiting, self._waiting = self._waiting, []
        waiting += [request for request in self._arrived() if request is not None]
        for request in waiting:
            request.fail(ShutdownError(self._why))
        self._queue.put(None)  # for the owner's thread, which may be about to wait

    def raise_ended(self) -> None:
        """Raise ShutdownError if the owner has ended."""
        if self._ended.is_set():
            raise ShutdownError(self._why)


class Owned(Protocol):
    """Has an owner."""

    @property
    def owner(self) -> Owner:
        """Of its state."""


S = TypeVar("S", bound=Owned)


def owned(
    moment: Moment,
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """Run a method on the owner's thread; callers on other threads wait for it."""

    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def run(self: S, *arguments: P.args, **named: P.kwargs) -> T:
            if self.owner.is_mine:
                return method(self, *arguments, **named)
            return self.owner.call(lambda: method(self, *arguments, **named), moment)

        return cast("Callable[Concatenate[S, P], T]", run)

    return decorate
