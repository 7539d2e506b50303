"""The one thread of the driver that owns a job: everything else talks to it through one queue."""

from __future__ import annotations

import contextlib
import functools
import queue
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from steepest.core.system import Queue, Thread, system
from steepest.errors import ShutdownError
from steepest.runtime.answers import Answer
from steepest.runtime.job_runtime import runtime

T = TypeVar("T")
P = ParamSpec("P")
_CALLS_SECONDS = 0.05  # between two looks at the queue while calls of processes are waited for
_CLOSE_SECONDS = 5.0
_GONE = "Ray was shut down, and the processes of this trainer with it: make another trainer"


class Moment(IntEnum):
    """When the owner may run what it is asked for; a greater one is rarer."""

    ANY = 0  # at each of its waits, also amid a change of the job's processes
    WHOLE = 1  # while no change is made, also amid another request
    FREE = 2  # when nothing else runs


class GivenUp(BaseException):
    """Ends what the owner does for a caller that waits no more."""


@dataclass
class Request:
    """What the owner is asked to run."""

    function: Callable[[], Any]
    moment: Moment
    when: Callable[[], bool] | None = None  # runs it not before this returns True
    future: Answer[Any] = field(default_factory=lambda: Answer())
    given_up: bool = False  # the caller has stopped waiting

    def run(self) -> None:
        """Run the function, unless the caller waits no more, and set the future."""
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
        """Set an error as the future's, unless it is done."""
        self.future.set_exception(error)


class Owner:
    """Runs everything that reads or changes a job's processes on one thread, in the order of one queue.

    Until `start` the constructing thread is the owner; after the end, whichever thread ends the job.

    Attributes:
        look: called when nothing else is to be done, and returns for how many seconds nothing is;
            what it raises is for `look` itself to keep.
    """

    def __init__(self) -> None:
        self.look: Callable[[], float] = lambda: 1.0
        self._queue: Queue[Request | None] = system().queue()
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._level = Moment.FREE  # the rarest moment of what may run at the present wait
        self._shielded = True  # whether what runs goes on when nobody waits for it
        self._kept = False  # whether it does in blocks of `for_caller` too
        self._thread: Thread | None = None
        self._ended = system().event()
        self._waking: weakref.WeakSet[Future[Any]] = (
            weakref.WeakSet()
        )  # end a wait when they are done
        self._why = "this trainer is shut down: make another one"

    def start(self) -> None:
        """Begin to own the job: the thread that has started it does so no more."""
        self._thread = system().start(self._run, "steepest owner")

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread owns the job."""
        return self._thread in (None, system().current()) or self._ended.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether nobody owns the job any more."""
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
        """Return what a function returns that the owner runs; raise what it raises.

        An exception in the wait, such as Ctrl-C's, ends the wait. What has begun goes on, but for
        blocks of `for_caller`.

        Raises:
            ShutdownError: nobody owns the job any more.
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
        """Run what is asked for, and look after the job between; runs on the owner's thread."""
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
        """Wait: run what may be run meanwhile; return whether what is waited for is there.

        It is the only wait of the owner's thread.

        Args:
            seconds: for which it waits at most.
            until: returns whether what is waited for is there; asked after each event. None, and no
                calls, to return after one event.
            calls: of processes, or futures of other threads, that are waited for.
            number: of these calls that have to end; None for all.

        Raises:
            ShutdownError: the job has ended.
            GivenUp: nobody waits for the result of what runs, see `for_caller`.
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
        """Wait for calls of processes, see `attend`: the runtime is asked, and the queue looked at between."""
        while True:
            left = max(deadline - system().now(), 0.0)
            if len(runtime().wait(calls, min(left, _CALLS_SECONDS), number)) >= number:
                return True
            if left <= 0:
                return False
            self._check()
            self._serve()

    def _enough(self, futures: Collection[Future[Any]], number: int) -> Callable[[], bool]:
        """Return what tells whether so many futures are done, each of which wakes the owner when it is."""
        for future in futures:
            if future not in self._waking:
                self._waking.add(future)
                future.add_done_callback(lambda _: self.wake())
        return lambda: sum(future.done() for future in futures) >= number

    @contextlib.contextmanager
    def amid_change(self) -> Iterator[None]:
        """Run nothing in a block that needs the job whole; the block ends whoever waits for it."""
        before, self._level = self._level, Moment.ANY
        try:
            with self.to_its_end():
                yield
        finally:
            self._level = before

    @contextlib.contextmanager
    def to_its_end(self) -> Iterator[None]:
        """Bring a block to its end whoever waits for it, and what is `for_caller` in it too."""
        before = self._shielded, self._kept
        self._shielded = self._kept = True
        try:
            yield
        finally:
            self._shielded, self._kept = before

    @contextlib.contextmanager
    def for_caller(self) -> Iterator[None]:
        """Give a block up, at one of its waits, when whoever has asked for it waits no more."""
        before, self._shielded = self._shielded, self._kept
        try:
            yield
        finally:
            self._shielded = before

    def _serve(self) -> bool:
        """Run what has been asked for and may run now; return whether anything did, or a wait was ended."""
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
        """Yield what has arrived, without waiting."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._queue.get_nowait()

    def _keep(self, request: Request) -> None:
        """Have a request wait; fail it where another thread has ended the owner since it left the queue."""
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
        """End the owner, whatever it does; requests that wait, and later ones, raise `ShutdownError`."""
        self._give_up(self._why)
        thread = self._thread
        if thread is not None and thread is not system().current():
            thread.join(_CLOSE_SECONDS)

    def _give_up(self, why: str) -> None:
        if not self._ended.is_set():
            self._why = why
            self._ended.set()
            self.look = lambda: 1.0  # the job itself is nobody's any more
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
        """Raise ShutdownError, if nobody owns the job any more."""
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
    """Have a method run on the owner's thread, whoever calls it; the caller waits for it."""

    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def run(self: S, *arguments: P.args, **named: P.kwargs) -> T:
            if self.owner.is_mine:
                return method(self, *arguments, **named)
            return self.owner.call(lambda: method(self, *arguments, **named), moment)

        return cast("Callable[Concatenate[S, P], T]", run)

    return decorate
