"""The messages between the driver's client and the coordinator: steps, counters, the log."""

from collections.abc import Sequence as Seq

from steepest.core.messages.fields import (
    Count,
    Culprits,
    Entries,
    Finite,
    HyperByGroup,
    Number,
    RateChanges,
    Text,
    WorkerIndex,
)
from steepest.core.messages.message import Kind, Peer
from steepest.core.messages.schema import Body, body


@body(Kind.ASK)
class AskForSteps(Body, frozen=True):
    """A request for more steps; each step is answered by a RESULT, or all of them by one FAILURE.

    The driver's client sends it to the coordinator when a user calls `step` or `fit`. If a FAILURE
    was sent before it arrives, that FAILURE answers it too.
    """

    generation: Count  # the newest that the client knows
    sequence: Count
    steps: Count  # beyond those that were asked for before
    stats: bool = True  # whether results are to have loss, metrics and timings
    # that hold instead of the schedule's, see `steepest.core.protocol.commit_state`
    rates: RateChanges = ()


@body(Kind.RESULT)
class Result(Body, frozen=True):
    """A step is committed.

    The coordinator sends it to the client with the COMMIT of the step's last update.
    """

    generation: Count
    version: Count  # that the step's last update made
    step: Count  # number of steps committed by now, this one included
    samples: Count  # in the step's pushes
    bytes_pushed: Count  # of gradients, summed over its pushes, see `Report`
    bytes_pulled: Count  # of weights, likewise
    staleness: Seq[Count]  # of each push, in versions
    # mean over the samples, by weight; None, with metrics and timings, where no statistics were asked for
    loss: Number | None = None
    # means over the samples, by name
    metrics: dict[str, Number] | None = None
    # seconds by part of a step, means over pushes
    timings: dict[str, Number] | None = None
    # 2-norm of the mean gradient before clipping, mean over the step's updates; None if not known
    gradient_norm: Number | None = None
    # of workers' own loops; None if they do not report it
    epoch: Count | None = None
    # for each parameter group, the hyperparameters that workers' own loops report, see `Report`
    hyper: HyperByGroup | None = None
    # of each push with statistics: its worker, and the seconds of its data, its computing and its wait
    spent: Seq[tuple[WorkerIndex, float, float, float]] = ()
    # of its pushes, the values that workers' own loops report, see `Report`: the worker first
    notes: Seq[tuple[WorkerIndex, Count, Number, dict[str, Number]]] = ()


@body(Kind.FAILURE)
class Failure(Body, frozen=True):
    """The open step is given up, and the steps asked for after it with it.

    The coordinator sends it to the client; a new generation begins with it. After one of reason
    "optimizer", which may also come between steps, no server's state can be read, and no step taken:
    new roles have to be made, with an earlier state.
    """

    generation: Count  # this and version: of the coordinator from now on
    version: Count
    # committed by now; for reason "optimizer", before the step whose update raised
    step: Count
    # "raised" (a worker's model or data; with worker, error, traceback, kind), "schedule" (it raised; with error,
    # traceback, kind), "optimizer" (a server's raised, and the committed update is applied in part; with peer, error,
    # traceback, kind), "nonfinite" (with culprits), "unlike" (workers' own loops differ; with why), "lost"
    # (a process died; with peer, why), "deadline" (with awaited, seconds)
    reason: Text
    # (worker, parameter's name) for each NaN or infinity, see `VersionStaged`
    culprits: Culprits = ()
    worker: WorkerIndex | None = None  # whose model or data raised
    peer: Peer | None = None  # that died, or the server whose optimizer raised
    why: Text = ""  # the cause of its death, or what is not alike, in words
    # this, traceback and kind: see `steepest.errors.describe_error`
    error: Text = ""
    traceback: Text = ""
    kind: Text = ""
    # names of the processes that have not done their part
    awaited: Seq[Text] = ()
    seconds: Finite | None = None  # for which the step was waited for


@body(Kind.REVOKE)
class Revoke(Body, frozen=True):
    """A request to take back all steps that were asked for and are not committed.

    The client sends it to the coordinator when `fit` ends early, as by an exception.
    """

    sequence: Count


