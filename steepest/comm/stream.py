"""One connected socket as a channel: what is queued, what leaves, what goes through shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from steepest.comm import shared
from steepest.comm.channel import overlap
from steepest.comm.frame import FrameReader, buffer_of, encode
from steepest.comm.message import Message, Peer
from steepest.errors import ProtocolError

if TYPE_CHECKING:
    from steepest.comm.wire import Handshake, WireTransport

_BUFFERS_PER_CALL = 64
_GATHERED_BYTES = 1 << 15  # less than this waits for the end of the turn, for company
_DESCRIPTORS_SPACE = socket.CMSG_SPACE(8) if hasattr(socket, "CMSG_SPACE") else 0  # a ring's two


@dataclass
class _Shared:
    """A queued payload that goes through the ring; what is left of it."""

    rest: memoryview


class WireChannel:
    """A `Channel` over one connected socket; made by `WireTransport`."""

    def __init__(self, transport: WireTransport, sock: socket.socket, name: str, peers: tuple[Peer, ...]) -> None:
        self.name = name
        self.peers = peers
        self.pending = 0
        self.closed = False
        self._broken = False  # takes no more bytes; what it still holds is read before it is lost
        self._transport = transport
        self._socket = sock
        self._queue: deque[memoryview | _Shared] = deque()
        local = sock.family == socket.AF_UNIX and shared.AVAILABLE
        self._ring_out: shared.RingWriter | None = None
        self._ring_in: shared.RingReader | None = None
        self._sharing = local
        self._descriptors: list[int] = []  # that came over the socket, and were not asked for yet
        self._to_pass: tuple[int, int] | None = None  # that go with the next bytes
        self._reader = FrameReader(self._receive if local else sock.recv_into, transport.sink, self._ring)
        self.handshake: Handshake | None = None

    def send(self, message: Message) -> None:
        """Queues a message; small ones leave together, before the transport waits. Dropped when it is closed."""
        if self.closed or self._broken:
            return
        payload = message.payload
        through_ring = self._sharing and payload is not None and payload.numel() >= shared.SHARED_FROM
        self._append(memoryview(encode(message, through_ring)))
        if payload is not None and through_ring:
            self._queue.append(_Shared(buffer_of(payload)))
            self.pending += payload.numel()
        elif payload is not None:
            self._append(buffer_of(payload))
        self._transport.count(message)
        if self.pending > _GATHERED_BYTES:
            self.flush()
        else:
            self._transport.gather(self)

    def _append(self, data: memoryview) -> None:
        if data.nbytes:
            self._queue.append(data)
            self.pending += data.nbytes

    def flush(self) -> None:
        """Sends queued bytes until the socket takes no more; asks to be told when it does again."""
        queue = self._queue
        full = False
        try:
            while queue and not full:
                first = queue[0]
                if isinstance(first, _Shared):
                    full = not self._write_piece(first)
                else:
                    self._send_bytes()
        except BlockingIOError:
            pass
        except ConnectionError:  # the peer is gone, but what it sent before is still to be read
            self._broken = True
            self.pending = 0
            queue.clear()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RD)  # so that reading is sure to meet an end
        except OSError as error:
            self._transport.lose(self, f"send failed: {error}")
            return
        self._transport.watch(self, writing=bool(queue) and not full)
        if full and self._ring_out is not None:
            self._transport.watch_room(self, self._ring_out.room)

    def _send_bytes(self) -> None:
        """One system call's worth of what lies before the next payload for the ring."""
        queue = self._queue
        parts: list[memoryview] = []
        for item in queue:
            if isinstance(item, _Shared) or len(parts) == _BUFFERS_PER_CALL:
                break
            parts.append(item)
        if self._to_pass is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=2i", *self._to_pass))]
            sent = self._socket.sendmsg(parts, ancillary)
            self._to_pass = None
        else:
            sent = self._socket.sendmsg(parts)
        self.pending -= sent
        while sent:
            first = queue.popleft()
            assert isinstance(first, memoryview)
            if sent < first.nbytes:
                queue.appendleft(first[sent:])
                return
            sent -= first.nbytes

    def _write_piece(self, item: _Shared) -> bool:
        """Copies a piece into the ring and puts its notice in the queue; False when there is no room."""
        if self._ring_out is None:
            self._ring_out = shared.RingWriter()
            self._to_pass = self._ring_out.descriptors
        count = self._ring_out.write(item.rest)
        if not count:
            return False
        item.rest = item.rest[count:]
        if not item.rest.nbytes:
            self._queue.popleft()
        self._queue.appendleft(memoryview(shared.NOTICE.pack(count)))
        self.pending += shared.NOTICE.size - count
        return True

    def _receive(self, into: memoryview) -> int:
        """As `recv_into`, for descriptors too."""
        count, ancillary, _, _ = self._socket.recvmsg_into([into], _DESCRIPTORS_SPACE, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors += struct.unpack(f"={len(data) // 4}i", data[: len(data) // 4 * 4])
        return count

    def _ring(self) -> shared.RingReader:
        """The ring that the peer writes to.

        Raises:
            ProtocolError: it has passed none.
        """
        if self._ring_in is None:
            descriptors, self._descriptors = self._descriptors[:2], self._descriptors[2:]
            if len(descriptors) < 2:
                raise ProtocolError("a payload in shared memory that was never passed")
            self._ring_in = shared.RingReader(descriptors)
        return self._ring_in

    def release(self) -> None:
        """Lets shared memory and descriptors go."""
        for ring in (self._ring_out, self._ring_in):
            if ring is not None:
                ring.close()
        self._ring_out = self._ring_in = None
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def own_pending(self, memory: torch.Tensor) -> None:
        """Copies queued bytes that lie in this memory, so that it may change."""
        for index, item in enumerate(self._queue):
            data = item.rest if isinstance(item, _Shared) else item
            if not data.readonly and overlap(torch.frombuffer(data, dtype=torch.uint8), memory):
                own = memoryview(bytes(data))
                self._queue[index] = _Shared(own) if isinstance(item, _Shared) else own

    def close(self) -> None:
        """Closes the socket at once; queued bytes that it does not take now are lost."""
        if self.pending and not self.closed:
            self.flush()
        self._transport.forget(self)
