"""Messages as Ray actor calls, payloads through Ray's object store: no socket of our own.

Of two processes one is the caller and the other, an actor, the callee. A call carries the caller's
messages and returns the callee's. The caller keeps a call in flight; the callee holds the newest
one until it has a message for the caller, `_HOLD_SECONDS` are over, or a newer call has come: so
either end may send at any time. Ray runs the calls of a threaded actor in any order and completes
them in any order, therefore calls are numbered: the callee takes them in the order of their
numbers, only the newest call returns messages, and the caller takes what calls return in the order
of the calls. Ray's threads only wait for futures; everything else happens on the router's thread.

A caller that closes its channel says so in a last call. The death of a caller is not noticed here
(messages for it are kept): that is left to the driver, which watches all processes through Ray.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray

from steepest.errors import DeadlineError, PeerLostError, ProtocolError, ShutdownError
from steepest.messages.message import Kind, Message, Peer
from steepest.messages.permissions import SUCCEEDED
from steepest.tensors.memory import Bytes, Memory, as_array
from steepest.transport.channel import ChannelSink, Event
from steepest.transport.frames import HEADER, Sink, decode_header, decode_meta, encode

log = logging.getLogger(__name__)

#: The result of a call: one byte, whether more messages follow unasked, and encoded messages; and
#: the large payloads of these.
Answer = tuple[bytes, list[Bytes]]
NOTHING: Answer = (b"", [])
#: Head of a call: the caller's key, the call's number, and what it is. One argument holds it all,
#: because Ray takes long for every further one.
CALL_HEAD = struct.Struct("<QQB")
HELLO, SAY, END = range(3)  # followed by the caller's peers as JSON; by messages; by nothing

_Call = tuple[int, memoryview, Sequence[Bytes]]  # what it is, the bytes behind the head, payloads

_SMALL_BYTES = 100_000  # a payload below follows its message's header
_FULL_BYTES = 1 << 20  # a caller that has gathered more does not wait for the end of its turn
_IN_FLIGHT = 2  # one that is held, one on its way
_HOLD_SECONDS = 2.0  # no longer, lest the calls of dead callers take all threads
_GATHER_SECONDS = 0.02  # in a long turn, messages for a caller gather for about so long


class Callee(NamedTuple):
    """An actor to call."""

    peers: tuple[Peer, ...]  # the roles that it hosts
    actor: Any  # its handle; its method `exchange` returns the result of `CallTransport.answer`
    # seconds without a call in flight after an answer; spares calls to an actor that only answers
    pause: float = 0.0


def threads_for(callers: int) -> int:
    """Return the `max_concurrency` for an actor's calls that are held back by so many callers; others need more."""
    return _IN_FLIGHT * callers


class _Channel:
    """What both kinds of channels have in common: messages are gathered until they leave."""

    def __init__(self, transport: CallTransport, peers: tuple[Peer, ...]) -> None:
        self.name = " + ".join(map(str, peers))
        self.peers = peers
        self.pending = 0  # payloads are copied at once
        self.closed = False
        self._transport = transport
        self._parts: list[bytes] = []
        self._payloads: list[Any] = []
        self._size = 0

    def send(self, message: Message) -> None:
        """Keep a message, with a copy of its payload, until it leaves."""
        if self.closed:
            return
        part = encode(message)
        if message.payload is not None:
            size = message.payload.nbytes
            if size < _SMALL_BYTES:
                part += as_array(message.payload).tobytes()
            else:
                try:
                    self._payloads.append(self._copy(message))
                except ray.exceptions.RayError as error:
                    self._transport.lose(self, f"its payload cannot be kept: {_reason(error)}")
                    return
            self._size += size
            self._transport.bytes_sent += size
        self._parts.append(part)

    def _copy(self, message: Message) -> Any:
        """Return a copy of a large payload, in the form in which it leaves."""
        raise NotImplementedError

    def _gathered(self) -> tuple[bytes, list[Any]]:
        """Return the messages gathered since the last call: encoded, and their large payloads."""
        taken = b"".join(self._parts), self._payloads
        self._parts, self._payloads, self._size = [], [], 0
        return taken

    def own_pending(self, memory: Memory) -> None:
        """Do nothing: payloads are copies already."""

    def drop_arriving(self, memory: Memory) -> None:
        """Do nothing: payloads arrive in whole."""

    def close(self, reason: str = "it has closed this channel") -> None:
        """Close this end; messages that have not left are lost. The other end may show the reason."""
        if not self.closed:
            self.closed = True
            self._end(reason)

    def _end(self, reason: str) -> None:
        raise NotImplementedError