@body(Kind.REVOKED)
class Revoked(Body, frozen=True):
    """The steps are taken back, and workers are idle in a new generation.

    The coordinator sends it to the client, in answer to a REVOKE.
    """

    generation: Count  # that has begun
    sequence: Count
    version: Count  # number of updates committed


@body(Kind.STOP)
class Stop(Body, frozen=True):
    """A request to finish the steps that are begun, and to take back the others.

    The client sends it to the coordinator when the driver wants workers idle between two steps.
    """

    sequence: Count


@body(Kind.STOPPED)
class Stopped(Body, frozen=True):
    """The version at which workers become idle.

    The coordinator sends it to the client, in answer to a STOP.
    """

    generation: Count
    sequence: Count
    limit: Count  # the last version that will be committed


@body(Kind.GIVE_UP)
class GiveUp(Body, frozen=True):
    """A worker is to be treated as dead although its channel is open.

    The client sends it to the coordinator when the driver finds a worker silent or cut off.
    """

    worker: WorkerIndex
    # incarnation that is silent; the message does nothing if another one has joined
    life: Count
    why: Text  # the cause, in words


@body(Kind.WORKER_LOST)
class WorkerLost(Body, frozen=True):
    """One life of a worker is over; its successor may join.

    The coordinator sends it to the client when a worker's channel closes or the client gives it up,
    in a job that waits for successors.
    """

    generation: Count  # this and version: of the coordinator from now on
    version: Count
    worker: WorkerIndex
    life: Count  # incarnation that is over
    why: Text  # the cause, in words


@body(Kind.DIFFERENCE)
class AuditDifference(Body, frozen=True):
    """Processes have computed different gradients of the same samples, in an audited step that is not committed yet.

    The coordinator sends it to the client when they were computed a second time.
    """

    generation: Count  # in which they were computed
    version: Count  # of the weights from which they were computed
    step: Count  # number of steps committed, the audited one included
    # for each difference the worker that the samples belong to, and the other one that computed them
    pairs: tuple[tuple[WorkerIndex, WorkerIndex], ...]
    why: Text  # the reason, in words
    # that computes wrongly; None if that is not known
    worker: WorkerIndex | None = None
    life: Count = 0  # its incarnation
    # whether the step is committed only once another process has taken the worker's place
    waits: bool = False


@body(Kind.READ_COUNTERS)
class ReadCounters(Body, frozen=True):
    """A request for the counters.

    A client sends it to the coordinator.
    """

    sequence: Count


@body(Kind.COUNTERS)
class Counters(Body, frozen=True):
    """The counters of the job so far.

    The coordinator sends it to the client, in answer to a READ_COUNTERS.
    """

    generation: Count
    sequence: Count
    version: Count  # number of updates committed, those before a restore included
    step: Count  # number of whole steps committed
    committed: Count  # number of updates committed since the job began
    # number of these that changed nothing, because of NaN or infinity
    skipped: Count
    dropped: Count  # number of pushes that were dropped instead of committed
    # (staleness in versions, number of pushes that had it)
    staleness: Seq[tuple[Count, Count]]
    following: Count  # the lowest share of the samples that was never leased
    returned: Seq[Count]  # shares below that one that came back uncommitted
    # (worker, seconds of computing for one push, a running mean)
    paces: Seq[tuple[WorkerIndex, Number]]
    # (worker, number of steps committed before it became a straggler)
    slow: Seq[tuple[WorkerIndex, Count]]


@body(Kind.READ_LOG)
class ReadLog(Body, frozen=True):
    """A request for a page of the log.

    The client sends it to the coordinator.
    """

    sequence: Count
    first: Count  # index of the first entry that is wanted


@body(Kind.LOG_PAGE)
class LogPage(Body, frozen=True):
    """Consecutive entries of the log.

    The coordinator sends it to the client, in answer to a READ_LOG.
    """

    sequence: Count
    # entries that fit into a page, at least one if there is one; None if no log is kept
    log: Entries | None
    length: Count = 0  # number of entries in the whole log
