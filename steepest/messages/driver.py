"""The messages between the driver's client and the coordinator: steps, what came of them, counters and the log."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Annotated, Any

from steepest.messages.fields import (
    ANYTHING,
    COUNT,
    CULPRITS,
    FINITE,
    FLAG,
    NUMBER,
    PEER,
    TEXT,
    WORKER,
    many,
    nothing_or,
    numbers_by_name,
    row,
)
from steepest.messages.message import Kind, Peer
from steepest.messages.schema import Body, Generation, Header, Sequence, Version, body


@body(Kind.ASK)
@dataclass(frozen=True)
class Ask(Body):
    """Have that many more steps taken; from the client to the coordinator. Each is answered by a result or a failure.

    Attributes:
        stats: whether results are to have loss, metrics and timings.
    """

    sequence: Sequence
    steps: Annotated[int, COUNT]
    stats: Annotated[bool, FLAG] = True


@body(Kind.RESULT)
@dataclass(frozen=True)
class Result(Body):
    """A step is committed; from the coordinator to the client.

    Attributes:
        version: that its last update made.
        step: number of the step, from 1.
        samples, bytes_pushed, bytes_pulled: sums over its pushes.
        staleness: of each push, in versions.
        loss, metrics, timings: means by weight, and by push; None and empty where they are not
            wanted.
        gradient_norm: mean over its updates; None where it is not known.
    """

    generation: Generation
    version: Version
    step: Annotated[int, COUNT]
    samples: Annotated[int, COUNT]
    bytes_pushed: Annotated[int, COUNT]
    bytes_pulled: Annotated[int, COUNT]
    staleness: Annotated[Row[int], many(COUNT)]
    loss: Annotated[float | None, NUMBER] = None
    metrics: Annotated[dict[str, float] | None, numbers_by_name()] = None
    timings: Annotated[dict[str, float] | None, numbers_by_name()] = None
    gradient_norm: Annotated[float | None, NUMBER] = None


@body(Kind.FAILURE)
@dataclass(frozen=True)
class Failure(Body):
    """The open step is given up, with all that was granted; from the coordinator to the client.

    Attributes:
        step: steps that are committed.
        reason: "raised" (a worker's model: worker, error, traceback, kind), "schedule" (error,
            traceback, kind), "nonfinite" (culprits), "lost" (peer, why) or "deadline" (awaited,
            seconds).
        awaited: names of the processes that have not done their part.
        seconds: that the step was waited for.
    """

    generation: Generation
    version: Version
    step: Annotated[int, COUNT]
    reason: Annotated[str, TEXT]
    culprits: Annotated[Row[Row[Any]], CULPRITS] = ()
    worker: Annotated[int | None, WORKER] = None
    peer: Annotated[Peer | None, PEER] = None
    why: Annotated[str, TEXT] = ""
    error: Annotated[str, TEXT] = ""
    traceback: Annotated[str, TEXT] = ""
    kind: Annotated[str, TEXT] = ""
    awaited: Annotated[Row[str], many(TEXT)] = ()
    seconds: Annotated[float | None, FINITE] = None


@body(Kind.REVOKE)
@dataclass(frozen=True)
class Revoke(Body):
    """Take back what is granted and not committed; from the client to the coordinator."""

    sequence: Sequence


@body(Kind.REVOKED)
@dataclass(frozen=True)
class Revoked(Body):
    """It is taken back, and workers are idle in a new generation; from the coordinator to the client."""

    generation: Generation
    sequence: Sequence
    version: Version


@body(Kind.STOP)
@dataclass(frozen=True)
class Stop(Body):
    """Grant nothing more, and finish the steps that are begun; from the client to the coordinator."""

    sequence: Sequence


@body(Kind.STOPPED)
@dataclass(frozen=True)
class Stopped(Body):
    """How far workers will come; from the coordinator to the client.

    Attributes:
        limit: the last version that will be committed.
    """

    generation: Generation
    sequence: Sequence
    limit: Annotated[int, Header("version")]


@body(Kind.GIVE_UP)
@dataclass(frozen=True)
class GiveUp(Body):
    """A worker is silent or cut off, although its channel is open; from the client to the coordinator.

    Attributes:
        life: its incarnation.
        why: in words.
    """

    worker: Annotated[int, WORKER]
    life: Annotated[int, COUNT]
    why: Annotated[str, TEXT]


@body(Kind.WORKER_LOST)
@dataclass(frozen=True)
class WorkerLost(Body):
    """A life of a worker is over, and another one may join in its place; from the coordinator to the client."""

    generation: Generation
    version: Version
    worker: Annotated[int, WORKER]
    life: Annotated[int, COUNT]
    why: Annotated[str, TEXT]


@body(Kind.READ_COUNTERS)
@dataclass(frozen=True)
class ReadCounters(Body):
    """Tell the counters; from the client to the coordinator."""

    sequence: Sequence


@body(Kind.COUNTERS)
@dataclass(frozen=True)
class Counters(Body):
    """What was done so far; from the coordinator to the client.

    Attributes:
        step: whole steps.
        committed, skipped, dropped: updates, those of them that changed nothing, and pushes that
            became none.
        staleness: (staleness, pushes of it).
        following: the lowest share of the samples that was never given out.
        returned: shares below that came back.
        paces: (worker, seconds that it computes for a push).
        slow: (worker, the step since which it is a straggler).
    """

    generation: Generation
    sequence: Sequence
    version: Version
    step: Annotated[int, COUNT]
    committed: Annotated[int, COUNT]
    skipped: Annotated[int, COUNT]
    dropped: Annotated[int, COUNT]
    staleness: Annotated[Row[tuple[int, int]], many(row(COUNT, COUNT))]
    following: Annotated[int, COUNT]
    returned: Annotated[Row[int], many(COUNT)]
    paces: Annotated[Row[tuple[int, float]], many(row(WORKER, NUMBER))]
    slow: Annotated[Row[tuple[int, int]], many(row(WORKER, COUNT))]


@body(Kind.READ_LOG)
@dataclass(frozen=True)
class ReadLog(Body):
    """Tell entries of the log, from `first` on; from the client to the coordinator."""

    sequence: Sequence
    first: Annotated[int, COUNT]


@body(Kind.LOG_PAGE)
@dataclass(frozen=True)
class LogPage(Body):
    """Some entries of the log; from the coordinator to the client.

    Attributes:
        log: as many as fit, at least one if there is one; None if no log is kept.
        length: of the whole log.
    """

    sequence: Sequence
    log: Annotated[list[Any] | None, nothing_or(many(ANYTHING))]
    length: Annotated[int, COUNT] = 0
