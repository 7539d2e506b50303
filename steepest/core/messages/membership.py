"""The messages by which the coordinator and workers agree on members, generations and steps."""

from collections.abc import Sequence as Seq

from steepest.core.messages.fields import Count, Puts, RateChanges, Text, WorkerIndex
from steepest.core.messages.gradients import Decision
from steepest.core.messages.message import Kind, PushId
from steepest.core.messages.schema import Body, body


@body(Kind.JOIN)
class Join(Body, frozen=True):
    """A worker asks to become a member.

    A worker sends it to the coordinator when its process has started and its channels are open.
    """

    incarnation: Count  # number of lives of this worker before this one


@body(Kind.MEMBERS)
class Members(Decision, frozen=True):
    """A generation begins; pushes of earlier generations are void.

    The coordinator sends it to every server and every worker that has joined: when all have joined,
    when a member is lost, when a step is given up or steps are taken back, and when a state is
    installed. A worker that joins a generation later is sent it alone.
    """

    workers: Seq[WorkerIndex]  # indices of the members, ascending
    reload: bool  # whether servers send all weights to all members
    # (role, index, request number) of clients whose states are installed before weights are sent
    install: Puts = ()
    # whether a worker with a gradient of the same version and share pushes that, instead of computing anew
    again: bool = False


@body(Kind.WORKER_JOINED)
class WorkerJoined(Decision, frozen=True):
    """A worker becomes a member of the generation that has begun already.

    The coordinator sends it to every server, under a rule that commits pushes one by one; servers
    send the worker all weights.
    """

    worker: WorkerIndex


@body(Kind.WORKER_ENDED)
class WorkerEnded(Decision, frozen=True):
    """One life of a worker is over, and the other members continue.

    The coordinator sends it to every server, under a rule that commits pushes one by one, when the
    worker's channel closes or the driver gives the worker up.
    """

    worker: WorkerIndex
    # incarnation that is over; pushes of it, and of earlier ones, are refused from now on
    life: Count
    # its pushes that have not arrived at all servers, which are void
    pushes: tuple[PushId, ...]


@body(Kind.GRANT)
class Grant(Body, frozen=True):
    """Steps may be taken up to a version.

    The coordinator sends it to every member when the driver asks for steps and when a generation
    continues, under a rule by which every member contributes to every version.
    """

    generation: Count
    limit: Count  # the version that the last of these steps makes
    stats: bool = True  # whether reports are to have loss, metrics and timings
    rates: RateChanges = ()  # see `Ask`


@body(Kind.LEASE)
class Lease(Body, frozen=True):
    """A share of the samples is leased to a worker, which computes one push from it.

    The coordinator sends it to an idle worker, under a rule that commits pushes one by one.
    """

    generation: Count
    # of the weights from which the worker computes; it waits for them if it holds older ones
    version: Count
    share: Count  # its number, counted over all epochs
    stats: bool = True  # as in `Grant`
    # sequence number of the worker's last push that is part of the weights; 0 for none
    committed: Count = 0
    count: Count = 1  # how many shares from that one on
    # the first share that it is leased next, which may begin before this push is committed, and their number; or empty
    ahead: Seq[Count] = ()
    # which part of the model it pushes, modulo their number; None for the one that it has pushed longest ago
    turn: Count | None = None


@body(Kind.FAILED)
class Failed(Body, frozen=True):
    """Computing a gradient, or applying an update, raised an exception of the user's code.

    A worker sends it to the coordinator when the model or its data raised, a server when the
    optimizer raised, once.
    """

    generation: Count
    incarnation: Count  # of the worker; 0 from a server
    # from which the gradient was being computed; from a server, that the update was to make
    version: Count
    error: Text  # this, traceback and kind: see `steepest.errors.describe_error`
    traceback: Text
    kind: Text = ""


@body(Kind.GROUP_KEY)
class GroupKey(Body, frozen=True):
    """A value under a key of the rendezvous at which the workers of a generation form a process group.

    A worker sends it to each other worker, where workers add up gradients among themselves, when it
    begins the generation's first step. No key is set twice.
    """

    generation: Count  # of the group
    key: Text
    value: Text  # hexadecimal digits