class CallingChannel(_Channel):
    """A `Channel` to an actor; made by `CallTransport.connect`."""

    # calls: in flight, and returned ones whose answers are not taken yet; oldest first.

    def __init__(self, transport: CallTransport, callee: Callee) -> None:
        super().__init__(transport, callee.peers)
        self.calls: deque[Future[Answer]] = deque()
        self._callee = callee
        self._listen_at = 0.0
        self._key = secrets.randbits(64)
        self._number = 0

    def _copy(self, message: Message) -> Any:
        return self._transport.store(message)

    def call(self, what: int, text: bytes = b"", payloads: Sequence[Any] = ()) -> Future[Answer]:
        """Make the next call of the actor, and return its future."""
        # what: HELLO for the first call, after whose answer the next may be made; SAY or END; text: the caller's peers
        # as JSON, or encoded messages; payloads: large ones of these, in the object store.
        head = CALL_HEAD.pack(self._key, self._number, what)
        self._number += 1
        future: Future[Answer] = self._callee.actor.exchange.remote(head + text, *payloads).future()
        return future

    def send(self, message: Message) -> None:
        """Keep a message, with a copy of its payload, for the next call; from 1 MB on call now."""
        super().send(message)
        if self._size >= _FULL_BYTES:
            self.flush()

    def flush(self) -> None:
        """Call with the gathered messages, unless too many calls are in flight."""
        if self._parts and self._in_flight() < _IN_FLIGHT:
            self._say()

    def listen(self, now: float) -> float:
        """Make a call if none is in flight; return the seconds after which to do so again."""
        if self.closed or self._in_flight():
            return math.inf
        if now < self._listen_at:
            return self._listen_at - now
        self._say()
        return math.inf

    def answered(self, more: bool) -> None:
        """Begin the callee's pause after messages have come, unless more follow unasked."""
        self._listen_at = 0.0 if more else time.monotonic() + self._callee.pause

    def _in_flight(self) -> int:
        return sum(not call.done() for call in self.calls)

    def _say(self) -> None:
        try:
            future = self.call(SAY, *self._gathered())
        except ray.exceptions.RayError as error:
            self._transport.lose(self, _reason(error))
            return
        self.calls.append(future)
        future.add_done_callback(lambda _: self._transport.wake())

    def _end(self, reason: str) -> None:
        self._transport.calling.remove(self)
        self.calls.clear()
        with contextlib.suppress(ray.exceptions.RayError):  # of a dead actor
            self.call(END)  # `call` takes its future: Ray prints errors of futures never taken


class AnsweringChannel(_Channel):
    """A `Channel` to a caller; made by the transport at the caller's first call."""

    def __init__(self, transport: CallTransport, key: int, peers: tuple[Peer, ...]) -> None:
        super().__init__(transport, peers)
        self._key = key
        self._calls: dict[int, _Call] = {}  # calls that have come and are not taken yet, by number
        self._next = 0
        self._newest = -1
        self._held: Future[Answer] | None = None  # the newest call's
        self._until = 0.0
        self._since = 0.0  # when the first message was gathered

    def _copy(self, message: Message) -> Any:
        return as_array(message.payload).copy()

    def send(self, message: Message) -> None:
        """Keep a message, with a copy of its payload, for the next answer."""
        if not self._parts:
            self._since = time.monotonic()
        super().send(message)

    def put(self, number: int, call: _Call, answer: Future[Answer]) -> None:
        """Keep call `number`, and hold its answer, a future, if it is the newest."""
        # An older one is answered at once, empty.
        self._calls[number] = call
        if number < self._newest:
            answer.set_result(NOTHING)
            return
        self.release()
        self._newest, self._held = number, answer
        self._until = time.monotonic() + _HOLD_SECONDS

    def next(self) -> _Call | None:
        """Return the next call in the order of their numbers; None if it has not come yet."""
        call = self._calls.pop(self._next, None)
        self._next += call is not None
        return call

    def flush(self, more: bool) -> None:
        """Let the held call return, if it carries messages or was held for long enough."""
        # more: whether this is the middle of a turn: more messages follow, which gather for a moment then.
        if self._held is None:
            return
        now = time.monotonic()
        if self._parts and not (more and now < self._since + _GATHER_SECONDS):
            text, payloads = self._gathered()
            self.release((bytes([more]) + text, payloads))
        elif now > self._until:
            self.release()

    def release(self, answer: Answer = NOTHING) -> None:
        """Let the held call return an answer, if a call is held."""
        if self._held is not None:
            self._held.set_result(answer)
            self._held = None

    def _end(self, reason: str) -> None:
        del self._transport.callers[self._key]
        if self._held is not None:
            self._held.set_exception(PeerLostError(reason))


