"""The messages by which clients read one version of the state, or install another state."""

from collections.abc import Sequence as Seq
from dataclasses import field
from typing import Annotated, Any

from steepest.core.messages.fields import (
    CHUNK,
    COUNT,
    FLAG,
    PEER,
    PUTS,
    STATE,
    TEXT,
    UNUSED,
    many,
    nothing_or,
    one_of,
)
from steepest.core.messages.gradients import Decision
from steepest.core.messages.message import Kind, Peer
from steepest.core.messages.schema import (
    Body,
    Chunk,
    Generation,
    Header,
    Sequence,
    Version,
    body,
)

#: The number of a message among those of one put, from 0; by it the message is acknowledged.
Number = Annotated[int, Header("version")]
_WHAT = one_of("weights", "state", "standing", "opaque")
#: How opaque chunks are to be read, as their stores understand it.
Options = dict[str, Any]


@body(Kind.READ)
class Read(Body):
    """A request for a snapshot: one version over all servers.

    The driver's client, or a user of a parameter server, sends it to the coordinator.
    """

    sequence: Sequence
    # "weights"; "state" adds the optimizer's and the coordinator's; "standing": only version and coordinator's state;
    # "opaque": only opaque chunks
    what: Annotated[str, _WHAT] = "weights"
    chunks: Annotated[Seq[int] | None, many(CHUNK)] = None  # that are wanted; None for all
    # how to read opaque chunks; None for no options
    options: Annotated[Options | None, UNUSED] = None
    # the version that is wanted, or the present one if that is later; the request waits until it is committed, or a
    # later request of the reader replaces this one
    at: Version = 0


@body(Kind.SNAPSHOT)
class Snapshot(Body):
    """The order to send a reader the state that it asked for.

    The coordinator sends it to every server between two commits, so that all send one version.
    """

    generation: Generation
    sequence: Sequence  # this, what, chunks and options: of the request, see `Read`
    version: Version  # that the servers are at
    reader: Annotated[Peer, PEER]  # that asked
    what: Annotated[str, _WHAT]
    chunks: Annotated[Seq[int] | None, many(CHUNK)] = None
    options: Annotated[Options | None, UNUSED] = None
    # of the coordinator, to be passed on to the reader; None where only weights are read
    state: Annotated[dict[str, Any] | None, STATE] = None


@body()
class _Tensor(Body):
    """One tensor of optimizer state: elements [start, stop) of a flattened parameter of a chunk."""

    sequence: Sequence  # of the request to which it belongs
    chunk: Chunk
    name: Annotated[str, TEXT]
    key: Annotated[str, TEXT]  # of the tensor in the optimizer's state of that parameter
    start: Annotated[int, COUNT]
    stop: Annotated[int, COUNT]
    # whether it stands for a plain value, see `steepest.core.optim.portable`
    plain: Annotated[bool, FLAG]
    dtype: Annotated[str, TEXT]  # without "torch."
    shape: Annotated[Seq[int], many(COUNT)]

    @property
    def about(self) -> dict[str, Any]:
        """The description of the tensor, as checkpoints and servers have it."""
        names = ("name", "key", "start", "stop", "plain", "dtype", "shape")
        return {name: getattr(self, name) for name in names}


@body(Kind.STATE)
class StateTensor(_Tensor):
    """One tensor of optimizer state, or of the state of an opaque chunk, in a snapshot.

    A server sends it to the client that reads "state" or "opaque".
    """

    # whether the server sends more when a READ_ON has come
    waits: Annotated[bool, FLAG] = field(default=False, kw_only=True)


@body(Kind.READ_ON)
class ReadOn(Body):
    """A request for the next piece of a snapshot, or its end.

    The client sends it to the server of each STATE that waits for it, so that the server holds an opaque chunk's state
    in memory once, and not a second time in messages that it has yet to send.
    """

    sequence: Sequence
    options: Annotated[Options | None, UNUSED] = None  # as stores understand them


@body(Kind.SNAPSHOT_END)
class SnapshotEnd(Body):
    """The end of a snapshot from one server, which has sent all of its part before.

    A server sends it to the reader.
    """

    generation: Generation
    sequence: Sequence
    version: Version
    # of the coordinator, where the reader asked for "state" or "standing"
    state: Annotated[dict[str, Any] | None, STATE] = None
    given_up: Annotated[str, TEXT] = ""  # why the rest is not sent, in words; empty where all was
    # of the optimizer that raised, from a parameter server by itself; it sends such an end also instead of the weights
    # that a push makes, under the push's number
    # this, traceback and kind: see `steepest.errors.describe_error`
    error: Annotated[str, TEXT] = ""
    traceback: Annotated[str, TEXT] = ""
    kind: Annotated[str, TEXT] = ""


@body(Kind.PUT)
class Put(Body):
    """One chunk of weights, in its dtype, to be installed later.

    A client sends it to every server that holds the chunk.
    """

    sequence: Sequence  # the client's count of its requests; one for all messages of a put
    number: Number  # of this message among those of the put, from 0
    chunk: Chunk


@body(Kind.PUT_STATE)
class PutState(_Tensor):
    """One tensor of optimizer state, to be installed later.

    A client sends it to every server that holds the chunk.
    """

    number: Number = field(default=0, kw_only=True)  # as in `Put`


@body(Kind.REPLACE_STATE)
class ReplaceState(Body):
    """The put replaces all optimizer state, even if it holds no tensor of it.

    A client sends it to every server, after all other messages of the put, when it installs weights
    together with optimizer state.
    """

    sequence: Sequence
    number: Number  # as in `Put`


@body(Kind.PUT_RECEIVED)
class PutReceived(Body):
    """A server has received one message of a put.

    The server sends it to the client.
    """

    sequence: Sequence
    number: Number  # of the message that was received


@body(Kind.INSTALL)
class Install(Body):
    """A request to make a put the state of the job.

    A client sends it to the coordinator when servers have acknowledged all messages of the put.
    """

    sequence: Sequence
    version: Version  # that the state has from now on
    # whether the shares of the samples begin anew at that version
    anew: Annotated[bool, FLAG] = False
    # of the coordinator, or parts of it, see `SharedState`; None to keep its ledger and counters
    state: Annotated[dict[str, Any] | None, nothing_or(STATE)] = None


@body(Kind.INSTALLED)
class Installed(Body):
    """The put is the state of the job.

    The coordinator sends it to the client, in answer to an INSTALL.
    """

    generation: Generation  # that has begun
    sequence: Sequence
    version: Version


@body(Kind.REFUSED)
class Refused(Body):
    """A request of a client is refused, and nothing of it is done.

    The coordinator or a server sends it to the client, in answer to any request that is invalid. The
    coordinator also does so in answer to an INSTALL when a process is dead.
    """

    sequence: Sequence  # of the request
    why: Annotated[str, TEXT]  # in words
    peer: Annotated[Peer | None, nothing_or(PEER)] = None  # the dead process; None without one


@body(Kind.INSTALL_PUT)
class InstallPut(Decision):
    """The order to install the states that clients have put.

    The coordinator of a parameter server by itself sends it to every server; a training job's
    coordinator does so with MEMBERS.
    """

    # (role, index, request number) of each client whose put is installed
    install: Annotated[Seq[Seq[Any]], PUTS]
