"""Scripted faults: which process they strike in which of its steps, and the clocks of workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from steepest.core.engine.job import ModelCreator
from steepest.core.engine.replicas import drop
from steepest.core.messages.message import Kind, Peer
from steepest.core.models.protocol import Computed, Model
from steepest.errors import ConfigurationError

#: A moment in a step. Of a worker: "forward", as the forward pass begins; "backward", as the first
#: gradient is written; "push", as the last gradient is written, when the chunks without it have
#: left; "report", when all chunks have left and the REPORT has not; "pull", as new weights come. Of
#: a server: "push", as a gradient comes; "apply", when half of its chunks are updated; "pull", as
#: weights leave.
Moment = Literal["forward", "backward", "push", "report", "pull", "apply"]

#: The moments in which a model's own code runs.
COMPUTING: tuple[Moment, ...] = ("forward", "backward", "push", "report")
_OF_SERVERS: tuple[Moment, ...] = ("push", "apply", "pull")
#: The faults that strike messages.
OF_MESSAGES = ("drop", "duplicate", "delay")


@dataclass(frozen=True)
class Fault:
    """A fault in one step of one process; made by the class methods, given in any order.

    Steps are the process' own: a worker counts the gradients that it begins to compute, from 0 in
    each life, those of steps that are taken again included (a share without samples is none); a
    server, and the coordinator, the versions that it has committed. So a fault of a worker happens
    once in a life, and needs no clock. "apply" of a server's step s makes version s + 1.

    Attributes:
        what: the kind of fault.
        role, index: of the process: "worker", "server", or "coordinator" for its messages. The
            fault strikes all roles of the process: the coordinator is in that of server 0, and
            under ``"allreduce"`` servers are in workers'.
        step: of the process.
        at: the moment in the step; servers have "push" (as a gradient comes), "apply" (when half of
            the chunks are updated) and "pull" (as weights leave for workers).
        life: number of lives before the one that it strikes, 0 by default, which spares successors;
            None for every life.
        peer: the other end of a cut or of messages, as ``("server", 0)``; None for all.
        kind: of the messages; None for all kinds.
        count: greatest number of messages that it strikes.
        rounds: number of `Network.rounds` that it lasts.
        factor: how many times as long everything takes in a slow process.
        steps: number of steps that slowness lasts.

    Raises:
        ConfigurationError: there is no such process, step, moment or duration.

    Example:
        >>> from steepest.testing import Fault, InProcessCluster, linear_model_creator
        >>> faults = [Fault.raises("worker", 1, step=2), Fault.duplicate("worker", 0, step=1)]
        >>> cluster = InProcessCluster(linear_model_creator(), num_workers=2, faults=faults)
        >>> [type(outcome).__name__ for outcome in cluster.step(5)]
        ['Result', 'Result', 'Failure']
        >>> cluster.step(3)[-1].version, cluster.unmet
        (5, [])
    """

    what: Literal["raise", "kill", "hang", "slow", "cut", "drop", "duplicate", "delay"]
    role: str
    index: int
    step: int
    at: Moment = "forward"
    life: int | None = 0
    peer: tuple[str, int] | None = None
    kind: Kind | None = None
    count: float = 1
    rounds: float = math.inf
    factor: float = 1.0
    steps: float = math.inf

    def __post_init__(self) -> None:
        messages, server = self.what in OF_MESSAGES, self.role == "server"
        roles: tuple[str, ...] = (
            ("worker", "server", "coordinator") if messages else ("worker", "server")
        )
        moments: tuple[Moment, ...] = _OF_SERVERS if server else (*COMPUTING, "pull")
        if self.what == "raise":
            roles, moments = ("worker",), COMPUTING
        for name, value, allowed, right in (
            ("role", self.role, f"one of {', '.join(roles)}", self.role in roles),
            ("index", self.index, "0 or more", self.index >= 0),
            ("step", self.step, "0 or more", self.step >= 0),
            ("life", self.life, "0 or more, or None", self.life is None or self.life >= 0),
            (
                "at",
                self.at,
                f"one of {', '.join(moments)}",
                messages or self.what == "slow" or self.at in moments,
            ),
            ("count", self.count, "1 or more", self.count >= 1),
            ("rounds", self.rounds, "1 or more", self.rounds >= 1),
            ("factor", self.factor, "1 or more, and finite", 1 <= self.factor < math.inf),
            ("steps", self.steps, "1 or more", self.steps >= 1),
        ):
            if not right:
                raise ConfigurationError(
                    f"{name}={value!r} of a fault {self.what!r}: give {allowed}"
                )

    @classmethod
    def raises(
        cls, role: str, index: int, *, step: int, at: Moment = "forward", life: int | None = 0
    ) -> Fault:
        """Return a fault in which the model raises a RuntimeError.

        The arguments of this and the following methods are the attributes of `Fault`.
        """
        return cls("raise", role, index, step, at, life)

    @classmethod
    def kill(
        cls, role: str, index: int, *, step: int, at: Moment | None = None, life: int | None = 0
    ) -> Fault:
        """Return a fault in which the process dies: its channels close; what it has sent arrives.

        In a real process: SIGKILL. By default at "forward" of a worker, at "push" of a server.
        """
        return cls("kill", role, index, step, at or _first(role), life)

    @classmethod
    def hang(
        cls,
        role: str,
        index: int,
        *,
        step: int,
        at: Moment | None = None,
        rounds: float = math.inf,
        life: int | None = 0,
    ) -> Fault:
        """Return a fault in which the process stands still, with its channels open.

        It lasts `rounds` rounds, or until `InProcessCluster.heal`. In a real process: SIGSTOP,
        until another process sends it SIGCONT or SIGKILL. A worker that stops as its forward pass
        begins gets the weights that are on their way first.
        """
        return cls("hang", role, index, step, at or _first(role), life, rounds=rounds)

    @classmethod
    def slow(
        cls,
        role: str,
        index: int,
        *,
        step: int,
        factor: float,
        steps: float = math.inf,
        life: int | None = 0,
    ) -> Fault:
        """Return a fault in which the process takes `factor` times as long, for `steps` steps.

        In one thread it takes its turn in one of `factor` rounds; a real worker sleeps in proportion
        to what it computes.
        """
        return cls("slow", role, index, step, life=life, factor=factor, steps=steps)

    @classmethod
    def cut(
        cls,
        role: str,
        index: int,
        peer: tuple[str, int] | None = None,
        *,
        step: int,
        at: Moment | None = None,
        rounds: float = math.inf,
        life: int | None = 0,
    ) -> Fault:
        """Return a fault in which nothing passes between the process and that of `peer`.

        It lasts `rounds` rounds, or until `heal`. As with TCP nothing is lost or reordered:
        messages wait, in both directions. They are lost with the channel, when that is closed.
        Neither end is told of the cut.
        """
        return cls("cut", role, index, step, at or _first(role), life, peer, rounds=rounds)

    @classmethod
    def drop(
        cls,
        role: str,
        index: int,
        *,
        step: int,
        kind: Kind | None = None,
        peer: tuple[str, int] | None = None,
        life: int | None = 0,
    ) -> Fault:
        """Return a fault that loses a message of the role, and all that follow it in its channel.

        A channel delivers everything in order or closes, and the protocol relies on that: a message
        lost by itself cannot happen, and nothing is promised for it. This can: a host that vanishes
        has sent a part, and no process is told. What the other end sends still arrives. It is over
        when the process is killed and replaced.
        """
        return cls("drop", role, index, step, life=life, kind=kind, peer=peer)

    @classmethod
    def duplicate(
        cls,
        role: str,
        index: int,
        *,
        step: int,
        kind: Kind | None = None,
        peer: tuple[str, int] | None = None,
        count: float = math.inf,
        life: int | None = 0,
    ) -> Fault:
        """Return a fault in which messages that the role sends in that step come twice in a row.

        No channel does that either; but senders that try again would, and every push counts once
        all the same.
        """
        return cls("duplicate", role, index, step, life=life, kind=kind, peer=peer, count=count)

    @classmethod
    def delay(
        cls,
        role: str,
        index: int,
        *,
        step: int,
        rounds: float,
        kind: Kind | None = None,
        peer: tuple[str, int] | None = None,
        count: float = math.inf,
        life: int | None = 0,
    ) -> Fault:
        """Return a fault in which messages that the role sends in that step take `rounds` rounds.

        Those behind them in the channel wait.
        """
        return cls(
            "delay", role, index, step, life=life, kind=kind, peer=peer, count=count, rounds=rounds
        )

    def concerns(self, process: Peer, life: int, step: int) -> bool:
        """Return whether the fault is to happen in that step of that life of a process."""
        return (
            process == (self.role, self.index) and self.life in (None, life) and self.step == step
        )

    def slows(self, process: Peer, life: int, step: int) -> bool:
        """Return whether the fault makes that step slow."""
        own = (
            self.what == "slow" and process == (self.role, self.index) and self.life in (None, life)
        )
        return own and self.step <= step < self.step + self.steps

    def __str__(self) -> str:
        return f"{self.what} of {self.role} {self.index} in step {self.step}"


def _first(role: str) -> Moment:
    return "push" if role == "server" else "forward"


#: Called with a worker's step and the moment in it.
Reached = Callable[[int, Moment], None]


class Clock:
    """A count of the steps of one life of a worker, by the gradients that it begins to compute."""

    # Its last replica reports the moments of a step to `reached`; batches: that each replica computes for a step.

    def __init__(self, batches: int, reached: Reached) -> None:
        self.step = -1  # that was begun last, or -1
        self.computing = False  # whether that step is being computed
        self.factor = 1.0  # how many times as long computing takes
        self._batches = batches
        self._reached = reached
        self._begun = 0
        self._last: Model | None = None
        self._mark = 0.0

    def watch(self, model: Model) -> None:
        """Count the gradients of a model; the last one that is watched, of the last device, reports its moments."""
        compute = model.compute_gradients
        self._last = model

        def watched(batch: Any, ready: Any, metrics: bool) -> Computed:
            if model is not self._last or ready is drop:  # which a warm-up gives
                return compute(batch, ready, metrics)
            self.step, batch_number = divmod(self._begun, self._batches)
            self._begun += 1
            self.computing = True
            try:
                if batch_number + 1 < self._batches:
                    return compute(batch, ready, metrics)
                return self._compute_reporting(model, compute, batch, ready, metrics)
            except BaseException:
                self._begun = (self.step + 1) * self._batches  # the step is over
                raise
            finally:
                self.computing = False

        model.compute_gradients = watched  # type: ignore[method-assign]

    def _compute_reporting(
        self,
        model: Model,
        compute: Callable[..., Computed],
        batch: Any,
        ready: Any,
        metrics: bool,
    ) -> Computed:
        """Compute a gradient, and report the moments of the step meanwhile."""
        missing = {index for index, entry in enumerate(model.layout.entries) if entry.trainable}
        everything = len(missing)

        def reported(entry: int, *arguments: Any) -> None:
            self._stretch()
            if len(missing) == everything:
                self._reached(self.step, "backward")
            if missing == {entry}:
                self._reached(self.step, "push")
            missing.discard(entry)
            ready(entry, *arguments)
            self._mark = time.perf_counter()

        self._reached(self.step, "forward")
        self._mark = time.perf_counter()
        computed = compute(batch, reported, metrics)
        self._stretch()
        self._reached(self.step, "report")
        return computed

    def _stretch(self) -> None:
        """Sleep, so that what was computed since the mark has taken `factor` times as long."""
        if self.factor > 1:
            time.sleep((self.factor - 1) * (time.perf_counter() - self._mark))


class WatchedCreator:
    """A model creator whose models are watched by a clock; each life of a worker has its own, kept in `clocks`."""

    # make_clock: makes a worker's, given its index; attend: of its models, see `steepest.core.engine.job.Description`.

    def __init__(
        self,
        creator: ModelCreator,
        make_clock: Callable[[int], Clock],
        attend: Callable[..., None] | None = None,
    ) -> None:
        self._creator = creator
        self._make_clock = make_clock
        self._attend = attend
        self.clocks: dict[int, Clock] = {}

    def __call__(self, worker: int, device: int) -> Model:
        """Return a model that is watched."""
        model = self._creator(worker, device)
        if device == 0:
            self.clocks[worker] = self._make_clock(worker)
        if isinstance(model, Model):  # otherwise the caller raises
            self.clocks[worker].watch(model)
            if self._attend is not None:
                model.attend = self._attend
        return model
