"""Messages as Ray actor calls, payloads through Ray's object store: no socket of our own.

Of two processes one calls and the other, an actor, is called. A call takes along what the caller has to say
and returns what the callee has for it. The caller keeps one call in flight, which the callee holds until it
has something to say, `_HOLD_SECONDS` are over or a newer call has come; so either may speak at any time. Ray
runs the calls of a threaded actor, and completes them, in any order: calls are numbered, and so are the
answers that say something; both ends put them back in order.

A caller that closes its channel says so. A caller that dies does not, and nothing here notices it (what is
meant for it is kept): that is left to the driver, which watches all processes through Ray.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, NamedTuple

import ray
import torch

from steepest.errors import DeadlineError, PeerLostError, ProtocolError, ShutdownError
from steepest.messages.message import Kind, Message, Peer
from steepest.messages.permissions import SUCCEEDED
from steepest.transport.channel import ChannelSink, Event
from steepest.transport.frames import encode
from steepest.transport.ray_parcels import (
    ANSWER_HEAD,
    CALL_HEAD,
    END,
    HELLO,
    NOTHING,
    SAY,
    SMALL_BYTES,
    InOrder,
    Parcel,
    unpack,
)
from steepest.transport.ray_parcels import Bytes as Bytes

log = logging.getLogger(__name__)

_Call = tuple[int, memoryview, Sequence[Bytes]]  # what it is, what follows the head, payloads

_FULL_BYTES = 1 << 20  # a caller that has gathered more does not wait for the end of its turn
_IN_FLIGHT = 4
_HOLD_SECONDS = 2.0
_GATHER_SECONDS = 0.02  # in a long turn, answers gather for about so long


class Callee(NamedTuple):
    """Whom to call: an actor with a method `exchange`, and the roles that it hosts."""

    peers: tuple[Peer, ...]
    actor: Any


def threads_for(callers: int) -> int:
    """The `max_concurrency` that an actor needs for calls that it holds, beside what it needs otherwise."""
    return 2 * callers


class _Channel:
    """What both ends have in common: they gather what is sent. Used on the router's thread."""

    def __init__(self, transport: CallTransport, peers: tuple[Peer, ...]) -> None:
        self.name = ""
        self.peers: tuple[Peer, ...] = ()
        self.introduce(peers)
        self.pending = 0  # payloads are copied at once
        self.closed = False
        self.parts: list[bytes] = []
        self.payloads: list[Any] = []
        self.size = 0
        self._transport = transport

    def introduce(self, peers: tuple[Peer, ...]) -> None:
        """Says who is at the other end."""
        self.name = " + ".join(map(str, peers))
        self.peers = peers

    def send(self, message: Message) -> None:
        """Keeps a message, with a copy of its payload, for the next call or answer."""
        if self.closed:
            return
        part = encode(message)
        if message.payload is not None:
            size = message.payload.numel()
            if size < SMALL_BYTES:
                part += message.payload.numpy().tobytes()
            else:
                try:
                    self.payloads.append(self._keep(message))
                except ray.exceptions.RayError as error:
                    self._transport.lose(self, f"its payload cannot be kept: {_reason(error)}")
                    return
            self.size += size
            self._transport.bytes_sent += size
        self.parts.append(part)

    def _keep(self, message: Message) -> Any:
        assert message.payload is not None
        return message.payload.numpy().copy()

    def gathered(self) -> tuple[bytes, list[Any]]:
        """What was sent since the last time."""
        taken = b"".join(self.parts), self.payloads
        self.parts, self.payloads, self.size = [], [], 0
        return taken

    def own_pending(self, memory: torch.Tensor) -> None:
        """Payloads are copies already."""

    def close(self) -> None:
        """Closes this end; what has not left is lost."""
        self._transport.forget(self)


