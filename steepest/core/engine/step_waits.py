"""Waiting in the middle of a step: for its weights, rows of tables, and what other workers' models send."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
class Ahead:
    """A step that began before its weights were here."""

    version: int  # that it is to be computed from; -1 if its lease will say
    has_come: Callable[
        [], bool
    ]  # returns whether its weights are here, and its lease if shares are leased
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
        spans: records the waits; None to record none.
    """

    def __init__(self, between: BetweenTurns, call_waits: Callable[[], bool]) -> None:
        self._between, self._call_waits = between, call_waits
        self.ahead: Ahead | None = None
        self.superseded = False
        self.calling = False
        self.failure: PeerLostError | None = None
        self.defect: BaseException | None = None
        self.seconds = 0.0
        self.spans: RoleSpans | None = None
        self._now = system().now

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
        began, generators = self._now(), HeldGenerators()
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
        self.seconds += self._now() - began
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
