"""Messages as Ray actor calls, payloads through Ray's object store: how `simple` talks.

The driver calls each worker with what it has for it, and the call returns what the worker answers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from steepest.comm.channel import Event
from steepest.comm.frame import HEADER, Sink, decode_header, decode_meta, encode
from steepest.comm.message import Message, Peer

Bytes = npt.NDArray[np.uint8]
#: Headers of messages, and the payloads of those that have one, in order.
Parcel = tuple[list[bytes], list[Bytes]]

_INLINE_BYTES = 100_000
_POLL_SECONDS = 0.02


def unpack(heads: Sequence[bytes], payloads: Sequence[Bytes], sink: Sink) -> list[Message]:
    """Messages from their headers and payloads, these copied to where the sink says."""
    messages = []
    following = iter(payloads)
    for head in heads:
        message, meta_size, size = decode_header(head)
        if meta_size:
            message.meta = decode_meta(memoryview(head)[HEADER.size :])
        if size:
            payload = next(following)
            message.payload = sink(message, size)
            if message.payload is not None:
                message.payload.numpy()[:] = payload
        messages.append(message)
    return messages


class Outbox:
    """The worker's only channel: keeps what is sent until the driver's call returns it."""

    def __init__(self, peers: tuple[Peer, ...]) -> None:
        self.name = "the driver"
        self.peers = peers
        self.pending = 0
        self._heads: list[bytes] = []
        self._payloads: list[Bytes] = []

    def send(self, message: Message) -> None:
        """Keeps a message; its payload is copied, because the call returns later."""
        self._heads.append(encode(message))
        if message.payload is not None:
            self._payloads.append(message.payload.numpy().copy())

    def own_pending(self) -> None:
        """Payloads are copies already."""

    def close(self) -> None:
        """Forgets what is kept."""
        self.take()

    def take(self) -> Parcel:
        """What was sent since the last call."""
        parcel = (self._heads, self._payloads)
        self._heads, self._payloads = [], []
        return parcel


class IdleTransport:
    """The worker's transport: nothing arrives by itself; `poll` waits for calls."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def poll(self, timeout: float) -> list[Event]:
        """Waits until woken."""
        self._woken.wait(timeout)
        self._woken.clear()
        return []

    def pump(self) -> None:
        """Nothing leaves before the call returns."""

    def wake(self) -> None:
        """Ends `poll`."""
        self._woken.set()

    def close(self) -> None:
        """Nothing to close."""


class CallChannel:
    """The driver's channel to one worker: gathers messages for the next call."""

    def __init__(self, transport: CallTransport, peer: Peer, actor: Any) -> None:
        self.name = str(peer)
        self.peers = (peer,)
        self.pending = 0
        self.actor = actor
        self.heads: list[bytes] = []
        self.payloads: list[Any] = []
        self.closed = False
        self.new = True  # the first call takes along what the worker has to say by itself
        self._transport = transport

    def send(self, message: Message) -> None:
        """Keeps a message for the next call; its payload goes to the object store now."""
        if self.closed:
            return
        self.heads.append(encode(message))
        if message.payload is not None:
            self.payloads.append(self._transport.store(message))

    def own_pending(self) -> None:
        """Payloads are copies already."""

    def close(self) -> None:
        """No further calls."""
        self.closed = True


class CallTransport:
    """The driver's transport: one call at a time to each worker."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._channels: list[CallChannel] = []
        self._calls: dict[Any, CallChannel] = {}
        self._woken = threading.Event()
        self._stored: dict[tuple[int, int, int, int], Any] = {}
        self.bytes_stored = 0

    def channel(self, peer: Peer, actor: Any) -> CallChannel:
        """A channel to a worker."""
        channel = CallChannel(self, peer, actor)
        self._channels.append(channel)
        return channel

    def store(self, message: Message) -> Any:
        """A payload as a call's argument; one that goes to several workers is put only once."""
        assert message.payload is not None
        self.bytes_stored += message.payload.numel()
        if message.payload.numel() < _INLINE_BYTES:
            return message.payload.numpy().copy()
        key = (int(message.kind), message.generation, message.version, message.chunk)
        if key not in self._stored:
            if any(old[1:3] != key[1:3] for old in self._stored):
                self._stored.clear()
            self._stored[key] = ray.put(message.payload.numpy())
        return self._stored[key]

    def poll(self, timeout: float) -> list[Event]:
        """Starts calls for what is to be sent, and takes what finished calls return."""
        busy = set(self._calls.values())
        for channel in self._channels:
            if (channel.heads or channel.new) and channel not in busy and not channel.closed:
                channel.new = False
                heads, channel.heads = channel.heads, []
                payloads, channel.payloads = channel.payloads, []
                self._calls[channel.actor.deliver.remote(heads, *payloads)] = channel
        if not self._calls:
            self._woken.wait(timeout)
            self._woken.clear()
            return []
        done, _ = ray.wait(list(self._calls), timeout=min(timeout, _POLL_SECONDS))
        events: list[Event] = []
        for ref in done:
            channel = self._calls.pop(ref)
            try:
                heads, payloads = ray.get(ref)
            except ray.exceptions.RayError as error:
                channel.closed = True
                events.append(Event(channel, None, str(error).splitlines()[0]))
                continue
            events += [Event(channel, message) for message in unpack(heads, payloads, self._sink)]
        return events

    def pump(self) -> None:
        """Calls start in `poll`."""

    def wake(self) -> None:
        """Ends a `poll` that waits for nothing."""
        self._woken.set()

    def close(self) -> None:
        """No further calls."""
        for channel in self._channels:
            channel.close()
        self._stored.clear()
