"""Messages as Ray actor calls, payloads through Ray's object store: no socket of our own.

Of two processes one calls and the other, an actor, is called. A call takes along what the caller has to say
and returns what the callee has for it. The caller keeps one call in flight, which the callee holds until it
has something to say, `_HOLD_SECONDS` are over or a newer call has come; so either may speak at any time. Ray
runs the calls of a threaded actor, and completes them, in any order: calls are numbered, and so are the
answers that say something; both ends put them back in order.

A caller that closes its channel says so. A caller that dies does not, and nothing here notices it: that is
left to the driver, which watches all processes through Ray.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import ray
import torch

from steepest.comm.channel import Event
from steepest.comm.frame import HEADER, Sink, decode_header, decode_meta, encode
from steepest.comm.message import Kind, Message, Peer
from steepest.errors import DeadlineError, PeerLostError, ProtocolError, ShutdownError

log = logging.getLogger(__name__)
T = TypeVar("T")

Bytes = npt.NDArray[np.uint8]
#: What a call returns: the answer's number (-1 when it says nothing), headers of messages, and the payloads of
#: those that have one, in order.
Parcel = tuple[int, list[bytes], list[Bytes]]
_NOTHING: Parcel = (-1, [], [])

_INLINE_BYTES = 100_000  # a larger argument goes to the object store
_FULL_BYTES = 1 << 20  # a caller that has gathered more does not wait for the end of its turn
_IN_FLIGHT = 4
_HOLD_SECONDS = 2.0


class Caller(NamedTuple):
    """Who calls: the roles of its process, and a random number that tells its connections apart."""

    peers: tuple[Peer, ...]
    key: int


class Callee(NamedTuple):
    """Whom to call: an actor with a method `exchange`, and the roles that it hosts."""

    peers: tuple[Peer, ...]
    actor: Any


def threads_for(callers: int) -> int:
    """The `max_concurrency` that an actor needs for calls that it holds, beside what it needs otherwise."""
    return 2 * callers


def unpack(heads: Sequence[bytes], payloads: Sequence[Bytes], sink: Sink) -> list[Message]:
    """Messages from their headers and payloads, these copied to where the sink says.

    Raises:
        ProtocolError: a header makes no sense, or does not go with its payload.
    """
    messages = []
    following = iter(payloads)
    for head in heads:
        message, meta_size, size = decode_header(head)
        if meta_size:
            message.meta = decode_meta(memoryview(head)[HEADER.size :])
        if size:
            payload = next(following, None)
            if payload is None or payload.nbytes != size:
                raise ProtocolError(f"{message.kind.name} without its payload of {size} bytes")
            message.payload = sink(message, size)
            if message.payload is not None:
                message.payload.numpy()[:] = payload
        messages.append(message)
    return messages


class _InOrder(Generic[T]):
    """Gives things back in the order of their numbers, each once."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def put(self, number: int, thing: T) -> list[T]:
        """Takes one thing; returns those whose turn it is."""
        if number >= self._next:
            self._early.setdefault(number, thing)
        ready = []
        while self._next in self._early:
            ready.append(self._early.pop(self._next))
            self._next += 1
        return ready


class _Channel:
    """What both ends have in common: they gather what is sent. Used on the router's thread."""

    def __init__(self, transport: CallTransport, peers: tuple[Peer, ...]) -> None:
        self.name = " + ".join(map(str, peers))
        self.peers = peers
        self.pending = 0  # payloads are copied at once
        self.closed = False
        self.heads: list[bytes] = []
        self.payloads: list[Any] = []
        self.size = 0
        self._transport = transport

    def send(self, message: Message) -> None:
        """Keeps a message, with a copy of its payload, for the next call or answer."""
        if self.closed:
            return
        head = encode(message)
        if message.payload is not None:
            try:
                self.payloads.append(self._keep(message))
            except ray.exceptions.RayError as error:
                self._transport.lose(self, f"its payload cannot be kept: {_reason(error)}")
                return
            self.size += message.payload.numel()
            self._transport.bytes_sent += message.payload.numel()
        self.heads.append(head)

    def _keep(self, message: Message) -> Any:
        assert message.payload is not None
        return message.payload.numpy().copy()

    def flush(self) -> None:
        """Lets what is gathered leave, if it can."""
        raise NotImplementedError

    def gathered(self) -> tuple[list[bytes], list[Any]]:
        """What was sent since the last time."""
        taken = self.heads, self.payloads
        self.heads, self.payloads, self.size = [], [], 0
        return taken

    def own_pending(self, memory: torch.Tensor) -> None:
        """Payloads are copies already."""

    def close(self) -> None:
        """Closes this end; what has not left is lost."""
        self._transport.forget(self)


