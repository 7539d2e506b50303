"""The messages between the driver's client and the coordinator: steps, counters, the log."""

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
    RATES,
    TEXT,
    WORKER,
    RateChanges,
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
    """A request for more steps; each step is answered by a RESULT, or all of them by one FAILURE.

    The driver's client sends it to the coordinator when a user calls `step` or `fit`.

    Attributes:
        sequence: the client's count of its requests.
        steps: number of steps beyond those that were asked for before.
        stats: whether results are to have loss, metrics and timings.
        rates: learning rates that hold instead of the schedule's, see `steepest.protocol.rates`.
    """

    sequence: Sequence
    steps: Annotated[int, COUNT]
    stats: Annotated[bool, FLAG] = True
    rates: Annotated[RateChanges, RATES] = ()


@body(Kind.RESULT)
@dataclass(frozen=True)
class Result(Body):
    """A step is committed.

    The coordinator sends it to the client with the COMMIT of the step's last update.

    Attributes:
        generation: of the coordinator.
        version: that the step's last update made.
        step: number of steps committed by now, this one included.
        samples: number of samples in the step's pushes.
        bytes_pushed, bytes_pulled: bytes of gradients and of weights, summed over its pushes, see
            `Report`.
        staleness: of each push, in versions.
        loss: mean over the samples, by weight; None, with metrics and timings, where the client
            asked for no statistics.
        metrics: means over the samples, by name.
        timings: seconds by part of a step, means over pushes.
        gradient_norm: 2-norm of the mean gradient before clipping, mean over the step's updates;
            None where it is not known.
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
    """The open step is given up, and the steps asked for after it with it.

    The coordinator sends it to the client; a new generation begins with it. After one of reason
    "optimizer", which may come between steps too, no server's state can be read, and no step taken:
    other roles have to be made, with a state from before.

    Attributes:
        generation, version: of the coordinator from now on.
        step: number of steps committed by now; of reason "optimizer", of those before the step whose
            update raised.
        reason: "raised" (a worker's model or data; with worker, error, traceback, kind), "schedule"
            (the schedule raised; with error, traceback, kind), "optimizer" (a server's optimizer
            raised, and the committed update is applied in part; with peer, error, traceback, kind),
            "nonfinite" (with culprits), "lost" (a process died; with peer, why) or "deadline" (with
            awaited, seconds).
        culprits: (worker, parameter's name) for each NaN or infinity, see `VersionStaged`.
        worker: index of the worker whose model or data raised.
        peer: the process that died, or the server whose optimizer raised.
        why: the cause of its death, in words.
        error, traceback, kind: of the exception, see `steepest.errors.describe_error`.
        awaited: names of the processes that have not done their part.
        seconds: for which the step was waited for.
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
    """A request to take back all steps that were asked for and are not committed.

    The client sends it to the coordinator when `fit` ends early, as by an exception.

    Attributes:
        sequence: the client's count of its requests.
    """

    sequence: Sequence


@body(Kind.REVOKED)
@dataclass(frozen=True)
class Revoked(Body):
    """The steps are taken back, and workers are idle in a new generation.

    The coordinator sends it to the client, in answer to a REVOKE.

    Attributes:
        generation: that has begun.
        sequence: of the request.
        version: number of updates committed.
    """

    generation: Generation
    sequence: Sequence
    version: Version


@body(Kind.STOP)
@dataclass(frozen=True)
class Stop(Body):
    """A request to finish the steps that are begun, and to take back the others.

    The client sends it to the coordinator when the driver wants workers idle between two steps.

    Attributes:
        sequence: the client's count of its requests.
    """

    sequence: Sequence


@body(Kind.STOPPED)
@dataclass(frozen=True)
class Stopped(Body):
    """The version at which workers become idle.

    The coordinator sends it to the client, in answer to a STOP.

    Attributes:
        generation: of the coordinator.
        sequence: of the request.
        limit: the last version that will be committed.
    """

    generation: Generation
    sequence: Sequence
    limit: Annotated[int, Header("version")]


@body(Kind.GIVE_UP)
@dataclass(frozen=True)
class GiveUp(Body):
    """A worker is to be treated as dead although its channel is open.

    The client sends it to the coordinator when the driver finds a worker silent or cut off.

    Attributes:
        worker: index of the worker.
        life: incarnation that is silent; the message does nothing if another one has joined.
        why: the cause, in words.
    """

    worker: Annotated[int, WORKER]
    life: Annotated[int, COUNT]
    why: Annotated[str, TEXT]


@body(Kind.WORKER_LOST)
@dataclass(frozen=True)
class WorkerLost(Body):
    """One life of a worker is over; its successor may join.

    The coordinator sends it to the client when a worker's channel closes or the client gives it up,
    in a job that waits for successors.

    Attributes:
        generation, version: of the coordinator from now on.
        worker: index of the worker.
        life: incarnation that is over.
        why: the cause, in words.
    """

    generation: Generation
    version: Version
    worker: Annotated[int, WORKER]
    life: Annotated[int, COUNT]
    why: Annotated[str, TEXT]


@body(Kind.READ_COUNTERS)
@dataclass(frozen=True)
class ReadCounters(Body):
    """A request for the counters.

    A client sends it to the coordinator.

    Attributes:
        sequence: the client's count of its requests.
    """

    sequence: Sequence


@body(Kind.COUNTERS)
@dataclass(frozen=True)
class Counters(Body):
    """The counters of the job so far.

    The coordinator sends it to the client, in answer to a READ_COUNTERS.

    Attributes:
        generation: of the coordinator.
        sequence: of the request.
        version: number of updates committed, those before a restore included.
        step: number of whole steps committed.
        committed: number of updates committed since the job began.
        skipped: number of these that changed nothing, because of NaN or infinity.
        dropped: number of pushes that were dropped instead of committed.
        staleness: (staleness in versions, number of pushes that had it).
        following: the lowest share of the samples that was never leased.
        returned: shares below that one that came back uncommitted.
        paces: (worker, seconds of computing for one push, a running mean).
        slow: (worker, number of steps committed before it became a straggler).
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
    """A request for a page of the log.

    The client sends it to the coordinator.

    Attributes:
        sequence: the client's count of its requests.
        first: index of the first entry that is wanted.
    """

    sequence: Sequence
    first: Annotated[int, COUNT]


@body(Kind.LOG_PAGE)
@dataclass(frozen=True)
class LogPage(Body):
    """Consecutive entries of the log.

    The coordinator sends it to the client, in answer to a READ_LOG.

    Attributes:
        sequence: of the request.
        log: as many entries as fit into a page, at least one if there is one; None if no log is
            kept.
        length: number of entries in the whole log.
    """

    sequence: Sequence
    log: Annotated[list[Any] | None, nothing_or(many(ANYTHING))]
    length: Annotated[int, COUNT] = 0
