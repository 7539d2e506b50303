"""Payloads lent in shared memory between processes of one host, where only a notice travels.

Memory that others may read is a `Segment`: a sealed `memfd` whose descriptor is passed over the
Unix-domain socket once; the process at the other end maps it to read. A notice names the segment
and the place in it. The reader returns a payload by setting a byte on the lender's *board*, a page
that both map: that takes no message and wakes no process. Where descriptors or memory have run out,
at either end, payloads go through the socket. Segments have no names, so none stays behind when a
process is killed, and memory is freed with its last user.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from steepest.core.tensors.allocator import empty_bytes
from steepest.core.tensors.memory import Bytes, Memory, address_of, copy_bytes
from steepest.errors import ProtocolError

if TYPE_CHECKING:
    import torch

AVAILABLE = hasattr(os, "memfd_create") and sys.platform == "linux"
SHARED_FROM = 1 << 15  # bytes; smaller payloads go through the socket with their header
#: number of the segment, in the order of passing; byte of the board; offset in the segment
NOTICE = struct.Struct("<IIQ")
BOARD_BYTES = 4096  # as many payloads may be lent over one channel at a time
REGION_BYTES = 64 << 20
OUTBOX_BYTES = 1 << 30
MAX_DESCRIPTORS = 64  # passed with one message
_MANY_KEPT = 16  # payloads kept for a reader; from then on check which ones it has returned
_SEALS = 0x0002 | 0x0004  # F_SEAL_SHRINK, F_SEAL_GROW: its size is fixed, so a mapping stays valid
_GET_SEALS, _ADD_SEALS = 1034, 1033
_PAGEMAP = "/proc/self/pagemap"  # one word for each page of this process, see proc(5)
# In memory or swapped; of the file, and not a private copy.
_PRESENT, _SHARED_PAGE = np.uint64(3 << 62), np.uint64(1 << 61)
_RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
# A byte of the board: set by the lender; by a reader that is done; by a reader that can read.
_LENT, _GIVEN_BACK, _MAPPED = 0, 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Segment(mmap.mmap):
    """Memory that other processes may map; unmapped when no array views it any more.

    Attributes:
        descriptor: of the `memfd`.
        address: where it is mapped in this process.
        reusable: whether its owner uses it again once no array views it.
    """

    descriptor: int
    address: int
    reusable: bool = False

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Return a segment of zeros, whose pages are taken as they are touched.

        Raises:
            OSError: descriptors or memory ran out.
        """
        descriptor = os.memfd_create("steepest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
            segment = cls._map(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(segment, os.close, descriptor)
        return segment

    @classmethod
    def attach(cls, descriptor: int, *, writable: bool = False) -> Segment:
        """Map another process' segment and return it.

        Args:
            descriptor: of the segment; closed in any case.
            writable: whether to map it for writing, too; otherwise writes stay private.

        Raises:
            ProtocolError: the descriptor is of no sealed memory.
            OSError: descriptors or memory have run out.
        """
        try:
            if fcntl.fcntl(descriptor, _GET_SEALS) & _SEALS != _SEALS:
                raise ProtocolError(
                    "the shared memory of a peer could be pulled away: it is not sealed"
                )
            size = os.fstat(descriptor).st_size
            if writable:
                return cls._map(descriptor, size, mmap.PROT_READ | mmap.PROT_WRITE)
            segment = cls._map(descriptor, size, mmap.PROT_READ, mmap.MAP_PRIVATE)
            _borrowed[segment.address] = segment
            return segment
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _RUN_OUT:
                raise
            raise ProtocolError(f"the shared memory of a peer cannot be used: {error}") from None
        finally:
            os.close(descriptor)

    @classmethod
    def _map(
        cls, descriptor: int, nbytes: int, protection: int, flags: int = mmap.MAP_SHARED
    ) -> Segment:
        segment = cls(descriptor, nbytes, prot=protection, flags=flags)
        segment.descriptor = descriptor
        segment.address = np.frombuffer(segment, dtype=np.uint8).ctypes.data
        return segment


# This process' own segments, and those of others that are mapped here, by address.
_segments: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
_borrowed: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()


def allocate(nbytes: int) -> torch.Tensor:
    """Return zeroed uint8 memory, if possible in a segment that other processes can map.

    Payloads in a segment are lent to processes of the same host instead of copied. Memory below 32
    KB, and memory for which descriptors have run out, is this process' own.
    """
    import torch  # a process without tensors takes `lendable`

    memory = lendable(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8) if memory is None else torch.from_numpy(memory)


def lendable_if_possible(nbytes: int) -> Bytes:
    """Return new memory: that of `lendable`, or else this process' own."""
    memory = lendable(nbytes)
    return empty_bytes(nbytes) if memory is None else memory


class Reusable:
    """Makes memory for a `Recycler`, that of `lendable` if possible; many blocks share a segment.

    A payload that lies in it is viewed until the reader has returned it.
    """

    def __init__(self) -> None:
        self._rest: Bytes | None = None
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> Bytes:
        """Return new memory."""
        with self._lock:
            if self._rest is None or self._rest.nbytes < nbytes:
                self._rest = lendable(max(nbytes, REGION_BYTES))
                if self._rest is None:
                    return empty_bytes(nbytes)
                segment = segment_of(self._rest)
                assert segment is not None
                segment.reusable = True
            part, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            return part


def lendable(nbytes: int) -> Bytes | None:
    """Return zeroed memory in a new segment; None below 32 KB, or when descriptors or memory have run out."""
    return _in_segment(nbytes) if AVAILABLE and nbytes >= SHARED_FROM else None


def _in_segment(nbytes: int) -> Bytes | None:
    """Return zeroed memory in a new segment, or None when descriptors or memory have run out."""
    try:
        segment = Segment.create(nbytes)
    except OSError:
        return None
    _segments[segment.address] = segment
    return np.frombuffer(segment, dtype=np.uint8)


def segment_of(memory: Memory) -> Segment | None:
    """Return the segment of this process in which some memory lies, or None."""
    return _holding(_segments, memory)


def _holding(segments: weakref.WeakValueDictionary[int, Segment], memory: Memory) -> Segment | None:
    """Return the segment in which some memory lies, or None; other threads may add segments."""
    address = address_of(memory)
    for reference in segments.valuerefs():  # a copy made at once, which `items` is not
        segment = reference()
        if segment is not None and 0 <= address - segment.address < len(segment):
            return segment
    return None


def give_pages_back(memory: Memory) -> bool:
    """Free the pages of memory from `allocate` in all processes; it holds zeros then.

    Returns:
        Whether they were freed: `memory` is all of a segment of this process, and the kernel can do
        it.
    """
    segment = segment_of(memory)
    if segment is None or memory.nbytes != len(segment):
        return False
    try:
        segment.madvise(mmap.MADV_REMOVE)
    except OSError:  # this kernel does not do it for such memory
        return False
    return True


def make_writable(memory: Memory, *, whole_pages: bool = True) -> bool:
    """Let this process write to memory that it has borrowed, and return whether it may.

    A write is private to this process, but hides the owner's later writes to its page (4 kB) from
    this process, until `forget_writes`.

    Args:
        memory: in a borrowed segment; memory of this process is writable anyway.
        whole_pages: whether no page holds parts that the owner writes to at different times.
    """
    if (segment := _holding(_borrowed, memory)) is None:
        return True  # of this process
    if not whole_pages or not os.access(_PAGEMAP, os.R_OK):
        return False
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return not _libc.mprotect(
        ctypes.c_void_p(segment.address), ctypes.c_size_t(len(segment)), protection
    )


def forget_writes(memory: Memory) -> list[int]:
    """Undo this process' writes to borrowed memory.

    It takes about a millisecond for each 100 MB.

    Returns:
        For each page that this changed, the offset in `memory` of its first changed byte.
    """
    if (segment := _holding(_borrowed, memory)) is None:
        return []
    pages = -(-len(segment) // mmap.PAGESIZE)
    try:
        with open(_PAGEMAP, "rb", buffering=0) as file:
            words = os.pread(file.fileno(), pages * 8, segment.address // mmap.PAGESIZE * 8)
        entries = np.frombuffer(words, dtype="<u8")
        written = np.flatnonzero((entries & _PRESENT != 0) & (entries & _SHARED_PAGE == 0))
    except OSError:  # no descriptor is left to look: any page may be written
        written = np.arange(pages)
    seen, changed = np.frombuffer(segment, dtype=np.uint8), []
    for page in written.tolist():
        part = seen[page * mmap.PAGESIZE : (page + 1) * mmap.PAGESIZE]
        before, address = part.copy(), segment.address + page * mmap.PAGESIZE
        if _libc.madvise(
            ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.MADV_DONTNEED
        ):
            raise OSError(ctypes.get_errno(), "madvise")
        if (differs := np.flatnonzero(before != part)).size:
            changed.append(address + int(differs[0]) - address_of(memory))
    return changed


class Lending:
    """The payloads that one transport has lent; used on its thread only."""

    def __init__(self) -> None:
        self._lent: Counter[int] = Counter()  # number of readers, by address of the payload
        self._lenders: set[Lender] = set()
        self._outbox: list[_MappedRegion] = []
        self._doubting: set[Lender] = set()  # lenders with payloads that may not have been mapped

    def lender(self) -> Lender:
        """Return the sending end of a new channel."""
        lender = Lender(self)
        self._lenders.add(lender)
        return lender

    def in_use(self, memory: Memory) -> bool:
        """Return whether a payload may still be read that begins at this memory's address."""
        address = address_of(memory)
        if address in self._lent:
            self._collect()
        return address in self._lent

    def confirm(self) -> None:
        """Free the payloads that were kept for readers that might not map them, and have."""
        for lender in list(self._doubting):
            lender.confirm()

    def copy(self, payload: Memory) -> Bytes | None:
        """Copy a payload into memory that can be lent, and return that copy.

        Its memory is free again when it is given back. Returns None when `OUTBOX_BYTES` of copies
        are lent.
        """
        size = -(-payload.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        place = self._place(size)
        if place is None:
            self._collect()
            place = self._place(size)
        if place is None:
            taken = sum(region.memory.nbytes for region in self._outbox)
            memory = _in_segment(max(size, REGION_BYTES)) if taken + size <= OUTBOX_BYTES else None
            if memory is None:
                return None
            self._outbox.append(_MappedRegion(memory))
            place = self._outbox[-1].take(size, self._lent)
            assert place is not None
        place = place[: payload.nbytes]
        copy_bytes(place, payload)
        return place

    def close(self) -> None:
        """Free the memory for copies once no reader uses it; nothing may be lent afterwards."""
        self._outbox.clear()

    def _place(self, size: int) -> Bytes | None:
        return next(
            (
                place
                for region in self._outbox
                if (place := region.take(size, self._lent)) is not None
            ),
            None,
        )

    def _collect(self) -> None:
        for lender in self._lenders:
            lender.collect()

    def _note(self, address: int, readers: int) -> None:
        self._lent[address] += readers
        if not self._lent[address]:
            del self._lent[address]


class _MappedRegion:
    """Memory for copies, handed out in order, and again from its beginning once all of it has come back."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self._at = 0
        self._out: list[int] = []

    def take(self, size: int, lent: Counter[int]) -> Bytes | None:
        if self._at + size > self.memory.nbytes:
            if any(address in lent for address in self._out):
                return None
            self._at, self._out = 0, []
            if size > self.memory.nbytes:
                return None
        part = self.memory[self._at : self._at + size]
        self._at += size
        self._out.append(address_of(part))
        return part


class Lender:
    """The sending end of one channel, which lends payloads to its reader; made by `Lending.lender`.

    A reader may be unable to map a segment, because descriptors or memory have run out there. So a
    payload from a segment is kept until the reader is known to have mapped that segment, and is
    sent through the socket when it asks for that.
    """

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self._numbers: weakref.WeakKeyDictionary[Segment, int] = weakref.WeakKeyDictionary()
        self._passed = 0
        self._board: Segment | None = None
        self._free: deque[int] = deque(range(BOARD_BYTES))
        self._out: dict[int, int] = {}  # addresses by slot; the reader's mapping keeps the memory
        self._kept: dict[
            int, Memory
        ] = {}  # by slot, those that would be used again, see `Reusable`
        self._collect_at = _MANY_KEPT
        self._mapped: set[int] = set()  # numbers of segments
        self._unmapped: set[int] = set()  # numbers of segments that the reader could not map
        # by slot: number of the segment, header, payload
        self._doubts: dict[int, tuple[int, bytes, Memory]] = {}

    def lend(self, payload: Memory, to_pass: list[Segment], header: Callable[[], bytes]) -> bytes:
        """Lend a flat uint8 payload; return the notice of its place, empty if it has to be sent.

        A payload outside of shared memory is copied there.

        Args:
            to_pass: segments whose descriptors go with the notice, new ones are appended.
            header: returns the message's header, used if the payload has to be sent after all.
        """
        if not self._free or len(self._kept) >= self._collect_at:
            self.collect()
            self._collect_at = max(_MANY_KEPT, 2 * len(self._kept))
        if not self._free or len(to_pass) > MAX_DESCRIPTORS - 2:
            return b""
        segment = segment_of(payload)
        if segment is None:
            copied = self._lending.copy(payload)
            if copied is None:
                return b""
            payload, segment = copied, segment_of(copied)
            assert segment is not None
        number = self._numbers.get(segment, self._passed)
        if number in self._unmapped or not self._pass_board(to_pass):
            return b""
        if number == self._passed:
            self._numbers[segment] = number
            self._passed += 1
            to_pass.append(segment)
        slot = self._free.popleft()
        address = self._out[slot] = address_of(payload)
        if segment.reusable:
            self._kept[slot] = payload
        self._lending._note(address, 1)
        if number not in self._mapped:
            self._doubts[slot] = number, header(), payload
            self._lending._doubting.add(self)
        return NOTICE.pack(number, slot, address - segment.address)

    def _pass_board(self, to_pass: list[Segment]) -> bool:
        """Pass the board to the reader if it has none yet, and return whether there is one."""
        if self._board is None:
            try:
                self._board = Segment.create(BOARD_BYTES)
            except OSError:
                return False
            to_pass.append(self._board)
        return True

    def confirm(self) -> None:
        """Free the payloads of segments that the reader has mapped."""
        assert self._board is not None
        self._mapped |= {
            number for slot, (number, _, _) in self._doubts.items() if self._board[slot]
        }
        self._doubts = {
            slot: doubt for slot, doubt in self._doubts.items() if doubt[0] not in self._mapped
        }
        if not self._doubts:
            self._lending._doubting.discard(self)

    def take_back(self, slot: int) -> tuple[bytes, Memory]:
        """Return the header and payload of a lent message that the reader cannot map.

        Nothing more is lent from its segment.

        Raises:
            ProtocolError: nothing is lent in that slot, or it was mapped.
        """
        if slot not in self._doubts:
            raise ProtocolError("a payload is wanted again that was not lent, or was mapped")
        number, header, payload = self._doubts.pop(slot)
        self._unmapped.add(number)
        self._return(slot)
        return header, payload

    def collect(self) -> None:
        """Take back the payloads that the reader has returned."""
        board = self._board
        if board is None:
            return
        if self._doubts:
            self.confirm()
        for slot in [slot for slot in self._out if board[slot] == _GIVEN_BACK]:
            self._return(slot)

    def _return(self, slot: int) -> None:
        assert self._board is not None
        self._board[slot] = _LENT
        self._lending._note(self._out.pop(slot), -1)
        self._kept.pop(slot, None)
        self._free.append(slot)

    def close(self) -> None:
        """Take back all payloads: the reader is dead."""
        for address in self._out.values():
            self._lending._note(address, -1)
        self._out.clear()
        self._kept.clear()
        self._doubts.clear()
        self._board = None
        self._lending._lenders.discard(self)
        self._lending._doubting.discard(self)


class _Loan:
    """A payload's loan, given back when the last array over it is garbage-collected."""

    def __init__(self, board: Segment, slot: int, segment: Segment) -> None:
        self._board, self._slot, self._segment = board, slot, segment
        self._process = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._process:  # a forked child copies this object and shares the board
            self._board[self._slot] = _GIVEN_BACK


class Borrower:
    """The receiving end of one channel, which reads lent payloads where they lie."""

    def __init__(self) -> None:
        self._segments: list[Segment | None] = []  # None for those that could not be mapped
        self._board: Segment | None = None
        self._has_board = False  # whether its descriptor has come; it may not have been mapped

    def borrow(
        self, notice: bytes | memoryview, size: int, descriptors: deque[int | None]
    ) -> Bytes | None:
        """Return the payload that a notice names: uint8, flat, not to be written to.

        It is given back when the last view of it is garbage-collected.

        Args:
            notice: as `Lender.lend` returned it.
            size: bytes of the payload.
            descriptors: that came over the socket and were not used yet; None for one that did not
                fit into this process' table.

        Returns:
            None when the payload has to be sent, because descriptors or memory have run out here.

        Raises:
            ProtocolError: no lender gives such a notice.
        """
        number, slot, offset = NOTICE.unpack(notice)
        try:
            if not self._has_board:
                self._board, self._has_board = _attach(descriptors.popleft(), writable=True), True
            if number == len(self._segments):
                self._segments.append(_attach(descriptors.popleft()))
            segment = self._segments[number]
        except IndexError:
            raise ProtocolError("a payload in shared memory that was never passed") from None
        if self._board is None or segment is None:
            return None
        if slot >= len(self._board) or offset + size > len(segment) or not size:
            raise ProtocolError(f"a payload of {size} bytes in shared memory is out of place")
        self._board[slot] = _MAPPED
        memory: Any = (ctypes.c_uint8 * size).from_address(segment.address + offset)
        memory.loan = _Loan(self._board, slot, segment)
        return np.frombuffer(memory, dtype=np.uint8)


def _attach(descriptor: int | None, *, writable: bool = False) -> Segment | None:
    if descriptor is None:
        return None
    try:
        return Segment.attach(descriptor, writable=writable)
    except OSError:
        return None
