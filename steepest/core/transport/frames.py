"""Messages as bytes of a stream: a fixed header, the body's fields, raw bytes. Nothing is pickled."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from functools import lru_cache

from steepest.core.messages.message import KINDS, ROLES, Message, Peer
from steepest.core.messages.schema import MAX_BODY, encode_body
from steepest.core.tensors.memory import Bytes, Memory, address_of, as_array, copy_bytes
from steepest.core.tensors.shared_memory import NOTICE
from steepest.core.transport.channel import overlap
from steepest.errors import ProtocolError

MAGIC = b"sP"
PROTOCOL = 3
# magic, protocol, kind, source (role, index), target (role, index), bytes of the body, of the payload
HEADER = struct.Struct("<2sBBBiBiIQ")
MAX_PAYLOAD = 1 << 36
_ROLE_NUMBER = {name: number for number, name in enumerate(ROLES)}
_READ_AHEAD = 1 << 16
# In the size of a payload: it lies in shared memory, and a notice follows in its place.
_LENT = 1 << 63

# Frames between the two ends of a channel. SEND_AGAIN: the reader cannot map a lent payload, and
# wants its bytes. SENT_AGAIN: the next message is the one with that payload, and comes before the
# messages that have arrived since.
_CONTROL = struct.Struct(f"<2sBI{HEADER.size - 7}x")
_CONTROL_MAGIC = b"sC"
SEND_AGAIN, SENT_AGAIN = 1, 2

#: Returns the memory for an arriving payload, given its message and its size in bytes: memory of
#: just that size, or None to receive and discard it. When the message has its payload already, a
#: NumPy array, it lies in memory of the sender: that memory may be returned, to leave it there, and
#: must not be written to. Raises ProtocolError to refuse the payload.
Sink = Callable[[Message, int], Memory | None]


def buffer_of(payload: Memory) -> memoryview:
    """Return the bytes of a payload, without a copy."""
    return as_array(payload).data


def encode(message: Message, notice: bytes = b"") -> bytes:
    """Return the header and the body of a message, with a notice of where a lent payload lies, or none.

    The bytes of a payload that is not lent follow on the stream, from where they lie in memory.

    Raises:
        MessageTooLargeError: its body takes more than `MAX_BODY` bytes.
    """
    source, target = message.source, message.target
    assert source is not None
    assert target is not None
    body = encode_body(message)
    size = 0 if message.payload is None else message.payload.nbytes
    size |= _LENT if notice else 0
    head = HEADER.pack(
        MAGIC, PROTOCOL, message.kind, _ROLE_NUMBER[source.role], source.index,
        _ROLE_NUMBER[target.role], target.index, len(body), size,
    )  # fmt: skip
    return head + body + notice


def control(what: int, slot: int) -> bytes:
    """Return a frame between the two ends of a channel about a payload lent in a slot: `SEND_AGAIN`, `SENT_AGAIN`."""
    return _CONTROL.pack(_CONTROL_MAGIC, what, slot)


def decode_header(data: bytes | bytearray | memoryview) -> tuple[Message, int, int]:
    """Return a message without body and payload, and their sizes in bytes.

    The size of a lent payload has the bit `_LENT`.

    Raises:
        ProtocolError: wrong magic, protocol version, kind, role, or a size beyond the limits.
    """
    (magic, protocol, kind, source_role, source_index, target_role, target_index, body_size,
     payload_size) = HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC:
        raise ProtocolError(
            f"frame starts with {magic!r}, not {MAGIC!r}: the sender is not a steepest process"
        )
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"frame of protocol {protocol}, this process speaks {PROTOCOL}: update one of them"
        )
    if body_size > MAX_BODY or payload_size & ~_LENT > MAX_PAYLOAD:
        raise ProtocolError(
            f"oversized frame: a body of {body_size} bytes, {payload_size} bytes of payload"
        )
    try:
        source, target = _peer(source_role, source_index), _peer(target_role, target_index)
        message = Message(KINDS[kind], b"", None, source, target)
    except (KeyError, IndexError) as error:
        raise ProtocolError(f"frame of unknown kind or role: {error}") from None
    return message, body_size, payload_size


@lru_cache(maxsize=1024)
def _peer(role: int, index: int) -> Peer:
    return Peer(ROLES[role], index)


def _scratch(size: int) -> memoryview:
    """Return memory into which a payload of `size` bytes is received to be discarded."""
    return memoryview(bytearray(min(size, 1 << 18)))


class FrameReader:
    """A reader of messages from a byte stream; payloads are received into the sink's memory.

    Args:
        receive_into: reads into a buffer and returns the number of bytes, 0 at the end of the
            stream; raises BlockingIOError when no bytes are there.
        sink: returns the memory for each payload.
        borrow: returns a lent payload by its notice and size in bytes, or None when it cannot be
            mapped. The messages behind it are then held back until the payload has been sent again.
        send_again: called with a slot when the other end could not map the payload lent to it
            there.
    """

    def __init__(
        self,
        receive_into: Callable[[memoryview], int],
        sink: Sink,
        borrow: Callable[[memoryview, int], Bytes | None] | None = None,
        send_again: Callable[[int], None] | None = None,
    ) -> None:
        self._receive_into = receive_into
        self._sink = sink
        self._borrow = borrow
        self._send_again = send_again
        # Messages held back behind one whose payload is still to come, which is None here.
        self._held: deque[Message | None] = deque()
        # Of the message that is being read: whether its payload cannot be mapped, whether it comes
        # for the second time, and whether its payload is lent.
        self._is_missing = False
        self._is_again = False
        self._lent = False
        self._ahead = bytearray(_READ_AHEAD)  # bytes received and not parsed yet: [start, end)
        self._view = memoryview(self._ahead)
        self._start = 0
        self._end = 0
        self._message: Message | None = None
        self._body_size = 0
        self._payload_size = 0
        self._payload: memoryview | None = None
        self._received = 0
        self._discard: memoryview | None = None
        self._failure: Exception | None = None

    @property
    def failed(self) -> bool:
        """Whether the stream failed behind the messages returned last; the next `read` says how."""
        return self._failure is not None

    @property
    def missing(self) -> int:
        """The bytes that are still to come of the payload that is being received."""
        return self._payload_size - self._received if self._payload is not None else 0

    def drop(self, memory: Memory) -> None:
        """Discard the payload that is being received, if it lies in this memory (flat, uint8)."""
        message = self._message
        if self._payload is None or message is None or message.payload is None:
            return
        if overlap(message.payload, memory):
            message.payload = None
            self._payload = self._discard = _scratch(self._payload_size)

    def read(self) -> list[Message]:
        """Return the messages that have become complete, in order, when the stream would block.

        An error of the stream is raised only after the messages before it have been returned.

        Raises:
            EOFError: the stream ended between frames.
            ProtocolError: it ended inside a frame, or a frame is malformed.
            OSError: reading failed.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        messages: list[Message] = []
        try:
            full = True
            while full:  # bytes that do not fill the buffer are all that the stream has now
                full = (
                    self._read_payload(self._payload) if self._payload is not None else self._fill()
                )
                self._parse(messages)
            return messages
        except BlockingIOError:
            return messages
        except (EOFError, OSError, ProtocolError) as error:
            if not messages:
                raise
            # Without the traceback, whose frames hold the messages.
            self._failure = error.with_traceback(None)
            return messages

    def _fill(self) -> bool:
        """Receive bytes behind those not parsed yet; return whether they filled the buffer."""
        if self._start:
            if self._end > self._start:
                self._view[: self._end - self._start] = bytes(self._view[self._start : self._end])
            self._end -= self._start
            self._start = 0
        needed = HEADER.size if self._message is None else self._body_size + NOTICE.size
        if needed > len(self._ahead):
            grown = bytearray(needed)
            grown[: self._end] = self._view[: self._end]
            self._ahead, self._view = grown, memoryview(grown)
        room = self._view[self._end :] if self._end else self._view
        count = self._receive_into(room)
        if count == 0:
            if self._end or self._message is not None:
                raise ProtocolError("stream ended inside a frame")
            raise EOFError
        self._end += count
        return count == len(room)

    def _read_payload(self, payload: memoryview) -> bool:
        """Receive bytes of the payload; return whether they filled the memory that was offered.

        A payload that the sink discards is received into the same scratch memory again and again.
        """
        left = self._payload_size - self._received
        if self._discard is not None:
            target = self._discard[: min(left, len(self._discard))]
        else:
            target = payload[self._received :]
        count = self._receive_into(target) if left else 0
        if count == 0 and left:
            raise ProtocolError("stream ended inside a frame's payload")
        self._received += count
        return count == len(target)

    def _parse(self, messages: list[Message]) -> None:
        """Append the messages that are complete to a list, except those held back."""
        while True:
            if self._message is None:
                if self._end - self._start < HEADER.size:
                    return
                header = self._view[self._start : self._start + HEADER.size]
                if header[:2] == _CONTROL_MAGIC:
                    self._take_control(header)
                    continue
                self._message, self._body_size, size = decode_header(header)
                self._payload_size, self._lent = size & ~_LENT, bool(size & _LENT)
                self._start += HEADER.size
            message = self._message
            if self._payload is None:
                if self._end - self._start < self._body_size + NOTICE.size * self._lent:
                    return
                message.body = bytes(self._view[self._start : self._start + self._body_size])
                self._start += self._body_size
                if self._lent:
                    self._take_lent(message)
                elif self._payload_size:
                    self._open_payload(message)
            if self._payload is not None:
                if self._received < self._payload_size:
                    return
                self._payload = self._discard = None
            self._message = None
            if self._held or self._is_missing:
                self._hold(message, messages)
            else:
                messages.append(message)

    def _take_control(self, header: memoryview) -> None:
        _, what, slot = _CONTROL.unpack(header)
        self._start += HEADER.size
        if what == SEND_AGAIN and self._send_again is not None:
            self._send_again(slot)
        elif what == SENT_AGAIN and self._held and not self._is_again:
            self._is_again = True
        else:
            raise ProtocolError("a control frame that makes no sense")

    def _hold(self, message: Message, messages: list[Message]) -> None:
        """Hold a message back behind one whose payload is missing; release all in order once that was sent again."""
        if self._is_again:
            self._is_again = False
            self._held[0] = message
            while self._held and (ready := self._held[0]) is not None:
                messages.append(ready)
                self._held.popleft()
        else:
            self._held.append(None if self._is_missing else message)
        self._is_missing = False

    def _open_payload(self, message: Message) -> None:
        size = self._payload_size
        destination = self._sink(message, size)
        ahead = min(size, self._end - self._start)
        if destination is None:
            self._payload = self._discard = _scratch(size)
        else:
            assert destination.nbytes == size, "the sink gave a buffer of another size"
            self._payload, self._discard = buffer_of(destination), None
            self._payload[:ahead] = self._view[self._start : self._start + ahead]
            message.payload = destination
        self._received = ahead
        self._start += ahead

    def _take_lent(self, message: Message) -> None:
        """Set the payload of a message that is lent: in place, or copied to the sink's memory."""
        if self._borrow is None:
            raise ProtocolError("a payload in shared memory over a stream that has none")
        notice = self._view[self._start : self._start + NOTICE.size]
        self._start += NOTICE.size
        lent = message.payload = self._borrow(notice, self._payload_size)
        if lent is None:
            self._is_missing = True
            return
        destination = self._sink(message, self._payload_size)
        if destination is not None and address_of(destination) != address_of(lent):
            copy_bytes(destination, lent)
        message.payload = destination
