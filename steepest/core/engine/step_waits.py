"""What waits for a worker's step, and in it: calls between two steps; weights, rows and other workers in the middle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from steepest.core.engine.generators import HeldGenerators
from steepest.core.engine.replicas import WaitsInShare
from steepest.core.engine.spans import RoleSpans, SpanKind
from steepest.core.system import system
from steepest.errors import PeerLostError, ShutdownError


@dataclass(frozen=True)
class BetweenTurns:
    """How a worker has its process' router move bytes during a step, which lies within one turn of the router."""

    pump: Callable[[], None]  # called between pushes, so that bytes move during the backward pass
    # called before a step: other roles of the process finish work that peers wait for, and their messages leave
    finish: Callable[[], None]
    # has a function called as soon as the process has nothing else to do
    when_idle: Callable[[Callable[[], None]], None]
    receive: Callable[[], None]  # another turn within the step, which waits for messages
    # another turn within the step, without waiting; None if steps begin with all of their weights
    poll: Callable[[], None] | None


@contextlib.contextmanager
def apart_from_models() -> Iterator[None]:
    """Run other code within a forward pass, without its autocast, inference mode and torch.func transformations."""
    transforms = torch._C._functorch.maybe_current_level() is not None
    with (
        torch.inference_mode(False),
        torch.autocast("cpu", enabled=False),
        torch._C._DisableFuncTorch() if transforms else contextlib.nullcontext(),
    ):
        yield


class AbandonedError(Exception):
    """A step was given up in its middle; this is raised through the model's code."""


@dataclass(frozen=True)
class StepAhead:
    """A step that began before its weights were here."""

    version: int  # that it is to be computed from; -1 if its lease will say
    # returns whether its weights are here, and its lease if shares are leased
    has_come: Callable[[], bool]
    begin_push: Callable[[], None]  # called then


class PausedError(Exception):
    """A step stops in its middle because calls wait for its end; it is begun again after them."""


class StepWaits:
    """A worker's waits in the middle of a model's step, or of a function between two steps.

    During a wait messages move, and random generators are left as the model had them. If the step is given
    up the wait raises, through the model's code. Used on the router's thread.

    Args:
        between: has the process' router move bytes.
        call_waits: returns whether a call waits for the end of the step.

    Attributes:
        ahead: the step, until its weights are here; None for one that began with them.
        superseded: whether the step is given up: a generation began meanwhile, or the worker stops.
        calling: whether a function between two steps runs, and no step.
        failure: the loss of a server or the coordinator, after which no newer version comes; None before.
        defect: the exception that this process' own code raised, not the model's; None if none.
        seconds: of waiting in the step.
        now: returns the time in seconds.
        spans: records the waits; None to record none.
    """

    def __init__(self, between: BetweenTurns, call_waits: Callable[[], bool]) -> None:
        self._between, self._call_waits = between, call_waits
        self.ahead: StepAhead | None = None
        self.superseded = False
        self.calling = False
        self.failure: PeerLostError | None = None
        self.defect: BaseException | None = None
        self.seconds = 0.0
        self.spans: RoleSpans | None = None
        self.now = system().now

    def begin(self, *, calling: bool) -> None:
        """Begin a step, or functions between two steps."""
        self.calling, self.superseded, self.seconds = calling, False, 0.0

    @property
    def in_share(self) -> WaitsInShare | None:
        """The waits of a share that begins before its weights are here; None if every step begins with all of them."""
        return None if self._between.poll is None else WaitsInShare(self.arrive, self.poll)

    def arrive(self) -> None:
        """Wait, within a step that began before its weights were here, until they are; begin its push then.

        Raises:
            AbandonedError: a new generation has begun, or the sender is lost.
        """
        if (ahead := self.ahead) is not None:
            self.until(ahead.has_come, "the weights were not sent", version=ahead.version)
            self.ahead = None
            ahead.begin_push()

    def poll(self) -> None:
        """Let messages move between two batches of a step that was begun before its weights were here."""
        if self.superseded or self.failure is not None:
            raise AbandonedError("the step was given up between two of its batches")
        assert self._between.poll is not None
        generators = HeldGenerators()
        with self.own_work(), apart_from_models():
            self._between.poll()
        generators.go_on()

    def until(
        self, has_come: Callable[[], bool], why: str, *, pauses: bool = False, version: int = -1
    ) -> None:
        """Receive messages in the middle of a step until what it needs has come, see `WaitUntil`.

        Args:
            has_come: the condition.
            why: names what is awaited, for errors.
            pauses: whether to raise if a call waits for the end of the step.
            version: of the weights that are awaited, for the record; -1 for something else.

        Raises:
            AbandonedError: a new generation has begun, or a server is lost.
            PausedError: a call waits.
            PeerLostError: instead of either between two steps, in a user's function.
        """
        if has_come():
            return
        began, generators = self.now(), HeldGenerators()
        while not has_come():
            if self.superseded or self.failure is not None:
                reason = f"{why}: the job's processes change"
                raise PeerLostError(reason) if self.calling else AbandonedError(reason)
            if pauses and self._call_waits():
                reason = f"{why}: a call waits"
                raise PeerLostError(reason) if self.calling else PausedError(reason)
            with self.own_work(), apart_from_models():
                self._between.receive()
        generators.go_on()
        self.seconds += self.now() - began
        if self.spans is not None:
            self.spans.add(SpanKind.WAIT, began, -1, version)

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """Run this package's code within the model's: its errors become AbandonedError, not errors of the model."""
        try:
            yield
        except AbandonedError:
            raise
        except ShutdownError as error:
            raise AbandonedError("the process is shut down") from error
        except BaseException as error:
            self.defect = error
            raise AbandonedError("the process cannot go on") from error