class CallingChannel(_Channel):
    """A `Channel` to an actor; made by `CallTransport.connect`."""

    def __init__(self, transport: CallTransport, callee: Callee, caller: Caller, pause: float) -> None:
        super().__init__(transport, callee.peers)
        self.in_flight = 0  # calls; counted down on Ray's threads
        self.answers: _InOrder[Parcel] = _InOrder()
        self.listen_at = 0.0
        self._pause = pause
        self._actor = callee.actor
        self._caller = caller
        self._calls = 0

    def _keep(self, message: Message) -> Any:
        return self._transport.store(message)

    def call(self, heads: list[bytes] | None, payloads: Sequence[Any] = ()) -> Future[Parcel]:
        """Calls the actor; without heads this says that the channel is closed."""
        number = self._calls
        self._calls += 1
        future: Future[Parcel] = self._actor.exchange.remote(self._caller, number, heads, *payloads).future()
        return future

    def flush(self) -> None:
        """Calls with what is gathered, unless too many calls are in flight."""
        if self.heads and self.in_flight < _IN_FLIGHT:
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

    def answered(self) -> None:
        """The callee has said something."""
        self.listen_at = time.monotonic() + self._pause

    def _start(self) -> None:
        try:
            future = self.call(*self.gathered())
        except ray.exceptions.RayError as error:
            self._transport.lose(self, _reason(error))
            return
        with self._transport.lock:
            self.in_flight += 1
        future.add_done_callback(lambda future: self._transport.returned(self, future))


class AnsweringChannel(_Channel):
    """A `Channel` to a caller; made by the transport when it calls for the first time."""

    def __init__(self, transport: CallTransport, caller: Caller) -> None:
        super().__init__(transport, caller.peers)
        self.caller = caller
        self.calls: _InOrder[_Call] = _InOrder()
        # below: guarded by the transport's lock
        self.changed = threading.Condition(transport.lock)
        self.greeted = False
        self.newest = 0
        self.why_closed = ""
        self._ready_heads: list[bytes] = []
        self._ready_payloads: list[Bytes] = []
        self._answers = 0

    def flush(self) -> None:
        """Lets the call that is held return."""
        if self.heads:
            with self.changed:
                heads, payloads = self.gathered()
                self._ready_heads += heads
                self._ready_payloads += payloads
                self.changed.notify_all()

    def due(self, number: int) -> bool:
        """Whether a call has to return; the first one returns when the router knows the channel."""
        return self.closed or (self.greeted if number == 0 else bool(self._ready_heads) or self.newest > number)

    def take(self) -> Parcel:
        """The next answer."""
        if not self._ready_heads:
            return _NOTHING
        parcel = (self._answers, self._ready_heads, self._ready_payloads)
        self._answers += 1
        self._ready_heads, self._ready_payloads = [], []
        return parcel


class _Call(NamedTuple):
    """What an actor was called with."""

    heads: list[bytes] | None
    payloads: Sequence[Bytes]


