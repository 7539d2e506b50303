"""The messages by which the coordinator and workers agree on members, generations and steps."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Annotated, Any

from steepest.messages.fields import (
    COUNT,
    FLAG,
    PUSHES,
    PUTS,
    RATES,
    TEXT,
    WORKER,
    RateChanges,
    many,
)
from steepest.messages.gradients import Decision
from steepest.messages.message import Kind, PushId
from steepest.messages.schema import Body, Generation, Header, Incarnation, Version, body


@body(Kind.JOIN)
@dataclass(frozen=True)
class Join(Body):
    """A worker asks to become a member.

    A worker sends it to the coordinator when its process has started and its channels are open.

    Attributes:
        incarnation: number of lives of this worker before this one.
    """

    incarnation: Incarnation


@body(Kind.MEMBERS)
@dataclass(frozen=True)
class Members(Decision):
    """A generation begins; pushes of earlier generations are void.

    The coordinator sends it to every server and every worker that has joined: when all have joined,
    when a member is lost, when a step is given up or steps are taken back, and when a state is
    installed. A worker that joins a generation later is sent it alone.

    Attributes:
        workers: indices of the members, ascending.
        reload: whether servers send all weights to all members.
        install: (role, index, request number) of the clients whose states the servers install
            before they send weights.
        again: whether a worker that has computed a gradient from the same version and share pushes
            that again, instead of computing it anew.
    """

    workers: Annotated[Row[int], many(WORKER)]
    reload: Annotated[bool, FLAG]
    install: Annotated[Row[Row[Any]], PUTS] = ()
    again: Annotated[bool, FLAG] = False


@body(Kind.WORKER_JOINED)
@dataclass(frozen=True)
class WorkerJoined(Decision):
    """A worker becomes a member of the generation that has begun already.

    The coordinator sends it to every server, under a rule that commits pushes one by one; servers
    send the worker all weights.

    Attributes:
        worker: index of the worker.
    """

    worker: Annotated[int, WORKER]


@body(Kind.WORKER_ENDED)
@dataclass(frozen=True)
class WorkerEnded(Decision):
    """One life of a worker is over, and the other members continue.

    The coordinator sends it to every server, under a rule that commits pushes one by one, when the
    worker's channel closes or the driver gives the worker up.

    Attributes:
        worker: index of the worker.
        life: incarnation that is over; pushes of it, and of earlier ones, are refused from now on.
        pushes: its pushes that have not arrived at all servers, which are void.
    """

    worker: Annotated[int, WORKER]
    life: Annotated[int, COUNT]
    pushes: Annotated[tuple[PushId, ...], PUSHES]


@body(Kind.GRANT)
@dataclass(frozen=True)
class Grant(Body):
    """Steps may be taken up to a version.

    The coordinator sends it to every member when the driver asks for steps and when a generation
    continues, under a rule by which every member contributes to every version.

    Attributes:
        limit: the version that the last of these steps makes.
        stats: whether reports are to have loss, metrics and timings.
        rates: see `Ask`.
    """

    generation: Generation
    limit: Annotated[int, Header("version")]
    stats: Annotated[bool, FLAG] = True
    rates: Annotated[RateChanges, RATES] = ()


@body(Kind.LEASE)
@dataclass(frozen=True)
class Lease(Body):
    """A share of the samples is leased to a worker, which computes one push from it.

    The coordinator sends it to an idle worker, under a rule that commits pushes one by one.

    Attributes:
        version: of the weights from which the worker computes; it waits for them if it holds older
            ones.
        share: number of the share, counted over all epochs.
        stats: as in `Grant`.
        committed: sequence number of the last push of the worker that is part of the weights; 0 for
            none.
    """

    generation: Generation
    version: Version
    share: Annotated[int, COUNT]
    stats: Annotated[bool, FLAG] = True
    committed: Annotated[int, COUNT] = 0


@body(Kind.FAILED)
@dataclass(frozen=True)
class Failed(Body):
    """Computing a gradient, or applying an update, raised an exception of the user's code.

    A worker sends it to the coordinator when the model or its data raised, a server when the
    optimizer raised, once.

    Attributes:
        generation: of the sender.
        incarnation: of the worker; 0 from a server.
        version: of the weights from which the gradient was being computed; from a server, that
            which the update was to make.
        error, traceback, kind: of the exception, see `steepest.errors.describe_error`.
    """

    generation: Generation
    incarnation: Incarnation
    version: Version
    error: Annotated[str, TEXT]
    traceback: Annotated[str, TEXT]
    kind: Annotated[str, TEXT] = ""
