"""The Channel and Transport protocols: what carries messages between processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from steepest.messages.message import Message, Peer


class Address(NamedTuple):
    """Where a process listens: TCP for other nodes, a Unix-domain socket for its own.

    Attributes:
        node: Ray node id (or any name) that tells hosts apart.
        host, port: of the TCP socket; port 0 where there is none.
        unix: name of the Unix-domain socket; starts with a NUL byte in Linux' abstract namespace; empty for none.
        peers: the roles that the process hosts.
    """

    node: str
    host: str
    port: int
    unix: str
    peers: tuple[Peer, ...]


class Channel(Protocol):
    """One ordered, framed, two-way stream between this process and one other.

    `send` never blocks: what the stream does not take at once is kept and follows when it can, in
    order. A payload is not copied by `send`; `own_pending` copies those that have not left yet, for an
    owner who is about to change them. A channel closes when its peer dies.
    """

    @property
    def name(self) -> str:
        """Whom it leads to, for errors."""

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The roles hosted at the other end."""

    @property
    def pending(self) -> int:
        """Bytes accepted by `send` that have not left yet."""

    def send(self, message: Message) -> None:
        """Queues a message."""

    def own_pending(self, memory: torch.Tensor) -> None:
        """Copies queued payloads that lie in this memory (flat, uint8), so that it may be changed."""

    def close(self) -> None:
        """Closes this end; the other sees the end of the stream."""


#: Tells a transport where a payload that begins to arrive goes (see `steepest.transport.frames.Sink`); it is given the
#: channel as well, because whoever is at the other end may name another process as the sender.
ChannelSink = Callable[[Channel, Message, int], torch.Tensor | None]


class Event(NamedTuple):
    """Something that a transport saw: a message, a new channel, or (both None) a closed one."""

    channel: Channel
    message: Message | None
    reason: str = ""


class Transport(Protocol):
    """All channels of one process, served by one thread."""

    def poll(self, timeout: float) -> list[Event]:
        """Moves bytes both ways; waits up to `timeout` seconds for the first event."""

    def pump(self) -> None:
        """Sends what can be sent now, without waiting."""

    def in_use(self, memory: torch.Tensor) -> bool:
        """Whether a peer may still be reading this memory, or has yet to be sent it: it must not change."""

    def wake(self) -> None:
        """Ends a `poll` in progress; the only method that other threads may call."""

    def close(self) -> None:
        """Closes every channel."""


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two flat uint8 tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.numel() and b.data_ptr() < a.data_ptr() + a.numel()
