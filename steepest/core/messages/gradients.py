"""The messages of a step: pushes of gradients, reports, what is staged, commits, weights."""

from collections.abc import Sequence as Seq
from typing import Annotated, Any

from steepest.core.messages.audits import Audited
from steepest.core.messages.fields import (
    UNUSED,
    ChunkIndex,
    CoordinatorState,
    Count,
    Culprits,
    Entries,
    Factor,
    HyperByGroup,
    Note,
    Number,
    Readers,
    ScheduleState,
    StepDigest,
    Weight,
    WorkerIndex,
)
from steepest.core.messages.message import Kind, PushId
from steepest.core.messages.schema import Body, body


@body(Kind.PUSH)
class Push(Body, frozen=True):
    """One chunk of a gradient.

    A worker sends it during its backward pass, as soon as the chunk is complete, to each server
    that holds the chunk; or, where its host has an aggregator and the server is on another host, to
    the aggregator. Until it has sent the last chunk to any server it may take the gradient back: its next
    push from the same version, with a higher sequence number, takes the place of this one. A user of a
    parameter server sends an update of its arrays in this form, as generation 0, incarnation 0, and in
    units of 1. The payload is in the chunk's dtype, in half precision, or compressed; without one there is no
    gradient, which counts as zero.
    """

    generation: Count  # this and incarnation: of the worker as it computed the gradient
    incarnation: Count
    sequence: Count  # the worker's count of its pushes; the same for all chunks of one gradient
    pulled: Count  # version of the weights from which the gradient was computed
    chunk: ChunkIndex
    unit: Weight = 0.0  # sample weight that the payload is to be multiplied by
    total: Weight = 0.0  # summed weight of the samples behind the gradient
    # indices, in the layout's entries, of parameters of the chunk without a gradient
    absent: Seq[Count] = ()


@body(Kind.HOST_PUSH)
class HostPush(Body, frozen=True):
    """One chunk of the sum of the gradients of a host's workers.

    An aggregator sends it to the server of another host that owns the chunk, once each worker of
    its host has pushed the chunk. If the sum holds NaN or infinity, the aggregator sends the
    gradients one by one instead, each as a HOST_PUSH of one push. The payload is as in `Push`.
    """

    generation: Count
    pulled: Count  # version of the weights from which the gradients were computed
    chunk: ChunkIndex
    unit: Weight  # sample weight that the payload is to be multiplied by
    total: Weight  # summed weight of the samples behind all of the gradients
    # that are added up, in the order of their workers
    pushes: tuple[PushId, ...]
    # indices, in the layout's entries, of parameters without a gradient in any of the pushes
    absent: Seq[Count] = ()


@body(Kind.VERSION_STAGED)
class VersionStaged(Body, frozen=True):
    """The gradients of all members for the next version are reduced on one server.

    A server sends it to the coordinator when all its trainable chunks are reduced, under a rule
    that commits all pushes of a version together.
    """

    generation: Count  # of the pushes
    version: Count  # of the weights from which the gradients were computed
    # sum of squares of the mean gradient, over the chunks whose first holder this server is
    squares: Number
    # (worker, parameter's name) for each NaN or infinity; worker -1 where only the sum is not finite
    culprits: Culprits = ()


@body(Kind.PUSH_STAGED)
class PushStaged(Body, frozen=True):
    """Every chunk of one push has arrived at one server.

    A server sends it to the coordinator, under a rule that commits pushes one by one.
    """

    generation: Count
    incarnation: Count
    sequence: Count
    pulled: Count  # version of the weights from which the gradient was computed
    worker: WorkerIndex  # that pushed
    # of this push's gradient, as in `VersionStaged`; so are culprits
    squares: Number
    culprits: Culprits = ()

    @property
    def push(self) -> PushId:
        """The push that is staged."""
        return PushId(self.worker, self.incarnation, self.sequence)


@body(Kind.REPORT)
class Report(Body, frozen=True):
    """Every chunk of a gradient has been sent; with the step's results.

    A worker sends it to the coordinator right after the last PUSH of the gradient.
    """

    generation: Count
    incarnation: Count
    sequence: Count
    pulled: Count  # version of the weights from which the gradient was computed
    total: Weight  # summed weight of its samples
    samples: Count
    bytes_pushed: Count  # of this gradient, that were sent to other processes
    # of weights received from other processes since the last report
    bytes_pulled: Count
    # mean over the samples, by weight; None, with metrics and timings empty, where no statistics were asked for
    loss: Number | None = None
    # means over the samples, by name
    metrics: dict[str, Number] = {}
    # seconds, by part of the step: "data", "compute", "wait"
    timings: dict[str, Number] = {}
    # the part of the model that it changes, under a rule of rounds whose updates change one part
    fragment: Count = 0
    # what else a replay needs to know of the push, see `LoggedPush.more`; None for nothing
    more: Annotated[Seq[Any] | None, UNUSED] = None
    # for each parameter group, the hyperparameters of a worker's own loop that differ from the optimizer's own; None
    # where none does, or the worker has no loop of its own
    hyper: HyperByGroup | None = None
    # the greatest norm of this update's gradient, if a worker's own loop sets one; None for the job's, if any
    clip: Number | None = None
    # the position of a worker's own loop, see `steepest.core.messages.fields.StepDigest`; None if the loop does not
    # see the update, or the worker has no loop of its own
    digest: StepDigest | None = None
    # values that a worker's own loop reports to the driver: of each report its number, weight in means, and values
    notes: Seq[Note] = ()
    # whether it is to be left out, with all pushes that would be committed together with it
    overflowed: bool = False
    # in means, of those metrics that have another weight than the samples
    weights: dict[str, Number] = {}
    # its gradients of an audited step; None for other steps
    audit: Audited | None = None