class CallingChannel(_Channel):
    """A `Channel` to an actor; made by `CallTransport.connect`."""

    def __init__(self, transport: CallTransport, peers: tuple[Peer, ...], actor: Any, pause: float) -> None:
        super().__init__(transport, peers)
        self.in_flight = 0  # calls; counted down on Ray's threads
        self.listen_at = 0.0
        self._answers: InOrder[Parcel] = InOrder()
        self._pause = pause
        self._actor = actor
        self._key = secrets.randbits(64)
        self._calls = 0

    def _keep(self, message: Message) -> Any:
        return self._transport.store(message)

    def _call(self, what: int, text: bytes = b"", payloads: Sequence[Any] = ()) -> Any:
        head = CALL_HEAD.pack(self._key, self._calls, what)
        self._calls += 1
        return self._actor.exchange.remote(head + text, *payloads)

    def greet(self) -> Future[Parcel]:
        """The first call; nothing may be sent before it is answered."""
        future: Future[Parcel] = self._call(HELLO, json.dumps(self._transport.peers).encode()).future()
        return future

    def end(self) -> None:
        """The last call; whoever is dead need not be told."""
        with contextlib.suppress(ray.exceptions.RayError):
            self._call(END).future()  # Ray prints an error that nobody takes

    def flush(self) -> None:
        """Calls with what is gathered, unless too many calls are in flight."""
        if self.parts and self.in_flight < _IN_FLIGHT:
            self._start()

    def send(self, message: Message) -> None:
        """Keeps a message, with a copy of its payload, for the next call; does not wait long for that."""
        super().send(message)
        if self.size >= _FULL_BYTES:
            self.flush()

    def listen(self, now: float) -> float:
        """Sees to it that a call is in flight; returns when to look again, in seconds."""
        if self.in_flight or self.closed:
            return math.inf
        if now < self.listen_at:
            return self.listen_at - now
        self._start()
        return math.inf

    def take(self, parcel: Parcel) -> list[Parcel]:
        """Takes an answer; returns those whose turn it is."""
        number, more = ANSWER_HEAD.unpack_from(parcel[0])
        self.listen_at = 0.0 if more else time.monotonic() + self._pause
        return self._answers.put(number, parcel)

    def _start(self) -> None:
        try:
            future: Future[Parcel] = self._call(SAY, *self.gathered()).future()
        except ray.exceptions.RayError as error:
            self._transport.lose(self, _reason(error))
            return
        with self._transport.lock:
            self.in_flight += 1
        future.add_done_callback(lambda future: self._transport.returned(self, future))


class AnsweringChannel(_Channel):
    """A `Channel` to a caller; made by the transport when it calls for the first time."""

    def __init__(self, transport: CallTransport, key: int) -> None:
        super().__init__(transport, ())
        self.key = key
        self.calls: InOrder[_Call] = InOrder()
        # below: guarded by the transport's lock
        self.changed = threading.Condition(transport.lock)
        self.greeted = False
        self.newest = 0
        self.why_closed = ""
        self._ready: list[bytes] = []
        self._ready_payloads: list[Bytes] = []
        self._more = False
        self._answers = 0
        self._since = 0.0  # when the first message was gathered

    def send(self, message: Message) -> None:
        """Keeps a message, with a copy of its payload, for the next answer."""
        if not self.parts:
            self._since = time.monotonic()
        super().send(message)

    def flush(self, more: bool = False) -> None:
        """Lets the call that is held return; in the middle of a turn, more will follow."""
        if self.parts and not (more and time.monotonic() < self._since + _GATHER_SECONDS):
            with self.changed:
                text, payloads = self.gathered()
                self._ready.append(text)
                self._ready_payloads += payloads
                self._more = more
                self.changed.notify_all()

    def due(self, number: int) -> bool:
        """Whether a call has to return; the first one returns when the router knows the channel."""
        return self.closed or (self.greeted if number == 0 else bool(self._ready) or self.newest > number)

    def take(self) -> Parcel:
        """The next answer."""
        if not self._ready:
            return NOTHING
        parcel = (b"".join([ANSWER_HEAD.pack(self._answers, self._more), *self._ready]), self._ready_payloads)
        self._answers += 1
        self._ready, self._ready_payloads = [], []
        return parcel


