"""Memory that one step frees and the next step uses, by the C library's allocator and by block.

glibc gives large blocks back to the kernel as they are freed, so that each step would have its
gradients' memory mapped and zeroed anew: half of the time of a 25-million-parameter step on the
CPU. glibc can be told to keep them, but only in its main arena (others consist of heaps of at most
64 MB), which only the first thread uses unless the number of arenas is limited.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from steepest.core.tensors.memory import Bytes, address_of

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt(3)
_LARGEST = (1 << 31) - 1
_CANDIDATES = 64
_PROBE_BYTES = 1 << 20
_WORTH_KEEPING = 1 << 20  # blocks of this many bytes or more are used again
_KEPT = 2  # blocks of one size
_here = threading.local()
_ALIGNMENT = 64  # as torch has it: where memory begins may decide how sums over it are rounded


def empty_bytes(nbytes: int) -> Bytes:
    """Return uninitialised memory, aligned to 64 bytes."""
    memory = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -address_of(memory) % _ALIGNMENT
    return memory[start : start + nbytes]


class Recycler:
    """Blocks of memory that are used again: fresh pages cost more than a transfer.

    Use it on any thread.

    Args:
        make: returns new memory of a number of bytes.
        may_keep: called when a block comes back; if it returns False the block is freed.
        least: bytes below which blocks are not kept.
        most: blocks of each size that are kept.
        rounded: whether the size of a block is the next power of two, so that it serves many sizes;
            the unused part of mapped memory takes no page.

    Example:
        >>> recycler = Recycler()
        >>> first = recycler.empty(1 << 20)
        >>> address = first.ctypes.data
        >>> del first
        >>> recycler.empty(1 << 20).ctypes.data == address
        True
    """

    def __init__(
        self,
        make: Callable[[int], Any] = empty_bytes,
        may_keep: Callable[[], bool] = lambda: True,
        *,
        least: int = _WORTH_KEEPING,
        most: int = _KEPT,
        rounded: bool = False,
    ) -> None:
        self._make = make
        self._may_keep = may_keep
        self._least, self._most, self._rounded = least, most, rounded
        self._free: dict[int, list[Any]] = {}

    def empty(self, nbytes: int) -> Bytes:
        """Return an uninitialised uint8 array of `nbytes`, whose memory comes back when its last view is collected."""
        if nbytes < self._least:
            return empty_bytes(nbytes)
        size = 1 << (nbytes - 1).bit_length() if self._rounded else nbytes
        kept = self._free.setdefault(size, [])
        try:
            memory = kept.pop()
        except IndexError:
            memory = self._make(size)
        # over a memoryview, so that views of the array hold it, and not `memory`
        array = np.frombuffer(memoryview(memory), dtype=np.uint8, count=nbytes)
        weakref.finalize(array, self._keep, kept, memory).atexit = False
        return array

    def _keep(self, kept: list[Any], memory: Any) -> None:
        if len(kept) < self._most and self._may_keep():
            kept.append(memory)


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory for later allocations; return whether this C library can.

    The process then stays as large as it ever was. Threads that start later share the main arena.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    options = ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, _LARGEST), (_ARENA_MAX, 1))
    return all(libc.mallopt(option, ctypes.c_int(value)) for option, value in options)


def start_thread(body: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread, if possible one that allocates from the main arena, and return it.

    A new thread first gets an arena that an ended thread has left, so threads are started until one
    has the main arena; the others end at once.
    """
    candidates: list[tuple[threading.Thread, Future[bool]]] = []
    for _ in range(_CANDIDATES):
        chosen: Future[bool] = Future()
        has_main: Future[bool] = Future()
        thread = threading.Thread(
            target=_candidate, args=(body, has_main, chosen), name=name, daemon=True
        )
        thread.start()
        candidates.append((thread, chosen))
        if has_main.result():
            break
    for _, chosen in candidates[:-1]:
        chosen.set_result(False)
    thread, chosen = candidates[-1]
    chosen.set_result(True)
    return thread


def _candidate(body: Callable[[], None], has_main: Future[bool], chosen: Future[bool]) -> None:
    has_main.set_result(on_main_arena())
    if chosen.result():
        _here.keeps = True
        body()


def keeps_here() -> bool:
    """Return whether the calling thread was started by `start_thread`; threads that share its work should be, too."""
    return getattr(_here, "keeps", False)


def on_main_arena() -> bool:
    """Return whether this thread's large blocks come from the program's heap; True where that is unknown."""
    try:
        with open("/proc/self/maps") as maps:
            heaps = [
                line.split()[0].split("-") for line in maps if line.rstrip().endswith("[heap]")
            ]
    except OSError:
        return True
    if platform.libc_ver()[0] != "glibc" or not heaps:
        return True
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    block = libc.malloc(_PROBE_BYTES)
    try:
        with open("/proc/self/maps") as maps:  # the heap may have grown
            heaps = [
                line.split()[0].split("-") for line in maps if line.rstrip().endswith("[heap]")
            ]
        return any(int(begin, 16) <= block < int(end, 16) for begin, end in heaps)
    finally:
        libc.free(block)
