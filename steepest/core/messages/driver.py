"""The messages between the driver's client and the coordinator: steps, counters, the log."""

from collections.abc import Sequence as Seq
from typing import Annotated, Any

from steepest.core.messages.fields import (
    ANYTHING,
    COUNT,
    CULPRITS,
    FINITE,
    FLAG,
    NOTED,
    NUMBER,
    PEER,
    RATES,
    SPENT,
    TEXT,
    WORKER,
    RateChanges,
    each_of,
    many,
    nothing_or,
    numbers_by_name,
    plain_by_name,
)
from steepest.core.messages.message import Kind, Peer
from steepest.core.messages.schema import Body, Generation, Header, Sequence, Version, body


@body(Kind.ASK)
class AskForSteps(Body):
    """A request for more steps; each step is answered by a RESULT, or all of them by one FAILURE.

    The driver's client sends it to the coordinator when a user calls `step` or `fit`. If a FAILURE
    was sent before it arrives, that FAILURE answers it too.
    """

    generation: Generation  # the newest that the client knows
    sequence: Sequence
    steps: Annotated[int, COUNT]  # beyond those that were asked for before
    stats: Annotated[bool, FLAG] = True  # whether results are to have loss, metrics and timings
    # that hold instead of the schedule's, see `steepest.core.protocol.commit_state`
    rates: Annotated[RateChanges, RATES] = ()


@body(Kind.RESULT)
class Result(Body):
    """A step is committed.

    The coordinator sends it to the client with the COMMIT of the step's last update.
    """

    generation: Generation
    version: Version  # that the step's last update made
    step: Annotated[int, COUNT]  # number of steps committed by now, this one included
    samples: Annotated[int, COUNT]  # in the step's pushes
    bytes_pushed: Annotated[int, COUNT]  # of gradients, summed over its pushes, see `Report`
    bytes_pulled: Annotated[int, COUNT]  # of weights, likewise
    staleness: Annotated[Seq[int], many(COUNT)]  # of each push, in versions
    # mean over the samples, by weight; None, with metrics and timings, where no statistics were asked for
    loss: Annotated[float | None, NUMBER] = None
    # means over the samples, by name
    metrics: Annotated[dict[str, float] | None, numbers_by_name()] = None
    # seconds by part of a step, means over pushes
    timings: Annotated[dict[str, float] | None, numbers_by_name()] = None
    # 2-norm of the mean gradient before clipping, mean over the step's updates; None if not known
    gradient_norm: Annotated[float | None, NUMBER] = None
    # of workers' own loops; None if they do not report it
    epoch: Annotated[int | None, nothing_or(COUNT)] = None
    # for each parameter group, the hyperparameters that workers' own loops report, see `Report`
    hyper: Annotated[list[dict[str, Any]] | None, many(plain_by_name())] = None
    # of each push with statistics: its worker, and the seconds of its data, its computing and its wait
    spent: Annotated[Seq[tuple[int, float, float, float]], many(SPENT)] = ()
    # of its pushes, the values that workers' own loops report, see `Report`: the worker first
    notes: Annotated[Seq[tuple[int, int, float, dict[str, float]]], many(NOTED)] = ()


@body(Kind.FAILURE)
class Failure(Body):
    """The open step is given up, and the steps asked for after it with it.

    The coordinator sends it to the client; a new generation begins with it. After one of reason
    "optimizer", which may also come between steps, no server's state can be read, and no step taken:
    new roles have to be made, with an earlier state.
    """

    generation: Generation  # this and version: of the coordinator from now on
    version: Version
    # committed by now; for reason "optimizer", before the step whose update raised
    step: Annotated[int, COUNT]
    # "raised" (a worker's model or data; with worker, error, traceback, kind), "schedule" (it raised; with error,
    # traceback, kind), "optimizer" (a server's raised, and the committed update is applied in part; with peer, error,
    # traceback, kind), "nonfinite" (with culprits), "unlike" (workers' own loops differ; with why), "lost"
    # (a process died; with peer, why), "deadline" (with awaited, seconds)
    reason: Annotated[str, TEXT]
    # (worker, parameter's name) for each NaN or infinity, see `VersionStaged`
    culprits: Annotated[Seq[Seq[Any]], CULPRITS] = ()
    worker: Annotated[int | None, WORKER] = None  # whose model or data raised
    peer: Annotated[Peer | None, PEER] = None  # that died, or the server whose optimizer raised
    why: Annotated[str, TEXT] = ""  # the cause of its death, or what is not alike, in words
    # this, traceback and kind: see `steepest.errors.describe_error`
    error: Annotated[str, TEXT] = ""
    traceback: Annotated[str, TEXT] = ""
    kind: Annotated[str, TEXT] = ""
    # names of the processes that have not done their part
    awaited: Annotated[Seq[str], many(TEXT)] = ()
    seconds: Annotated[float | None, FINITE] = None  # for which the step was waited for


