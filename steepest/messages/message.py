"""What travels between processes: peers, message kinds and one message type."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class Peer(NamedTuple):
    """A role and its index, such as ``Peer("worker", 2)``; the name used in every error."""

    role: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here

    def __str__(self) -> str:
        return self.role if self.role == "coordinator" else f"{self.role} {self.index}"


COORDINATOR = Peer("coordinator", 0)
WHOLE = -1  # the chunk index of what is about no chunk, or about all of the weights


def worker_peer(index: int) -> Peer:
    """The peer of worker `index`."""
    return Peer("worker", index)


def server_peer(index: int) -> Peer:
    """The peer of server `index`."""
    return Peer("server", index)


def relay_peer(index: int) -> Peer:
    """The peer of the relay beside server `index`."""
    return Peer("relay", index)


def member_peer(rank: int) -> Peer:
    """The peer of a member of a collective."""
    return Peer("member", rank)


class Kind(enum.IntEnum):
    """Message kinds; the comment says who sends it to whom, and what it means."""

    # gradients and weights
    PUSH = 1  # worker -> server, relay: one chunk of a gradient (or nothing, weight 0)
    HOST_PUSH = 2  # relay -> server: one chunk of the sum of the gradients of a host's workers
    VERSION_STAGED = 3  # server -> coordinator: the gradients of every member for a version are staged and reduced here
    PUSH_STAGED = 4  # server -> coordinator: every chunk of one push is staged here
    REPORT = 5  # worker -> coordinator: every chunk of a gradient is pushed; samples, loss, metrics, timings
    COMMIT = 6  # coordinator -> server: apply these pushes as the next version
    DISCARD = 7  # coordinator -> server: these pushes will not be committed
    REFRESH = 8  # coordinator -> server: send these workers the weights as they are
    LOGGED = 9  # server -> coordinator: a commit is known in a process other than the coordinator's
    WEIGHTS = 10  # server -> worker, relay, client; relay -> worker: one chunk of the weights at a version
    WEIGHTS_SHARED = 11  # relay -> worker: the memory in which the weights of its host lie
    # membership and credit
    JOIN = 12  # worker -> coordinator: ready to be a member
    MEMBERS = 13  # coordinator -> server, worker: a generation begins; pushes of earlier ones are void
    WORKER_JOINED = 14  # coordinator -> server: a worker has joined the generation; send it the weights
    WORKER_ENDED = 15  # coordinator -> server: a life of a worker is over; its pushes are void but for complete ones
    GRANT = 16  # coordinator -> worker: steps may be taken up to this version
    LEASE = 17  # coordinator -> worker: compute this share of the samples, from this version
    FAILED = 18  # worker -> coordinator: computing the gradient raised
    # the driver
    ASK = 19  # client -> coordinator: grant that many more steps
    RESULT = 20  # coordinator -> client: a step was committed
    FAILURE = 21  # coordinator -> client: the step cannot be committed, and why
    REVOKE = 22  # client -> coordinator: take back what is granted and not committed
    REVOKED = 23  # coordinator -> client: it is taken back, at this version
    STOP = 24  # client -> coordinator: grant nothing more, and finish the steps that are begun
    STOPPED = 25  # coordinator -> client: the last version that will come
    GIVE_UP = 26  # client -> coordinator: a worker is silent or cut off; do without it
    WORKER_LOST = 27  # coordinator -> client: a worker is gone, and another one may join in its place
    READ_COUNTERS = 28  # client -> coordinator
    COUNTERS = 29  # coordinator -> client: version, generation, step, and what was committed so far
    READ_LOG = 30  # client -> coordinator: entries of the log, from one on
    LOG_PAGE = 31  # coordinator -> client: some of them
    # snapshots and installs
    READ = 32  # client -> coordinator: send me the weights, or everything, at one version
    SNAPSHOT = 33  # coordinator -> server: send that reader what it asked for, at this version
    STATE = 34  # server -> client: one tensor of optimizer state
    SNAPSHOT_END = 35  # server -> client, user: everything that was asked for is sent
    PUT = 36  # client -> server: one chunk of weights to be installed
    PUT_STATE = 37  # client -> server: one tensor of optimizer state to be installed
    REPLACE_STATE = 38  # client -> server: what is put replaces all optimizer state, even if no tensor of it comes
    PUT_RECEIVED = 39  # server -> client: one of these three has come
    INSTALL = 40  # client -> coordinator: make what was put the state, at this version
    INSTALLED = 41  # coordinator -> client: it is
    INSTALL_REFUSED = 42  # coordinator -> client: it will not be, because a process is gone
    INSTALL_PUT = 43  # coordinator -> server of a parameter server: make what these clients put the state
    # users of a parameter server
    PUSHED = 44  # user -> coordinator: every chunk of a push is on its way
    PUSH_COMMITTED = 45  # coordinator -> user: the push is part of the weights
    PUSH_REFUSED = 46  # coordinator -> user: the push holds NaN or infinity
    USER_LEFT = 47  # server -> coordinator: the channel of a user is closed, and what had arrived is staged
    # collective operations
    DATA = 48  # member -> member: what an operation, or a user, sends
    CONNECTED = 49  # member -> member: this channel is open
    ABORT = 50  # member -> member: nothing more will come, and why


@dataclass(slots=True, eq=False)
class Message:
    """One message: a few fixed fields, a little JSON, and at most one payload.

    Attributes:
        kind: what it says.
        generation: the membership it belongs to.
        incarnation: which life of the sending process.
        sequence: the sender's own count (a worker's pushes, a client's requests).
        version: of the weights: pulled (PUSH), committed (COMMIT, WEIGHTS, RESULT) or granted (GRANT).
        chunk: chunk index, or -1.
        weight: what one unit of the payload weighs (see `steepest.engine.worker`), or COMMIT's scale.
        total: the summed sample weight behind the payload.
        meta: small JSON-able values, or None.
        payload: a contiguous one-dimensional uint8 CPU tensor, or None. Whoever sends it leaves it
            unchanged until the receiver is known to be done with it.
        source, target: filled in by the router.
    """

    kind: Kind
    generation: int = 0
    incarnation: int = 0
    sequence: int = 0
    version: int = 0
    chunk: int = -1
    weight: float = 0.0
    total: float = 0.0
    meta: dict[str, Any] | None = None
    payload: torch.Tensor | None = None
    source: Peer | None = None
    target: Peer | None = None

    def values(self) -> dict[str, Any]:
        """`meta`, or an empty dict."""
        return self.meta if self.meta is not None else {}


#: How a role sends: to whom, what. Never blocks.
Send = Callable[[Peer, Message], None]