class CallTransport:
    """A `Transport` over actor calls: calls actors, and answers when its own process is one.

    Args:
        sink: where arriving payloads go; asked on the thread that polls.
        peers: the roles of this process, told to whom it calls.
    """

    def __init__(self, sink: Sink, peers: tuple[Peer, ...] = ()) -> None:
        self.peers = peers
        self.refused = 0
        self.bytes_sent = 0
        self.lock = threading.Lock()
        self._sink = sink
        self._calling: list[CallingChannel] = []
        self._answering: list[AnsweringChannel] = []  # those that the router knows
        self._callers: dict[Caller, AnsweringChannel] = {}
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
        channel = CallingChannel(self, Callee(peers, actor), Caller(self.peers, secrets.randbits(63)), pause)
        try:
            channel.call([]).result(timeout)
        except FutureTimeoutError:
            channel.call(None)
            raise DeadlineError(f"{channel.name} did not answer a call within {timeout:g} s") from None
        except ray.exceptions.RayError as error:
            raise PeerLostError(f"cannot call {channel.name}: {_reason(error)}") from error
        self._calling.append(channel)
        return channel

    def store(self, message: Message) -> Any:
        """A payload as a call's argument; weights that go to several workers are put only once."""
        assert message.payload is not None
        data = message.payload.numpy()
        if data.nbytes < _INLINE_BYTES:
            return data.copy()
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

    def answer(self, caller: Caller, number: int, heads: list[bytes] | None, payloads: Sequence[Bytes]) -> Parcel:
        """Takes a call and waits for what is to be said to the caller; any thread may do this.

        Raises:
            ShutdownError: this process does not serve any more.
            PeerLostError: this end of the channel is closed.
        """
        with self.lock:
            channel = self._callers.get(caller)
            if self._closed:
                raise ShutdownError("the process is shut down")
            if channel is None and number == 0:
                channel = self._callers[caller] = AnsweringChannel(self, caller)
            if channel is None:
                raise PeerLostError("it has closed this channel")
            channel.newest = max(channel.newest, number)
            channel.changed.notify_all()
            self._called.append((channel, number, _Call(heads, payloads)))
            self._woken.set()
            channel.changed.wait_for(lambda: channel.due(number), None if number == 0 else _HOLD_SECONDS)
            if channel.closed and channel.why_closed:
                raise PeerLostError(channel.why_closed)
            return _NOTHING if number == 0 else channel.take()

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
        if parcel[0] >= 0:
            channel.answered()
            for _, heads, payloads in channel.answers.put(parcel[0], parcel):
                self._deliver(channel, heads, payloads)

    def _take_call(self, channel: AnsweringChannel, call: _Call) -> None:
        if not channel.greeted:
            for other in [other for other in self._answering if set(other.peers) & set(channel.peers)]:
                self.lose(other, "it has connected anew")
            self._answering.append(channel)
            self._events.append(Event(channel, None, "opened"))
            with channel.changed:
                channel.greeted = True
                channel.changed.notify_all()
        if call.heads is None:
            self.lose(channel, "channel closed")
        else:
            self._deliver(channel, call.heads, call.payloads)

    def _deliver(self, channel: CallingChannel | AnsweringChannel, heads: list[bytes], payloads: Sequence[Any]) -> None:
        if channel.closed:
            return
        try:
            messages = unpack(heads, payloads, self._sink)
        except ProtocolError as error:
            self.refused += 1
            log.warning("refused %s: %s", channel.name, error)
            self.lose(channel, f"refused: {error}")
            return
        self._events += [Event(channel, message) for message in messages]

    def pump(self) -> None:
        """Calls with what was sent; answers are given in `poll`."""
        for channel in list(self._calling):
            channel.flush()

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
                self._callers.pop(channel.caller, None)
        if isinstance(channel, AnsweringChannel):
            if channel in self._answering:
                self._answering.remove(channel)
        elif isinstance(channel, CallingChannel):
            if channel in self._calling:
                self._calling.remove(channel)
            with contextlib.suppress(ray.exceptions.RayError):  # whoever is dead need not be told
                channel.call(None)

    def close(self) -> None:
        """Closes every channel; calls that are held return at once."""
        with self.lock:
            self._closed = True
            answering = list(self._callers.values())
        channels: list[_Channel] = [*self._calling, *answering]
        for channel in channels:
            self.forget(channel, "the process is shut down")
        self._returned.clear()
        self._called.clear()
        self._stored.clear()


def _reason(error: BaseException) -> str:
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
