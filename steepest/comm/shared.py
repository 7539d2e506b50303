"""Shared memory between two processes of one host: payloads pass through a ring, the socket carries notices.

The writer makes a ring (a sealed `memfd`) and an `eventfd`, and passes both over the Unix-domain socket. It
copies a piece into the ring and says its size on the socket; the reader copies it out and adds its size to
the eventfd, which gives the room back. Nothing is named, so nothing is left behind when a process is killed,
and each byte is copied twice in memory instead of twice through the kernel's socket buffers.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct

from steepest.errors import ProtocolError

RING_BYTES = 8 << 20
PIECE_BYTES = 1 << 20  # stays in the processors' caches between the two copies
SHARED_FROM = 1 << 15  # smaller payloads go through the socket with their header
NOTICE = struct.Struct("<I")
AVAILABLE = hasattr(os, "memfd_create") and hasattr(os, "eventfd")  # Linux
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK, F_SEAL_GROW: nobody pulls the memory away from under the other
_GET_SEALS, _ADD_SEALS = 1034, 1033


class RingWriter:
    """The sending end."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("steepest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._memory, RING_BYTES)
        fcntl.fcntl(self._memory, _ADD_SEALS, _SEALS)
        self.room = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._map = mmap.mmap(self._memory, RING_BYTES)
        self._view = memoryview(self._map)
        self._at = 0
        self._free = RING_BYTES

    @property
    def descriptors(self) -> tuple[int, int]:
        """What the reader needs."""
        return self._memory, self.room

    def write(self, data: memoryview) -> int:
        """Copies the first part of some bytes; how many, 0 while there is no room (wait for `room`)."""
        if self._free < min(data.nbytes, PIECE_BYTES):
            with contextlib.suppress(BlockingIOError):  # nothing was read since
                self._free = min(self._free + os.eventfd_read(self.room), RING_BYTES)
        count = min(data.nbytes, PIECE_BYTES, self._free, RING_BYTES - self._at)
        if count:
            self._view[self._at : self._at + count] = data[:count]
            self._at = (self._at + count) % RING_BYTES
            self._free -= count
        return count

    def close(self) -> None:
        """Lets the memory go; the reader keeps its own hold on it."""
        self._view.release()
        self._map.close()
        os.close(self._memory)
        os.close(self.room)


class RingReader:
    """The receiving end.

    Args:
        descriptors: as they came over the socket; taken over.

    Raises:
        ProtocolError: they are not a ring.
    """

    def __init__(self, descriptors: list[int]) -> None:
        try:
            memory, self._room = descriptors
        except ValueError:
            raise ProtocolError(f"a peer passed {len(descriptors)} descriptors, a ring has 2") from None
        try:
            sealed = fcntl.fcntl(memory, _GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(memory).st_size != RING_BYTES:
                raise ProtocolError("the shared memory of a peer is not a ring of this version")
            self._map = mmap.mmap(memory, RING_BYTES, prot=mmap.PROT_READ)
        except (OSError, ValueError, ProtocolError) as error:
            os.close(self._room)
            raise ProtocolError(f"the shared memory of a peer cannot be used: {error}") from None
        finally:
            os.close(memory)
        self._view = memoryview(self._map)
        self._at = 0

    def read(self, count: int, target: memoryview | None) -> None:
        """Copies the next piece to where it belongs (None: nowhere), and gives its room back.

        Raises:
            ProtocolError: no writer makes such a piece.
        """
        if not 0 < count <= min(PIECE_BYTES, RING_BYTES - self._at) or (target is not None and target.nbytes < count):
            raise ProtocolError(f"a piece of {count} bytes in shared memory is out of place")
        if target is not None:
            target[:count] = self._view[self._at : self._at + count]
        self._at = (self._at + count) % RING_BYTES
        os.eventfd_write(self._room, count)

    def close(self) -> None:
        """Lets the memory go."""
        self._view.release()
        self._map.close()
        os.close(self._room)
