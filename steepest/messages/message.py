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
    """Message kinds; the comment says who sends it to whom, and what it carries."""

    PUSH = 1  # worker (or its relay) -> server: one chunk of a gradient (or nothing, weight 0)
    STAGED = 2  # server -> coordinator: every chunk of a version is staged here; sum of squares, finite
    COMMIT = 3  # coordinator -> server: apply these contributions as the next version
    WEIGHTS = 4  # server -> worker (or its relay) or client: one chunk of the weights at a version
    REPORT = 5  # worker -> coordinator: everything is pushed; loss, samples, metrics, timings
    JOIN = 6  # worker -> coordinator: ready to be a member
    MEMBERS = 7  # coordinator -> worker, server: a new generation; older staged pushes are void
    GRANT = 8  # coordinator -> worker: steps may be taken up to this version
    FAILED = 9  # worker -> coordinator: computing the gradient raised
    ASK = 10  # client -> coordinator: grant that many more steps
    RESULT = 11  # coordinator -> client: a step was committed
    FAILURE = 12  # coordinator -> client: the step cannot be committed, and why
    READ = 13  # client -> coordinator: send me the weights, or everything, at one version
    SNAPSHOT = 14  # coordinator -> server: send that reader what it asked for, at this version
    STATE = 15  # server <-> client: one tensor of optimizer state
    END = 16  # server -> client: a snapshot is complete; a put is received
    PUT = 17  # client -> server: one chunk of new weights, installed later
    INSTALL = 18  # client -> coordinator: make what was put the state, at this version
    INSTALLED = 19  # coordinator -> client: it is
    STATS = 20  # client -> coordinator, and back: counters, or the log
    DISCARD = 21  # coordinator -> server: these pushes will not be committed; send those workers the weights
    LEFT = 22  # server -> coordinator: somebody who pushed is gone, all that arrived is staged; -> client: a worker
    DATA = 23  # member -> member: what a collective operation, or a user, sends; without a payload: "I am here"
    LOGGED = 25  # a server beside which no coordinator lives -> coordinator: it has heard of this commit
    ABORT = 24  # member -> member: nothing more will come, and why


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