class CallTransport:
    """A `Transport` over actor calls: it calls actors, and answers if its process is an actor.

    Args:
        sink: returns the memory for an arriving payload; called on the thread that polls.
        peers: the roles of this process, for the processes that it calls.
    """

    def __init__(self, sink: ChannelSink, peers: tuple[Peer, ...] = ()) -> None:
        self.peers = peers
        self.refused = 0
        self.bytes_sent = 0
        self.calling: list[CallingChannel] = []
        self.callers: dict[int, AnsweringChannel] = {}  # by their keys
        self._sink = sink
        # Calls that Ray's threads have put here, with the futures by which they return.
        self._called: deque[tuple[bytes, Sequence[Bytes], Future[Answer]]] = deque()
        self._events: list[Event] = []
        self._woken = threading.Event()
        self._stored: dict[tuple[int, ...], Any] = {}
        self._closed = False

    def connect(self, callee: Callee, timeout: float = 10.0) -> CallingChannel:
        """Become a caller of an actor, and return the channel; blocks until the actor has answered.

        Args:
            callee: the actor.
            timeout: in seconds.

        Raises:
            PeerLostError: the actor is dead, or takes no calls.
            DeadlineError: no answer within `timeout` seconds.
        """
        channel = CallingChannel(self, callee)
        self.calling.append(channel)
        try:
            channel.call(HELLO, json.dumps(self.peers).encode()).result(timeout)
        except FutureTimeoutError:
            channel.close()
            raise DeadlineError(
                f"{channel.name} did not answer a call within {timeout:g} s"
            ) from None
        except ray.exceptions.RayError as error:
            channel.close()
            raise PeerLostError(f"cannot call {channel.name}: {_reason(error)}") from error
        return channel

    def answer(self, call: bytes, payloads: Sequence[Bytes]) -> Future[Answer]:
        """Take the arguments of a call of `exchange`; any thread may do this.

        Args:
            call: its head, and encoded messages.
            payloads: the large payloads of these messages.

        Returns:
            The call's result or error: ShutdownError when this process does not serve any more,
            PeerLostError when this end of the channel is closed.
        """
        answer: Future[Answer] = Future()
        self._called.append((call, payloads, answer))
        self._woken.set()
        if self._closed:
            self._refuse_calls()
        return answer

    def _refuse_calls(self) -> None:
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self._called:
                self._called.popleft()[2].set_exception(ShutdownError("the process is shut down"))

    def store(self, message: Message) -> Any:
        """Put a payload into the object store, equal weights only once; return its reference."""
        data = as_array(message.payload)
        if message.kind is not Kind.WEIGHTS:
            return ray.put(data)
        key = (message.generation, message.version, message.chunk, data.ctypes.data, data.nbytes)
        if key not in self._stored:
            if any(old[:2] != key[:2] for old in self._stored):
                self._stored.clear()
            self._stored[key] = ray.put(data)
        return self._stored[key]

    def poll(self, timeout: float) -> list[Event]:
        """Send gathered messages; return the events since the last call, oldest first; see `Transport.poll`."""
        self._flush(more=False)
        self._take()
        now = time.monotonic()
        for calling in list(self.calling):
            timeout = min(timeout, calling.listen(now))
        if not self._events:
            self._woken.wait(max(timeout, 0.0))
            self._woken.clear()
            self._take()
        events, self._events = self._events, []
        return events

    def pump(self) -> None:
        """Send gathered messages, for use in the middle of a turn."""
        self._flush(more=True)

    def _flush(self, more: bool) -> None:
        self._sort()
        for answering in self.callers.values():
            answering.flush(more)
        for calling in list(self.calling):
            calling.flush()

    def _sort(self) -> None:
        """Give each channel the calls that have come for it."""
        while self._called:
            call, payloads, answer = self._called.popleft()
            key, number, what = CALL_HEAD.unpack_from(call)
            text = memoryview(call)[CALL_HEAD.size :]
            if what == HELLO:
                peers = tuple(Peer(*peer) for peer in json.loads(bytes(text)))
                self.callers[key] = AnsweringChannel(self, key, peers)
            if key in self.callers:
                self.callers[key].put(number, (what, text, payloads), answer)
            else:
                answer.set_exception(PeerLostError("it has closed this channel"))

    def _take(self) -> None:
        """Take the answers and calls that have come, each channel's in order of their numbers."""
        for calling in list(self.calling):
            while calling.calls and calling.calls[0].done():
                self._take_answer(calling, calling.calls.popleft())
        self._sort()
        for answering in list(self.callers.values()):
            while (call := answering.next()) is not None:
                self._take_call(answering, *call)

    def _take_answer(self, channel: CallingChannel, future: Future[Answer]) -> None:
        if (error := future.exception()) is not None:
            self.lose(channel, _reason(error))
            return
        text, payloads = future.result()
        if text:
            channel.answered(more=bool(text[0]))
            self._deliver(channel, memoryview(text)[1:], payloads)

    def _take_call(
        self, channel: AnsweringChannel, what: int, text: memoryview, payloads: Sequence[Bytes]
    ) -> None:
        if what == HELLO:
            succeeding = {peer for peer in channel.peers if peer.role in SUCCEEDED}
            for other in list(self.callers.values()):
                if other is channel:
                    break  # the channels behind it are newer
                if succeeding.intersection(other.peers):
                    self.lose(other, "it has connected anew")
            self._events.append(Event(channel, None, "opened"))
            channel.release()
        elif what == END:
            self.lose(channel, "channel closed")
        else:
            self._deliver(channel, text, payloads)

    def _deliver(
        self,
        channel: CallingChannel | AnsweringChannel,
        text: memoryview,
        payloads: Sequence[Bytes],
    ) -> None:
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

    def lose(self, channel: _Channel, reason: str) -> None:
        """Close a channel, and report that as an event with this reason."""
        if not channel.closed:
            channel.close(reason)
            self._events.append(Event(channel, None, reason))

    def in_use(self, memory: Memory) -> bool:
        """Return False: payloads are copies."""
        return False

    def wake(self) -> None:
        """End a `poll` in progress; any thread may do this."""
        self._woken.set()

    def close(self) -> None:
        """Close every channel; held calls return at once."""
        self._closed = True
        for channel in [*self.calling, *self.callers.values()]:
            channel.close("the process is shut down")
        self._refuse_calls()
        self._stored.clear()


def unpack(text: memoryview, payloads: Sequence[Bytes], sink: Sink) -> list[Message]:
    """Return the messages of a call or an answer, with its large payloads copied into the sink's memory."""
    # ProtocolError: a header makes no sense, or does not go with its payload.
    messages = []
    following = iter(payloads)
    while text:
        if len(text) < HEADER.size:
            raise ProtocolError("a header that is cut off")
        message, meta_size, size = decode_header(text)
        text = text[HEADER.size :]
        if meta_size:
            message.meta = decode_meta(text[:meta_size])
            text = text[meta_size:]
        if size:
            if size < _SMALL_BYTES:
                payload: Bytes | None = np.frombuffer(text[:size], dtype=np.uint8)
                text = text[size:]
            else:
                payload = next(following, None)
            if payload is None or payload.nbytes != size:
                raise ProtocolError(f"{message.kind.name} without its payload of {size} bytes")
            message.payload = sink(message, size)
            if message.payload is not None:
                as_array(message.payload)[:] = payload
        messages.append(message)
    return messages


def _reason(error: BaseException) -> str:
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return " ".join(str(cause).split())[:300] or type(cause).__name__
