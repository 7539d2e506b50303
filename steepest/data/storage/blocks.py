"""Files as blocks of bytes, so that a disk that hangs is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_SYNC = 256 << 20  # bytes after which the writer waits for the disk: then progress is real

#: Called with the path or URL of the file that is written, before the first and after each block of it.
Progress = Callable[[object], None]
#: The blocks of a file, from the first one whenever it is called.
Blocks = Callable[[], Iterator[memoryview]]


def no_progress(path: object) -> None:
    """Do nothing."""


def write_blocks(path: Path, blocks: Blocks) -> None:
    """Write a file, and return when it is on the disk; OSError: it cannot be written."""
    unsynced = 0
    with open(path, "wb") as file:
        for block in blocks():
            file.write(block)
            unsynced += len(block)
            if unsynced >= _SYNC:
                _sync(file)
                unsynced = 0
        _sync(file)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
