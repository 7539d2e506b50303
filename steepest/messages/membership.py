"""The messages between the coordinator and those who train: who is a member, and who may take which step."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Annotated, Any

from steepest.messages.fields import COUNT, FLAG, PUSHES, PUTS, TEXT, WORKER, many
from steepest.messages.gradients import Decision
from steepest.messages.message import Kind, PushId
from steepest.messages.schema import Body, Generation, Header, Incarnation, Version, body


@body(Kind.JOIN)
@dataclass(frozen=True)
class Join(Body):
    """A worker is ready to be a member; to the coordinator, when its process has started."""

    incarnation: Incarnation


@body(Kind.MEMBERS)
@dataclass(frozen=True)
class Members(Decision):
    """A generation begins; from the coordinator to every server and worker. Pushes of earlier ones are void.

    Attributes:
        workers: indices of the members.
        reload: whether servers send all weights to all members.
        install: (role, index, request) of the clients whose states the servers install first.
        again: whether gradients that were computed from the same weights before are still good.
    """

    workers: Annotated[Row[int], many(WORKER)]
    reload: Annotated[bool, FLAG]
    install: Annotated[Row[Row[Any]], PUTS] = ()
    again: Annotated[bool, FLAG] = False


@body(Kind.WORKER_JOINED)
@dataclass(frozen=True)
class WorkerJoined(Decision):
    """A worker joins the generation that there is; from the coordinator to every server, which sends it all weights."""

    worker: Annotated[int, WORKER]


@body(Kind.WORKER_ENDED)
@dataclass(frozen=True)
class WorkerEnded(Decision):
    """A life of a worker is over, and the others go on; from the coordinator to every server.

    Attributes:
        life: its incarnation; what it and earlier ones push from now on is refused.
        pushes: of it that are not complete everywhere, and void.
    """

    worker: Annotated[int, WORKER]
    life: Annotated[int, COUNT]
    pushes: Annotated[tuple[PushId, ...], PUSHES]


@body(Kind.GRANT)
@dataclass(frozen=True)
class Grant(Body):
    """Steps may be taken; from the coordinator to every worker, where every member contributes to every version.

    Attributes:
        limit: the version that the last of them makes.
        stats: whether reports are to have loss, metrics and timings.
    """

    generation: Generation
    limit: Annotated[int, Header("version")]
    stats: Annotated[bool, FLAG] = True


@body(Kind.LEASE)
@dataclass(frozen=True)
class Lease(Body):
    """A share of the samples is a worker's to compute; from the coordinator, where workers take what is next.

    Attributes:
        version: of the weights that it needs at least.
        share: number of the share.
        stats: as in `Grant`.
        committed: sequence number of the last of its pushes that was committed; 0 for none.
    """

    generation: Generation
    version: Version
    share: Annotated[int, COUNT]
    stats: Annotated[bool, FLAG] = True
    committed: Annotated[int, COUNT] = 0


@body(Kind.FAILED)
@dataclass(frozen=True)
class Failed(Body):
    """Computing a gradient raised; from a worker to the coordinator.

    Attributes:
        error, traceback, kind: see `steepest.errors.describe_error`.
    """

    generation: Generation
    incarnation: Incarnation
    version: Version
    error: Annotated[str, TEXT]
    traceback: Annotated[str, TEXT]
    kind: Annotated[str, TEXT] = ""
