"""Arrays that grow where they are: address space is reserved, and used page by page."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ResourcesError

#: Python 3.10 to 3.12 do not name it.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_SMALL = 1 << 22  # bytes in pages of the usual size, since a few rows would take whole huge pages
_LEAST = 1 << 26  # bytes; a system that refuses even these has no memory left


def physical_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Reserved:
    """A zeroed array in reserved address space; memory is taken when an item is first written.

    It never moves, so that growing copies nothing. Where the system does not promise memory that it
    has not (`vm.overcommit_memory=2`, `ulimit -v`), it is as large as the system allows.
    """

    def __init__(self, count: int, dtype: npt.DTypeLike, width: int = 1) -> None:
        """Reserve room for `count` rows of `width` items, or for as many as the system allows."""
        self._row = width * np.dtype(dtype).itemsize
        self._memory = _reserve(count * self._row)
        self.capacity = len(self._memory) // self._row
        flat = np.frombuffer(self._memory, dtype, self.capacity * width)
        self.array: npt.NDArray[Any] = flat if width == 1 else flat.reshape(self.capacity, width)

    def require(self, count: int) -> None:
        """Check that there is room for so many rows; ResourcesError otherwise."""
        if count > self.capacity:
            raise ResourcesError(
                f"no room for {count:,} rows of {self._row} bytes: the system reserved "
                f"{self.capacity * self._row:,} bytes of address space. Set a table's capacity, "
                "use more servers, or allow more (sysctl vm.overcommit_memory, ulimit -v)"
            )


class RowRoom:
    """The room for rows in memory and on disk, as `Reserved` has it."""

    def __init__(self, capacity: int, require: Callable[[int], None]) -> None:
        self.capacity, self._require = capacity, require

    def require(self, count: int) -> None:
        """Check that there is room for so many rows; ResourcesError otherwise."""
        if count > self.capacity:
            raise ResourcesError(
                f"no room for {count:,} rows of which some are on disk: {self.capacity:,} are the most. Set a "
                "table's capacity, or use more servers"
            )
        self._require(count)


def _reserve(size: int) -> mmap.mmap:
    """Return anonymous memory of `size` bytes, or as many as the system allows."""
    # ResourcesError: that is next to none.
    size = max(size, _LEAST)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    while True:
        try:
            memory = mmap.mmap(-1, size, flags=flags)
        except (OSError, ValueError) as error:
            if size <= _LEAST:
                raise ResourcesError(f"no address space for an embedding table: {error}") from error
            size = max(size // 2, _LEAST)
            continue
        if hasattr(mmap, "MADV_HUGEPAGE") and size > _SMALL:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE, _SMALL, size - _SMALL)
        return memory