@body(Kind.REVOKE)
class Revoke(Body):
    """A request to take back all steps that were asked for and are not committed.

    The client sends it to the coordinator when `fit` ends early, as by an exception.
    """

    sequence: Sequence


@body(Kind.REVOKED)
class Revoked(Body):
    """The steps are taken back, and workers are idle in a new generation.

    The coordinator sends it to the client, in answer to a REVOKE.
    """

    generation: Generation  # that has begun
    sequence: Sequence
    version: Version  # number of updates committed


@body(Kind.STOP)
class Stop(Body):
    """A request to finish the steps that are begun, and to take back the others.

    The client sends it to the coordinator when the driver wants workers idle between two steps.
    """

    sequence: Sequence


@body(Kind.STOPPED)
class Stopped(Body):
    """The version at which workers become idle.

    The coordinator sends it to the client, in answer to a STOP.
    """

    generation: Generation
    sequence: Sequence
    limit: Annotated[int, Header("version")]  # the last version that will be committed


@body(Kind.GIVE_UP)
class GiveUp(Body):
    """A worker is to be treated as dead although its channel is open.

    The client sends it to the coordinator when the driver finds a worker silent or cut off.
    """

    worker: Annotated[int, WORKER]
    # incarnation that is silent; the message does nothing if another one has joined
    life: Annotated[int, COUNT]
    why: Annotated[str, TEXT]  # the cause, in words


@body(Kind.WORKER_LOST)
class WorkerLost(Body):
    """One life of a worker is over; its successor may join.

    The coordinator sends it to the client when a worker's channel closes or the client gives it up,
    in a job that waits for successors.
    """

    generation: Generation  # this and version: of the coordinator from now on
    version: Version
    worker: Annotated[int, WORKER]
    life: Annotated[int, COUNT]  # incarnation that is over
    why: Annotated[str, TEXT]  # the cause, in words


@body(Kind.DIFFERENCE)
class AuditDifference(Body):
    """Processes have computed different gradients of the same samples, in an audited step that is not committed yet.

    The coordinator sends it to the client when they were computed a second time.
    """

    generation: Generation  # in which they were computed
    version: Version  # of the weights from which they were computed
    step: Annotated[int, COUNT]  # number of steps committed, the audited one included
    # for each difference the worker that the samples belong to, and the other one that computed them
    pairs: Annotated[Seq[tuple[int, int]], many(each_of(WORKER, WORKER))]
    why: Annotated[str, TEXT]  # the reason, in words
    # that computes wrongly; None if that is not known
    worker: Annotated[int | None, WORKER] = None
    life: Annotated[int, COUNT] = 0  # its incarnation
    # whether the step is committed only once another process has taken the worker's place
    waits: Annotated[bool, FLAG] = False


@body(Kind.READ_COUNTERS)
class ReadCounters(Body):
    """A request for the counters.

    A client sends it to the coordinator.
    """

    sequence: Sequence


@body(Kind.COUNTERS)
class Counters(Body):
    """The counters of the job so far.

    The coordinator sends it to the client, in answer to a READ_COUNTERS.
    """

    generation: Generation
    sequence: Sequence
    version: Version  # number of updates committed, those before a restore included
    step: Annotated[int, COUNT]  # number of whole steps committed
    committed: Annotated[int, COUNT]  # number of updates committed since the job began
    # number of these that changed nothing, because of NaN or infinity
    skipped: Annotated[int, COUNT]
    dropped: Annotated[int, COUNT]  # number of pushes that were dropped instead of committed
    # (staleness in versions, number of pushes that had it)
    staleness: Annotated[Seq[tuple[int, int]], many(each_of(COUNT, COUNT))]
    following: Annotated[int, COUNT]  # the lowest share of the samples that was never leased
    returned: Annotated[Seq[int], many(COUNT)]  # shares below that one that came back uncommitted
    # (worker, seconds of computing for one push, a running mean)
    paces: Annotated[Seq[tuple[int, float]], many(each_of(WORKER, NUMBER))]
    # (worker, number of steps committed before it became a straggler)
    slow: Annotated[Seq[tuple[int, int]], many(each_of(WORKER, COUNT))]


@body(Kind.READ_LOG)
class ReadLog(Body):
    """A request for a page of the log.

    The client sends it to the coordinator.
    """

    sequence: Sequence
    first: Annotated[int, COUNT]  # index of the first entry that is wanted


@body(Kind.LOG_PAGE)
class LogPage(Body):
    """Consecutive entries of the log.

    The coordinator sends it to the client, in answer to a READ_LOG.
    """

    sequence: Sequence
    # entries that fit into a page, at least one if there is one; None if no log is kept
    log: Annotated[list[Any] | None, nothing_or(many(ANYTHING))]
    length: Annotated[int, COUNT] = 0  # number of entries in the whole log
