"""Peers, message kinds, and the one type of message that travels between processes."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from steepest.core.messages.fields import Count, WorkerIndex

#: The roles of a job; their places are their numbers in frames.
ROLES = ("coordinator", "server", "worker", "client", "aggregator", "member")
_RoleName = Annotated[str, Meta(pattern=rf"\A({'|'.join(ROLES)})\Z")]


class Peer(NamedTuple):
    """A role and its index, such as ``Peer("worker", 2)``; the name used in every error."""

    role: _RoleName
    index: Count  # type: ignore[assignment]  # hides tuple.index, which has no use here

    def __str__(self) -> str:
        return self.role if self.role == "coordinator" else f"{self.role} {self.index}"


COORDINATOR = Peer("coordinator", 0)


def worker_peer(index: int) -> Peer:
    """Return the peer of worker `index`."""
    return Peer("worker", index)


def server_peer(index: int) -> Peer:
    """Return the peer of server `index`."""
    return Peer("server", index)


def aggregator_peer(index: int) -> Peer:
    """Return the peer of the aggregator beside server `index`."""
    return Peer("aggregator", index)


def member_peer(rank: int) -> Peer:
    """Return the peer of the member of a collective with this rank."""
    return Peer("member", rank)


class PushId(NamedTuple):
    """The identity of a push, by which it is applied at most once, however often it is sent."""

    worker: WorkerIndex  # that computed it, or a parameter server's user
    incarnation: Count  # number of lives of the worker before the one that computed it
    sequence: Count  # the worker's own count of its pushes


class MessageKind(enum.IntEnum):
    """A kind of messages: its name, and the number in a frame's header, which no other kind has.

    The core's kinds are `Kind`. A package that attaches to a job derives a class of its own kinds, with free numbers,
    and declares their senders and receivers by `OpaqueParts.lines`: in other jobs they are refused.
    """

    # an Enum's own is a function in Python, called several times for each message
    __hash__ = int.__hash__


class Kind(MessageKind):
    """The kinds of messages of a job that trains dense models, and of a parameter server.

    The body of each kind, in the module that is named, says which role sends it to which, and when.
    """

    # steepest.core.messages.gradients
    PUSH = 1
    HOST_PUSH = 2
    VERSION_STAGED = 3
    PUSH_STAGED = 4
    REPORT = 5
    COMMIT = 6
    DISCARD = 7
    REFRESH = 8
    LOGGED = 9
    WEIGHTS = 10
    WEIGHTS_SHARED = 11
    # steepest.core.messages.membership
    JOIN = 12
    MEMBERS = 13
    WORKER_JOINED = 14
    WORKER_ENDED = 15
    GRANT = 16
    LEASE = 17
    FAILED = 18
    GROUP_KEY = 55
    # steepest.core.messages.driver
    ASK = 19
    RESULT = 20
    FAILURE = 21
    REVOKE = 22
    REVOKED = 23
    STOP = 24
    STOPPED = 25
    GIVE_UP = 26
    WORKER_LOST = 27
    READ_COUNTERS = 28
    COUNTERS = 29
    READ_LOG = 30
    LOG_PAGE = 31
    DIFFERENCE = 56
    # steepest.core.messages.snapshots
    READ = 32
    SNAPSHOT = 33
    STATE = 34
    SNAPSHOT_END = 35
    PUT = 36
    PUT_STATE = 37
    REPLACE_STATE = 38
    PUT_RECEIVED = 39
    INSTALL = 40
    INSTALLED = 41
    REFUSED = 42
    INSTALL_PUT = 43
    READ_ON = 53
    # steepest.core.messages.users
    PUSHED = 44
    PUSH_COMMITTED = 45
    PUSH_REFUSED = 46
    USER_LEFT = 47


#: All kinds that have a body in this process, by number.
KINDS: dict[int, MessageKind] = {}


@dataclass(slots=True, eq=False)
class Message:
    """A message as it travels: its kind and receiver, its body, and at most one payload.

    Attributes:
        kind: says of which class the body is.
        body: a `steepest.core.messages.schema.Body` of this kind; of a message of another process its bytes, until
            the router has checked them.
        payload: contiguous one-dimensional uint8 memory, or None: a CPU tensor, or, in a process
            that does without torch, a NumPy array. The receiver has what its role's `destination`
            returned. The sender leaves it unchanged until the receiver is known to be done with it.
        source, target: the sending and the receiving role; set by the router.
    """

    kind: MessageKind
    body: Any
    payload: Any = None
    source: Peer | None = None
    target: Peer | None = None


#: How a role sends a message to a peer. Never blocks.
Send = Callable[[Peer, Message], None]
