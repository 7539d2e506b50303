"""The Channel and Transport protocols, by which messages travel between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from steepest.core.messages.message import Message, Peer
from steepest.core.tensors.memory import Memory, address_of

#: The ways in which processes communicate, see `ParameterServerStrategy`.
TRANSPORTS = ("wire", "shared", "unix", "tcp")


class Address(NamedTuple):
    """The addresses at which a process listens: TCP, and a Unix-domain socket for its own node.

    Attributes:
        node: Ray node id (or any name) that tells hosts apart.
        host, port: of the TCP socket; port 0 where there is none.
        unix: name of the Unix-domain socket; starts with a NUL byte in Linux' abstract namespace;
            empty for none.
        peers: the roles that the process hosts.
    """

    node: str
    host: str
    port: int
    unix: str
    peers: tuple[Peer, ...]


class Channel(Protocol):
    """One ordered, framed, two-way stream between this process and one other.

    Bytes that the stream does not take at once are kept, and follow in order as soon as it takes
    them. `send` does not copy a payload; `own_pending` copies queued payloads for an owner that is
    about to change them. A channel closes when its peer dies.
    """

    @property
    def name(self) -> str:
        """The process at the other end, for errors."""

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The roles hosted at the other end."""

    @property
    def pending(self) -> int:
        """The number of bytes accepted by `send` that have not left yet."""

    def send(self, message: Message) -> None:
        """Queue a message; never blocks.

        The payload must stay unchanged until it has left, or the receiver is done with it.

        Raises:
            MessageTooLargeError: the message has over 4 MB beside its payload.
        """

    def own_pending(self, memory: Memory) -> None:
        """Copy queued payloads that lie in this memory (flat, uint8), which may change afterwards."""

    def drop_arriving(self, memory: Memory) -> None:
        """Stop writing to this memory (flat, uint8): a payload that is half-way there is discarded.

        Its message is delivered without a payload.
        """

    def close(self) -> None:
        """Close this end; the other end reads the end of the stream."""


#: Returns the memory for a payload that begins to arrive (see `steepest.core.transport.frames.Sink`).
#: It is given the channel, too, because the process at the other end may name another sender.
ChannelSink = Callable[[Channel, Message, int], Memory | None]


class TransportEvent(NamedTuple):
    """An event of a transport: a message, a new channel, or a closed channel.

    Attributes:
        channel: on which it happened.
        message: that has arrived; None for a new or closed channel.
        reason: "opened" for a new channel, the cause for a closed one, empty for a message.
    """

    channel: Channel
    message: Message | None
    reason: str = ""


class Transport(Protocol):
    """All channels of one process, served by one thread."""

    # the address of this host at which it listens, "" before it does; None in a simulation, which has no sockets
    listens_at: str | None

    @property
    def encrypts(self) -> bool:
        """Whether bytes to other hosts are encrypted."""

    def poll(self, timeout: float) -> list[TransportEvent]:
        """Move bytes both ways.

        Return the events since the last call, oldest first, or wait `timeout` seconds for one.
        """

    def pump(self) -> None:
        """Send the queued bytes that channels take now, without waiting."""

    def in_use(self, memory: Memory) -> bool:
        """Return whether this memory (flat, uint8) must not change.

        That is so while a peer may be reading it, or some of it has not left yet.
        """

    def wake(self) -> None:
        """End a `poll` in progress; the only method that other threads may call."""

    def close(self) -> None:
        """Close every channel."""


def overlap(a: Memory, b: Memory) -> bool:
    """Return whether two payloads share memory."""
    start, other = address_of(a), address_of(b)
    return bool(start < other + b.nbytes and other < start + a.nbytes)
