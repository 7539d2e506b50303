"""Files as blocks of bytes, so that a disk that hangs is noticed."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_SYNC = 256 << 20  # bytes after which the writer waits for the disk: then progress is real
_BUFFER = 4 << 20
_ALIGNED = 4096  # places and sizes of what is written past the system's cache are multiples
# what a system answers that cannot write a file so: tmpfs of old kernels, some file systems of networks
_NOT_HERE = (errno.EINVAL, errno.EOPNOTSUPP)

#: Called with the path or URL of the file that is written, before the first and after each block of it.
Progress = Callable[[object], None]
#: The blocks of a file, from the first one whenever it is called.
Blocks = Callable[[], Iterator[memoryview]]


def no_progress(path: object) -> None:
    """Do nothing."""


def write_blocks(path: Path, blocks: Blocks) -> None:
    """Write a file, past the system's cache where that can be, and return when it is on the disk.

    Raises:
        OSError: it cannot be written.
    """
    try:
        _write(path, blocks, getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        _write(path, blocks, 0)


def _write(path: Path, blocks: Blocks, flags: int) -> None:
    """Write a file from its beginning, through a buffer that begins and ends where a disk's blocks may."""
    size, filled, buffer = 0, 0, memoryview(mmap.mmap(-1, _BUFFER, mmap.MAP_PRIVATE))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o666)
    try:
        for block in blocks():
            while block:
                part = block[: _BUFFER - filled]
                buffer[filled : filled + len(part)] = part
                block, filled, size = block[len(part) :], filled + len(part), size + len(part)
                if filled == _BUFFER:
                    _write_all(file, buffer)
                    filled = 0
                    if size % _SYNC == 0:
                        os.fsync(file)
        _write_all(file, buffer[: -(-filled // _ALIGNED) * _ALIGNED])
        os.ftruncate(file, size)
        os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, data: memoryview) -> None:
    """Write all of some bytes where the file ends."""
    while data:
        data = data[os.write(file, data) :]
