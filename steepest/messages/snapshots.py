"""The messages by which clients read one version over all servers, and put another state in its place."""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass, field
from typing import Annotated, Any

from steepest.messages.fields import (
    CHUNK,
    COUNT,
    FLAG,
    PEER,
    PUTS,
    STATE,
    TEXT,
    many,
    nothing_or,
    one_of,
)
from steepest.messages.gradients import Decision
from steepest.messages.message import Kind, Peer
from steepest.messages.schema import (
    Body,
    Chunk,
    Generation,
    Header,
    Payload,
    Sequence,
    Version,
    body,
)

#: Which of the messages of one put it is; by this it is acknowledged.
Number = Annotated[int, Header("version")]
_WHAT = one_of("weights", "state", "standing")


@body(Kind.READ)
@dataclass(frozen=True)
class Read(Body):
    """Have all servers send one version; from a client, or a parameter server's user, to the coordinator.

    Attributes:
        what: "weights"; "state" for the optimizer's and the coordinator's state as well; "standing"
            for the version and the coordinator's state alone.
        chunks: of the weights; None for all.
    """

    sequence: Sequence
    what: Annotated[str, _WHAT] = "weights"
    chunks: Annotated[Row[int] | None, many(CHUNK)] = None


@body(Kind.SNAPSHOT)
@dataclass(frozen=True)
class Snapshot(Body):
    """Send a reader what it asked for; from the coordinator to every server, between two commits.

    Attributes:
        sequence, what, chunks: of its request, see `Read`.
        state: of the coordinator, to be passed on; None where only weights are read.
    """

    generation: Generation
    sequence: Sequence
    version: Version
    reader: Annotated[Peer, PEER]
    what: Annotated[str, _WHAT]
    chunks: Annotated[Row[int] | None, many(CHUNK)] = None
    state: Annotated[dict[str, Any] | None, STATE] = None


@dataclass(frozen=True)
class _Tensor(Body):
    """One tensor of optimizer state.

    Attributes:
        name: of the parameter.
        key: of the optimizer's state of that parameter.
        start, stop: the elements of the parameter that it is about.
        plain: whether the optimizer holds a number instead of a tensor.
        dtype: without "torch.".
        shape: of the tensor.
    """

    sequence: Sequence
    chunk: Chunk
    name: Annotated[str, TEXT]
    key: Annotated[str, TEXT]
    start: Annotated[int, COUNT]
    stop: Annotated[int, COUNT]
    plain: Annotated[bool, FLAG]
    dtype: Annotated[str, TEXT]
    shape: Annotated[Row[int], many(COUNT)]
    payload: Payload = field(default=None, compare=False, kw_only=True)

    @property
    def about(self) -> dict[str, Any]:
        """Return what the record is, as checkpoints and servers have it."""
        names = ("name", "key", "start", "stop", "plain", "dtype", "shape")
        return {name: getattr(self, name) for name in names}


@body(Kind.STATE)
@dataclass(frozen=True)
class StateTensor(_Tensor):
    """One tensor of optimizer state; from a server to the client that reads it."""


@body(Kind.SNAPSHOT_END)
@dataclass(frozen=True)
class SnapshotEnd(Body):
    """Everything of a snapshot that this server has was sent; from a server to the reader.

    Attributes:
        version: of the snapshot.
        state: of the coordinator, where it was asked for.
    """

    generation: Generation
    sequence: Sequence
    version: Version
    state: Annotated[dict[str, Any] | None, STATE] = None


@body(Kind.PUT)
@dataclass(frozen=True)
class Put(Body):
    """One chunk of weights, to be installed later; from a client to the servers of the chunk."""

    sequence: Sequence
    number: Number
    chunk: Chunk
    payload: Payload = field(default=None, compare=False)


@body(Kind.PUT_STATE)
@dataclass(frozen=True)
class PutState(_Tensor):
    """One tensor of optimizer state, to be installed later; from a client to the servers of the chunk."""

    number: Number = field(default=0, kw_only=True)


@body(Kind.REPLACE_STATE)
@dataclass(frozen=True)
class ReplaceState(Body):
    """The tensors that are put replace all optimizer state, also if there is none; from a client to every server."""

    sequence: Sequence
    number: Number


@body(Kind.PUT_RECEIVED)
@dataclass(frozen=True)
class PutReceived(Body):
    """One of the messages of a put is there; from a server to the client."""

    sequence: Sequence
    number: Number


@body(Kind.INSTALL)
@dataclass(frozen=True)
class Install(Body):
    """Make what was put the state; from a client to the coordinator, when all of it is acknowledged.

    Attributes:
        version: that it is from now on.
        anew: whether the shares of the samples begin anew there.
        state: of the coordinator, or parts of it; what is missing begins anew.
    """

    sequence: Sequence
    version: Version
    anew: Annotated[bool, FLAG] = False
    state: Annotated[dict[str, Any] | None, nothing_or(STATE)] = None


@body(Kind.INSTALLED)
@dataclass(frozen=True)
class Installed(Body):
    """It is the state at this version; from the coordinator to the client."""

    generation: Generation
    sequence: Sequence
    version: Version


@body(Kind.INSTALL_REFUSED)
@dataclass(frozen=True)
class InstallRefused(Body):
    """Nothing is installed, because a process is gone; from the coordinator to the client."""

    sequence: Sequence
    peer: Annotated[Peer, PEER]
    why: Annotated[str, TEXT]


@body(Kind.INSTALL_PUT)
@dataclass(frozen=True)
class InstallPut(Decision):
    """Make what clients have put the state; from the coordinator of a parameter server by itself to every server.

    Attributes:
        install: (role, index, request) of each client.
    """

    install: Annotated[Row[Row[Any]], PUTS]
