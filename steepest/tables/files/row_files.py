"""Files of rows in one process: of snapshots that its servers keep on disk, and of those that it was sent.

They have no names on the disk, so that none outlives the process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from steepest.core.system import system
from steepest.core.tensors.memory import Bytes
from steepest.data.storage.blocks import Blocks
from steepest.data.storage.nameless import nameless_file
from steepest.errors import ResourcesError

#: A part of the state of an opaque chunk: descriptions and tensors.
Records = list[tuple[dict[str, Any], torch.Tensor]]
#: Has a function run on the thread of a process' router.
OnRouter = Callable[[Callable[[], None]], object]


class NamelessFile:
    """A file that is deleted with its last user."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        try:
            self._file = nameless_file(directory)
        except OSError as error:
            raise ResourcesError(self._refused(error)) from error
        weakref.finalize(self, os.close, self._file)

    @property
    def path(self) -> Path:
        """A path that opens it."""
        return Path(f"/proc/self/fd/{self._file}")

    def write(self, at: int, data: Any) -> None:
        """Write bytes at a place; ResourcesError: the disk has no room."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._file, view, at)
                view, at = view[written:], at + written
        except OSError as error:
            disk = os.fstatvfs(self._file)
            room = f" {len(view):,} more bytes are to be written; {disk.f_bavail * disk.f_frsize:,} are free."
            raise ResourcesError(self._refused(error) + room) from error

    def _refused(self, error: OSError) -> str:
        return (
            f"directory {self.directory!r} of {os.uname().nodename} cannot hold rows of embedding tables: {error}. "
            "Make room there, give the table's directory= another disk, or give checkpoints a place that all machines "
            "reach, such as s3://bucket/run7."
        )


class RowFiles:
    """The files of rows in one process, by a snapshot's number, or a restore's, and name; any thread may use it."""

    def __init__(self) -> None:
        self._files: dict[int, dict[str, NamelessFile]] = {}
        self._lock = system().lock()

    def write(self, number: int, name: str, at: int, data: Any, directory: str) -> None:
        """Write bytes at a place of a file, which is made if it is not there.

        Raises:
            ResourcesError: there is no room.
        """
        file = self.find(number, name) or NamelessFile(directory)
        file.write(at, data)
        with self._lock:
            self._files.setdefault(number, {})[name] = file

    def find(self, number: int, name: str) -> NamelessFile | None:
        """Return a file; None if it is not here."""
        with self._lock:
            return self._files.get(number, {}).get(name)

    def read(self, number: int, name: str) -> tuple[str, Bytes]:
        """Return the directory and the bytes of a file, for `keep` of another process."""
        file = self.find(number, name)
        assert file is not None
        return file.directory, np.fromfile(file.path, np.uint8)

    def keep(self, number: int, name: str, read: tuple[str, Bytes]) -> None:
        """Keep a copy of a file, as `read` returned it; ResourcesError: there is no room."""
        directory, data = read
        self.write(number, name, 0, data, directory)

    def names(self, number: int) -> list[str]:
        """Return the names of all files of a number."""
        with self._lock:
            return list(self._files.get(number, ()))

    def drop(self, number: int, names: Collection[str] | None = None) -> None:
        """Drop files of a number: those of some names, or all."""
        with self._lock:
            for name in [*self._files.get(number, ())] if names is None else names:
                self._files.get(number, {}).pop(name, None)

    def keep_only(self, numbers: Collection[int], last: int) -> None:
        """Drop all snapshots but some, up to the one of a number: the next may have begun when this is heard."""
        with self._lock:
            self._files = {
                at: each for at, each in self._files.items() if at in numbers or not 0 < at <= last
            }


class SnapshotStorage:
    """Where a server's `RowWriter` writes a snapshot: the files of its process.

    Args:
        files: the process'.
        number: the snapshot's.
    """

    def __init__(self, files: RowFiles, number: int) -> None:
        self._files, self._number = files, number

    def write(self, path: Path, blocks: Blocks) -> None:
        """Write a file in the path's folder, without its name; ResourcesError: there is no room."""
        at = 0
        for block in blocks():
            self._files.write(self._number, path.name, at, block, str(path.parent))
            at += len(block)

    def discard(self, paths: list[Path]) -> None:
        """Drop files."""
        self._files.drop(self._number, [path.name for path in paths])
