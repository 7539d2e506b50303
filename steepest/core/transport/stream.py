"""One connected socket as a channel: queued bytes, and payloads lent in shared memory."""

from __future__ import annotations

import array
import contextlib
import errno
import functools
import itertools
import os
import socket
from collections import deque
from typing import Protocol

from steepest.core.messages.message import Message, Peer
from steepest.core.tensors import shared_memory
from steepest.core.tensors.memory import Bytes, Memory, address_of
from steepest.core.transport.channel import Channel
from steepest.core.transport.frames import (
    SEND_AGAIN,
    SENT_AGAIN,
    FrameReader,
    buffer_of,
    control,
    encode,
)
from steepest.errors import ProtocolError

_BUFFERS_PER_CALL = 64
_WORTH_WAKING = 1 << 21  # bytes; for fewer of a large message a process is not woken
_GATHERED_BYTES = 1 << 15  # fewer wait for the end of the turn, to leave together
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
# as plain integers: `&` of an enum's member makes another one
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_CUT_OFF = int(getattr(socket, "MSG_CTRUNC", 0))


class StreamOwner(Protocol):
    """The transport of a channel: the methods that the channel calls."""

    lends: bool
    lending: shared_memory.Lending

    def sink(self, channel: Channel, message: Message, size: int, /) -> Memory | None:
        """Return the memory for a payload of `size` bytes that begins to arrive."""

    def count(self, message: Message) -> None:
        """Add a sent message to the counters."""

    def gather(self, channel: WireChannel) -> None:
        """Send the channel's queued bytes with the next `poll` or `pump`."""

    def watch(self, channel: WireChannel, writing: bool) -> None:
        """Set whether to wait (`writing`) for the channel's socket to take bytes."""

    def lose(self, channel: WireChannel, reason: str) -> None:
        """Close a channel, and report that as an event with this reason."""

    def forget(self, channel: WireChannel) -> None:
        """Close a channel without an event."""