class _AtPosition(Body, frozen=True):
    generation: Count  # this and version: of a server once it has carried the decision out
    version: Count


class Decision(_AtPosition, frozen=True, kw_only=True):
    """A decision of the coordinator; base of the messages that all servers get in one order.

    Servers that hold copies remember the decisions, so that a new coordinator can continue from
    them.
    """

    # from 1; 0 where servers hold no copies and remember nothing
    number: Count = 0
    # the coordinator's ledger and counters after the decision, for a new coordinator
    state: CoordinatorState | None = None
    # state of the hyperparameters' schedule, in each MEMBERS and each hundredth commit
    schedule: ScheduleState | None = None


@body(Kind.COMMIT)
class CommitOrder(Decision, frozen=True):
    """The order to apply these pushes as the next version.

    The coordinator sends it to every server when the pushes are staged on all servers and reported
    by their workers. Servers apply it and send the new weights to the readers.

    Attributes:
        rate: factor of the learning rate, for this update alone.
        pushes: the pushes, in the order in which they are added up.
        readers: (worker, sequence number) of each process that is sent the new weights; the number
            is that of the push that it awaits them for, 0 for a training worker.
        hyper: for each parameter group, the hyperparameters that differ from the optimizer's own;
            None where none does.
        skip: whether the version is made without applying anything, because of NaN or infinity.
        clip: factor of the mean gradient: from clipping by its norm, or to turn the mean into a sum.
        entry: the commit's entry in the log, if a log is kept and servers remember decisions.
        made: number of versions that it counts as.
        fragments: the parts of the model that it changes, ascending, under a rule of rounds.
        clock: the coordinator's time, in whole seconds since the epoch, if stores keep the time.
        results: the body of the `Result` of each step that it ends, if servers remember decisions: the client may not
            have been sent it when the coordinator dies.
    """

    rate: Factor
    pushes: tuple[PushId, ...]
    readers: Readers
    hyper: HyperByGroup | None = None
    skip: bool = False
    clip: Number = 1.0
    entry: Entries | None = None
    made: Count = 1
    fragments: Seq[Count] = ()
    clock: Count = 0
    results: Seq[bytes] = ()


@body(Kind.DISCARD)
class Discard(Decision, frozen=True):
    """The order to forget pushes that will not be committed.

    The coordinator sends it to every server when a rule drops pushes, when a user's push holds NaN
    or infinity, or when a process died before its push arrived at all servers.
    """

    pushes: tuple[PushId, ...]
    # (worker, 0) of each worker that is sent the present weights for its next push
    readers: Readers = ()


@body(Kind.REFRESH)
class Refresh(Decision, frozen=True):
    """The order to send the present weights to workers that hold older ones.

    The coordinator sends it to every server when workers get a lease, or training ends, under a
    rule that commits pushes one by one.
    """

    readers: Readers  # (worker, 0) of each of these workers


@body(Kind.LOGGED)
class Logged(Body, frozen=True):
    """A commit is remembered in another process than the coordinator's, and outlives that one.

    Server 1 sends it to the coordinator after it has applied the commit, where chunks have copies.
    """

    generation: Count
    version: Count  # that the commit made


@body(Kind.WEIGHTS)
class Weights(Body, frozen=True):
    """One chunk of the weights.

    A server sends it to the readers of a commit or snapshot; in training also the aggregator of a
    host to the workers of that host, as soon as the chunk has come. The payload is in the chunk's dtype or in half
    precision, or holds its changes since the version that the reader has, each packed.
    """

    generation: Count
    # of the reader's request, or a user's push, that it answers; 0 for training workers
    sequence: Count
    version: Count  # of these weights
    chunk: ChunkIndex
    # whether all chunks are sent, those that are not trained too, as when a generation begins
    reload: bool = False
    # whether the reader's last committed push was left out, because of NaN or infinity
    skipped: bool = False
    # the parts of the model that the reader is sent of this version; None for the part whose turn it is
    fragments: Seq[Count] | None = None


@body(Kind.WEIGHTS_SHARED)
class WeightsShared(Body, frozen=True):
    """The memory in which the weights of a host lie.

    An aggregator sends it to the workers of its host before the first weights of a generation. A
    worker that can map the memory uses it as its own weights. The payload is the flat vector of all weights.
    """

    generation: Count