class CallTransport:
    """A `Transport` over actor calls: calls actors, and answers when its own process is one.

    Args:
        sink: where arriving payloads go; asked on the thread that polls.
        peers: the roles of this process, told to whom it calls.
    """

    def __init__(self, sink: ChannelSink, peers: tuple[Peer, ...] = ()) -> None:
        self.peers = peers
        self.refused = 0
        self.bytes_sent = 0
        self.lock = threading.Lock()
        self._sink = sink
        self._calling: list[CallingChannel] = []
        self._answering: list[AnsweringChannel] = []  # those that the router knows
        self._callers: dict[int, AnsweringChannel] = {}
        self._returned: deque[tuple[CallingChannel, Future[Parcel]]] = deque()
        self._called: deque[tuple[AnsweringChannel, int, _Call]] = deque()
        self._events: list[Event] = []
        self._woken = threading.Event()
        self._stored: dict[tuple[int, ...], Any] = {}
        self._closed = False

    # -- calling -------------------------------------------------------------------------------

    def connect(
        self, peers: tuple[Peer, ...], actor: Any, timeout: float = 10.0, *, pause: float = 0.0
    ) -> CallingChannel:
        """Becomes a caller of an actor that hosts these roles.

        Args:
            pause: seconds without a call in flight after an answer; spares calls to one who only answers.

        Raises:
            PeerLostError: it is dead, or takes no calls.
            DeadlineError: no answer within `timeout` seconds.
        """
        channel = CallingChannel(self, peers, actor, pause)
        try:
            channel.greet().result(timeout)
        except FutureTimeoutError:
            channel.end()
            raise DeadlineError(f"{channel.name} did not answer a call within {timeout:g} s") from None
        except ray.exceptions.RayError as error:
            raise PeerLostError(f"cannot call {channel.name}: {_reason(error)}") from error
        self._calling.append(channel)
        return channel

    def store(self, message: Message) -> Any:
        """Puts a payload into the object store; weights that go to several workers only once."""
        assert message.payload is not None
        data = message.payload.numpy()
        if message.kind is not Kind.WEIGHTS:
            return ray.put(data)
        key = (message.generation, message.version, message.chunk, data.ctypes.data, data.nbytes)
        if key not in self._stored:
            if any(old[:2] != key[:2] for old in self._stored):
                self._stored.clear()
            self._stored[key] = ray.put(data)
        return self._stored[key]

    def returned(self, channel: CallingChannel, future: Future[Parcel]) -> None:
        """A call has returned; this is one of Ray's threads."""
        with self.lock:
            channel.in_flight -= 1
            self._returned.append((channel, future))
        self._woken.set()

    # -- answering -----------------------------------------------------------------------------

    def answer(self, call: bytes, payloads: Sequence[Bytes]) -> Parcel:
        """Takes a call of `exchange` and waits for what is to be said to the caller; any thread may do this.

        Raises:
            ShutdownError: this process does not serve any more.
            PeerLostError: this end of the channel is closed.
        """
        key, number, what = CALL_HEAD.unpack_from(call)
        with self.lock:
            channel = self._callers.get(key)
            if what == END and (self._closed or channel is None):
                return NOTHING
            if self._closed:
                raise ShutdownError("the process is shut down")
            if channel is None and what == HELLO:
                channel = self._callers[key] = AnsweringChannel(self, key)
            if channel is None:
                raise PeerLostError("it has closed this channel")
            channel.newest = max(channel.newest, number)
            channel.changed.notify_all()
            self._called.append((channel, number, (what, memoryview(call)[CALL_HEAD.size :], payloads)))
            self._woken.set()
            if what == END:
                return NOTHING
            channel.changed.wait_for(lambda: channel.due(number), None if number == 0 else _HOLD_SECONDS)
            if channel.closed:
                raise PeerLostError(channel.why_closed)
            return NOTHING if number == 0 else channel.take()

    # -- Transport -----------------------------------------------------------------------------

    def poll(self, timeout: float) -> list[Event]:
        """Lets what was sent leave, and waits up to `timeout` seconds for the first event."""
        for answering in self._answering:
            answering.flush()
        for calling in list(self._calling):
            calling.flush()
        self._take()
        now = time.monotonic()
        for calling in list(self._calling):
            timeout = min(timeout, calling.listen(now))
        if not self._events:
            self._woken.wait(max(timeout, 0.0))
            self._woken.clear()
            self._take()
        events, self._events = self._events, []
        return events

    def _take(self) -> None:
        """Takes what Ray's threads have left."""
        while self._returned:
            self._take_answer(*self._returned.popleft())
        while self._called:
            channel, number, call = self._called.popleft()
            for ready in channel.calls.put(number, call):
                self._take_call(channel, ready)

    def _take_answer(self, channel: CallingChannel, future: Future[Parcel]) -> None:
        error = future.exception()
        if error is not None:
            self.lose(channel, _reason(error))
            return
        parcel = future.result()
        if parcel[0]:
            for text, payloads in channel.take(parcel):
                self._deliver(channel, memoryview(text)[ANSWER_HEAD.size :], payloads)

    def _take_call(self, channel: AnsweringChannel, call: _Call) -> None:
        what, text, payloads = call
        if what == HELLO:
            channel.introduce(tuple(Peer(*peer) for peer in json.loads(bytes(text))))
            succeeding = {peer for peer in channel.peers if peer.role in SUCCEEDED}
            for other in [other for other in self._answering if succeeding.intersection(other.peers)]:
                self.lose(other, "it has connected anew")
            self._answering.append(channel)
            self._events.append(Event(channel, None, "opened"))
            with channel.changed:
                channel.greeted = True
                channel.changed.notify_all()
        elif what == END:
            self.lose(channel, "channel closed")
        else:
            self._deliver(channel, text, payloads)

    def _deliver(self, channel: CallingChannel | AnsweringChannel, text: memoryview, payloads: Sequence[Bytes]) -> None:
        if channel.closed:
            return
        try:
            messages = unpack(text, payloads, partial(self._sink, channel))
        except ProtocolError as error:
            self.refused += 1
            log.warning("refused %s: %s", channel.name, error)
            self.lose(channel, f"refused: {error}")
            return
        self._events += [Event(channel, message) for message in messages]

    def in_use(self, memory: torch.Tensor) -> bool:
        """Never: payloads are copies."""
        return False

    def pump(self) -> None:
        """Lets what was sent leave, if need be."""
        for calling in list(self._calling):
            calling.flush()
        for answering in self._answering:
            answering.flush(more=True)

    def wake(self) -> None:
        """Ends a `poll` in progress; may be called from any thread."""
        self._woken.set()

    # -- closing -------------------------------------------------------------------------------

    def lose(self, channel: _Channel, reason: str) -> None:
        """Closes a channel and reports it."""
        if not channel.closed:
            self.forget(channel, reason)
            self._events.append(Event(channel, None, reason))

    def forget(self, channel: _Channel, reason: str = "it has closed this channel") -> None:
        """Closes a channel without an event; tells the other end."""
        if channel.closed:
            return
        with self.lock:
            channel.closed = True
            channel.gathered()
            if isinstance(channel, AnsweringChannel):
                channel.why_closed = reason
                channel.changed.notify_all()
                self._callers.pop(channel.key, None)
        if isinstance(channel, AnsweringChannel):
            if channel in self._answering:
                self._answering.remove(channel)
        elif isinstance(channel, CallingChannel):
            self._calling.remove(channel)
            channel.end()

    def close(self) -> None:
        """Closes every channel; calls that are held return at once."""
        with self.lock:
            self._closed = True
            answering = list(self._callers.values())
        for channel in [*self._calling, *answering]:
            self.forget(channel, "the process is shut down")
        self._returned.clear()
        self._called.clear()
        self._stored.clear()


def _reason(error: BaseException) -> str:
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
