"""The messages by which clients read one version of the state, or install another state."""

from collections.abc import Sequence as Seq
from typing import Annotated, Any

from msgspec import Meta

from steepest.core.messages.fields import (
    UNUSED,
    ChunkIndex,
    CoordinatorState,
    Count,
    Puts,
    Text,
)
from steepest.core.messages.gradients import Decision
from steepest.core.messages.message import Kind, Peer
from steepest.core.messages.schema import Body, body

_What = Annotated[str, Meta(pattern=r"\A(weights|state|standing|opaque)\Z")]
#: How opaque chunks are to be read, as their stores understand it.
Options = Any


@body(Kind.READ)
class Read(Body, frozen=True):
    """A request for a snapshot: one version over all servers.

    The driver's client, or a user of a parameter server, sends it to the coordinator.
    """

    sequence: Count
    # "weights"; "state" adds the optimizer's and the coordinator's; "standing": only version and coordinator's state;
    # "opaque": only opaque chunks
    what: _What = "weights"
    chunks: Seq[ChunkIndex] | None = None  # that are wanted; None for all
    # how to read opaque chunks; None for no options
    options: Annotated[Options | None, UNUSED] = None
    # the version that is wanted, or the present one if that is later; the request waits until it is committed, or a
    # later request of the reader replaces this one
    at: Count = 0


@body(Kind.SNAPSHOT)
class Snapshot(Body, frozen=True):
    """The order to send a reader the state that it asked for.

    The coordinator sends it to every server between two commits, so that all send one version.
    """

    generation: Count
    sequence: Count  # this, what, chunks and options: of the request, see `Read`
    version: Count  # that the servers are at
    reader: Peer  # that asked
    what: _What
    chunks: Seq[ChunkIndex] | None = None
    options: Annotated[Options | None, UNUSED] = None
    # of the coordinator, to be passed on to the reader; None where only weights are read
    state: CoordinatorState | None = None


class _Tensor(Body, frozen=True):
    """One tensor of optimizer state: elements [start, stop) of a flattened parameter of a chunk."""

    sequence: Count  # of the request to which it belongs
    chunk: ChunkIndex
    name: Text
    key: Text  # of the tensor in the optimizer's state of that parameter
    start: Count
    stop: Count
    # whether it stands for a plain value, see `steepest.core.optim.portable`
    plain: bool
    dtype: Text  # without "torch."
    shape: Seq[Count]

    @property
    def about(self) -> dict[str, Any]:
        """The description of the tensor, as checkpoints and servers have it."""
        names = ("name", "key", "start", "stop", "plain", "dtype", "shape")
        return {name: getattr(self, name) for name in names}


@body(Kind.STATE)
class StateTensor(_Tensor, frozen=True, kw_only=True):
    """One tensor of optimizer state, or of the state of an opaque chunk, in a snapshot.

    A server sends it to the client that reads "state" or "opaque".
    """

    # whether the server sends more when a READ_ON has come
    waits: bool = False


@body(Kind.READ_ON)
class ReadOn(Body, frozen=True):
    """A request for the next piece of a snapshot, or its end.

    The client sends it to the server of each STATE that waits for it, so that the server holds an opaque chunk's state
    in memory once, and not a second time in messages that it has yet to send.
    """

    sequence: Count
    options: Annotated[Options | None, UNUSED] = None  # as stores understand them


@body(Kind.SNAPSHOT_END)
class SnapshotEnd(Body, frozen=True):
    """The end of a snapshot from one server, which has sent all of its part before.

    A server sends it to the reader.
    """

    generation: Count
    sequence: Count
    version: Count
    # of the coordinator, where the reader asked for "state" or "standing"
    state: CoordinatorState | None = None
    given_up: Text = ""  # why the rest is not sent, in words; empty where all was
    # of the optimizer that raised, from a parameter server by itself; it sends such an end also instead of the weights
    # that a push makes, under the push's number
    # this, traceback and kind: see `steepest.errors.describe_error`
    error: Text = ""
    traceback: Text = ""
    kind: Text = ""


@body(Kind.PUT)
class Put(Body, frozen=True):
    """One chunk of weights, in its dtype, to be installed later.

    A client sends it to every server that holds the chunk.
    """

    sequence: Count  # the client's count of its requests; one for all messages of a put
    number: (
        Count  # of this message among those of the put, from 0; by it the message is acknowledged
    )
    chunk: ChunkIndex


@body(Kind.PUT_STATE)
class PutState(_Tensor, frozen=True, kw_only=True):
    """One tensor of optimizer state, to be installed later.

    A client sends it to every server that holds the chunk.
    """

    number: Count = 0  # as in `Put`


@body(Kind.REPLACE_STATE)
class ReplaceState(Body, frozen=True):
    """The put replaces all optimizer state, even if it holds no tensor of it.

    A client sends it to every server, after all other messages of the put, when it installs weights
    together with optimizer state.
    """

    sequence: Count
    number: Count  # as in `Put`


@body(Kind.PUT_RECEIVED)
class PutReceived(Body, frozen=True):
    """A server has received one message of a put.

    The server sends it to the client.
    """

    sequence: Count
    number: Count  # of the message that was received


@body(Kind.INSTALL)
class Install(Body, frozen=True):
    """A request to make a put the state of the job.

    A client sends it to the coordinator when servers have acknowledged all messages of the put.
    """

    sequence: Count
    version: Count  # that the state has from now on
    # whether the shares of the samples begin anew at that version
    anew: bool = False
    # of the coordinator, or parts of it, see `SharedState`; None to keep its ledger and counters
    state: CoordinatorState | None = None


@body(Kind.INSTALLED)
class Installed(Body, frozen=True):
    """The put is the state of the job.

    The coordinator sends it to the client, in answer to an INSTALL.
    """

    generation: Count  # that has begun
    sequence: Count
    version: Count


@body(Kind.REFUSED)
class Refused(Body, frozen=True):
    """A request of a client is refused, and nothing of it is done.

    The coordinator or a server sends it to the client, in answer to any request that is invalid. The
    coordinator also does so in answer to an INSTALL when a process is dead.
    """

    sequence: Count  # of the request
    why: Text  # in words
    peer: Peer | None = None  # the dead process; None without one


@body(Kind.INSTALL_PUT)
class InstallPut(Decision, frozen=True):
    """The order to install the states that clients have put.

    The coordinator of a parameter server by itself sends it to every server; a training job's
    coordinator does so with MEMBERS.
    """

    # (role, index, request number) of each client whose put is installed
    install: Puts