class WireChannel:
    """A `Channel` over one connected socket; made by `WireTransport`.

    Args:
        transport: that owns the channel.
        sock: connected, with the token proven.
        name: of the other end, for errors.
        peers: the roles at the other end.
        withheld: bytes that the socket may have taken from the kernel and not returned, at most.
    """

    def __init__(
        self,
        transport: StreamOwner,
        sock: socket.socket,
        name: str,
        peers: tuple[Peer, ...],
        withheld: int = 0,
    ) -> None:
        self.name = name
        self.peers = peers
        self.pending = 0
        self.closed = False
        self._broken = False  # the peer takes no more bytes; the bytes that it sent are still read
        self._transport = transport
        self._socket = sock
        # Bytes to send, and their address in memory; 0 for bytes that no owner changes.
        self._queue: deque[tuple[memoryview, int]] = deque()
        self._withheld = withheld
        self._awaited = 1  # number of bytes that must have come before the transport is woken
        self._watched = False  # whether the transport waits for the socket to take more
        sink = functools.partial(transport.sink, self)
        local = sock.family == socket.AF_UNIX and shared_memory.AVAILABLE
        self._lender = transport.lending.lender() if local and transport.lends else None
        self._borrower = shared_memory.Borrower()
        # Descriptors that have come and are not used yet; None for one that found no place.
        self._descriptors: deque[int | None] = deque()
        # Segments whose descriptors go with the next bytes.
        self._to_pass: list[shared_memory.Segment] = []
        if local:
            self._reader = FrameReader(self._receive, sink, self._borrow, self._send_again)
        else:
            self._reader = FrameReader(sock.recv_into, sink)

    def send(self, message: Message) -> None:
        """Queue a message; a closed channel drops it.

        Small messages leave together, before the transport waits; larger ones leave now, as far as
        the socket takes them. A payload of `SHARED_FROM` bytes or more is lent where it can be.
        """
        if self.closed or self._broken:
            return
        payload, notice = message.payload, b""
        if (
            payload is not None
            and self._lender is not None
            and payload.nbytes >= shared_memory.SHARED_FROM
        ):
            notice = self._lender.lend(payload, self._to_pass, functools.partial(encode, message))
        self._append(memoryview(encode(message, notice)))
        if payload is not None and not notice:
            self._append(buffer_of(payload), address_of(payload))
        self._transport.count(message)
        if self.pending > _GATHERED_BYTES or notice:
            self.flush()
        else:
            self._transport.gather(self)

    def _append(self, data: memoryview, address: int = 0) -> None:
        if data.nbytes:
            self._queue.append((data, address))
            self.pending += data.nbytes

    def flush(self) -> None:
        """Send queued bytes until the socket takes no more; the transport sends the rest later."""
        try:
            while self._queue:
                self._send_bytes()
        except BlockingIOError:
            pass
        except ConnectionError:  # the peer is dead, but bytes that it sent are still to be read
            self._broken = True
            self.pending = 0
            self._queue.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)  # so that reading is sure to meet an end
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # too many descriptors of this user are in flight
                self._transport.lose(self, f"send failed: {error}")
                return
        if self._watched != bool(self._queue):
            self._watched = bool(self._queue)
            self._transport.watch(self, writing=self._watched)

    def _send_bytes(self) -> None:
        """Send the bytes of one system call."""
        parts = [data for data, _ in itertools.islice(self._queue, _BUFFERS_PER_CALL)]
        # One descriptor at a time: a reader whose table is full does not learn how many it lacks.
        if self._to_pass:
            descriptor = array.array("i", [self._to_pass[0].descriptor])
            parts = parts if len(self._to_pass) == 1 else [parts[0][:1]]
            sent = self._socket.sendmsg(parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor)])
            del self._to_pass[0]
        else:
            sent = self._socket.sendmsg(parts)
        self.pending -= sent
        while sent:
            first, address = self._queue.popleft()
            if sent < first.nbytes:
                self._queue.appendleft((first[sent:], address + sent if address else 0))
                return
            sent -= first.nbytes

    def _receive(self, into: memoryview) -> int:
        """Receive bytes into a buffer, and descriptors with them; return the number of bytes."""
        count, ancillary, flags, _ = self._socket.recvmsg_into(
            [into], _DESCRIPTOR_SPACE, _CLOSE_ON_EXEC
        )
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += array.array("i", data[: len(data) // 4 * 4])
        if flags & _CUT_OFF:
            self._descriptors.append(None)
        return count

    def await_bytes(self, missing: int) -> None:
        """Let the transport sleep until a good part of the payload's missing bytes has come."""
        missing -= self._withheld
        wanted = 1 if self._lender is not None else max(min(missing, _WORTH_WAKING), 1)
        if wanted != self._awaited:
            self._awaited = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _borrow(self, notice: memoryview, size: int) -> Bytes | None:
        """Return a lent payload; None, and ask for its bytes, if it cannot be mapped."""
        payload = self._borrower.borrow(notice, size, self._descriptors)
        if payload is None:
            self._append(memoryview(control(SEND_AGAIN, shared_memory.NOTICE.unpack(notice)[1])))
            self._transport.gather(self)
        return payload

    def _send_again(self, slot: int) -> None:
        """Send the bytes of the payload lent in a slot, which the peer could not map; ProtocolError: none is there."""
        if self._lender is None:
            raise ProtocolError("a payload is wanted again of an end that lends none")
        header, payload = self._lender.take_back(slot)
        self._append(memoryview(control(SENT_AGAIN, slot) + header))
        self._append(buffer_of(payload), address_of(payload))
        self._transport.gather(self)

    def release(self) -> None:
        """Free the shared memory and the descriptors of this channel."""
        if self._lender is not None:
            self._lender.close()
        self._borrower = shared_memory.Borrower()
        while self._descriptors:
            if (descriptor := self._descriptors.popleft()) is not None:
                os.close(descriptor)
        self._to_pass.clear()

    def holds(self, memory: Memory) -> bool:
        """Return whether queued bytes lie in this memory."""
        begin = address_of(memory)
        end = begin + memory.nbytes
        return any(
            address and address < end and begin < address + data.nbytes
            for data, address in self._queue
        )

    def own_pending(self, memory: Memory) -> None:
        """Copy queued bytes that lie in this memory, which may change afterwards."""
        begin = address_of(memory)
        end = begin + memory.nbytes
        for index, (data, address) in enumerate(self._queue):
            if address and address < end and begin < address + data.nbytes:
                self._queue[index] = (memoryview(bytes(data)), 0)

    def leave(self) -> None:
        """Close this process' copy of the socket, which stays open in the one it was forked from."""
        self.closed = True
        self.pending = 0
        self._queue.clear()
        self._socket.close()
        self.release()

    def drop_arriving(self, memory: Memory) -> None:
        """Stop writing to this memory: a payload that is half-way there is discarded."""
        self._reader.drop(memory)

    def close(self) -> None:
        """Close the socket at once; queued bytes that it does not take now are lost."""
        if self.pending and not self.closed:
            self.flush()
        self._transport.forget(self)