T = TypeVar("T")


@dataclass
class WaitingCall:
    """A call that waits until the worker has begun a generation and has the weights of a version."""

    generation: int
    version: int
    run: Callable[[], None]  # runs it
    fail: Callable[[Exception], None]  # sets the error of a call that is not run
    # run instead if a step was begun from that version; None if any later version will do
    miss: Callable[[], None] | None = None


class WaitingCalls:
    """The calls of one worker that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._calls: list[WaitingCall] = []

    @property
    def are_exact(self) -> bool:
        """Whether one of them waits for exactly its version."""
        return any(call.miss is not None for call in self._calls)

    def waits_before(self, version: int) -> bool:
        """Return whether one of them waits for exactly this version, or exactly an earlier one."""
        return any(call.miss is not None and call.version <= version for call in self._calls)

    def add(self, call: WaitingCall) -> None:
        """Add a call; one for exactly its version replaces an earlier such call."""
        for earlier in [c for c in self._calls if c.miss is not None and call.miss is not None]:
            self._calls.remove(earlier)
            assert earlier.miss is not None
            earlier.miss()
        self._calls.append(call)

    def take_ready(self, generation: int, version: int, begins: int) -> list[WaitingCall]:
        """Remove and return the calls that wait no longer.

        Args:
            begins: the version from which a step is to begin, or -1.
        """
        if not self._calls:
            return []
        latest = max(version, begins)
        ready = [
            call
            for call in self._calls
            if call.generation <= generation
            and call.version <= (version if call.miss is None else latest)
        ]
        self._calls = [call for call in self._calls if call not in ready]
        return ready

    def has_ready(self, generation: int, version: int) -> bool:
        """Return whether one of them waits only for the end of the present step."""
        return any(c.generation <= generation and c.version <= version for c in self._calls)

    def fail(self, error: Exception, least_version: int = 0) -> None:
        """Remove the calls that wait for this version or a later one, and set their error."""
        failed = [call for call in self._calls if call.version >= least_version]
        self._calls = [call for call in self._calls if call.version < least_version]
        for call in failed:
            call.fail(error)


def into_future(function: Callable[[], T], future: Future[Any]) -> Callable[[], None]:
    """Return a function that calls `function`, and sets a future to its result or exception."""

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            future.set_exception(error)

    return run
