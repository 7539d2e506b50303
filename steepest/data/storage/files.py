"""How checkpoints lie in a place: one interface over directories and object stores."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol, TypeVar

from steepest.data.storage.blocks import Blocks, Progress, write_blocks
from steepest.data.storage.places import ObjectUrl, StoragePlace

P = TypeVar("P")
log = logging.getLogger(__name__)


class Storage(Protocol[P]):
    """Files in folders, of which one by one is written or replaced as a whole.

    Every method raises OSError if the place cannot be reached or used, within a deadline where it
    is remote; the error names the place and what was done there.

    Attributes:
        certain: whether a call that has raised has no effect any more, so that what is there then is
            what it has done.
    """

    certain: bool

    def make(self, folder: P) -> None:
        """Make a folder, and those that it is in, unless they are there."""

    def folders(self, folder: P) -> list[P]:
        """Return the folders in a folder, in any order."""

    def files(self, folder: P) -> list[P]:
        """Return the files in a folder, in any order; none if there is no such folder."""

    def exists(self, file: P) -> bool:
        """Return whether there is such a file."""

    def version(self, file: P) -> str | None:
        """Return a mark that differs whenever a small file's bytes do; None if there is no such file."""

    def read(self, file: P) -> bytes:
        """Return what a small file holds; FileNotFoundError: there is none."""

    def on_disk(self, file: P) -> contextlib.AbstractContextManager[Path]:
        """Provide a file on this machine's disk during a block; FileNotFoundError: there is none."""

    def write(self, file: P, blocks: Blocks) -> None:
        """Write a file in blocks; return when it is durable; a reader may see it unfinished.

        Args:
            blocks: called again when the write begins anew.
        """

    def replace(self, file: P, blocks: Blocks) -> None:
        """Write a file in blocks, as a whole: a reader sees all of it, or what was there before."""

    def commit(
        self, file: P, data: bytes, stamp: str, replaced: str | None, progress: Progress
    ) -> None:
        """Write a small file in one step: a reader sees all of it, or what was there before.

        Args:
            file: its place.
            data: what it holds; no two writers write the same.
            stamp: a name that no other write has.
            replaced: its `version` when the writer began.
            progress: called with the file that is worked on.

        Raises:
            FileExistsError: another writer has written or removed it since, and what is there stays.
                S3 says so whenever it is; others, but for a file that was not there, unless both
                write in the same moment.
        """

    def remove(self, file: P) -> None:
        """Remove a file, if it is there."""

    def remove_folder(self, folder: P) -> None:
        """Remove a folder with all that it holds."""

    def discard(self, files: list[P]) -> None:
        """Remove what a write that failed has written, if nothing else does; raises nothing."""

    def remove_unfinished(self, folder: P) -> None:
        """Remove the folder of a write that failed, if no other process writes there; raises nothing."""


class LocalStorage:
    """Directories: files are renamed to be committed, and synced to be durable."""

    certain = True

    def make(self, folder: Path) -> None:
        """Make a directory, and those that it is in; those that are new are durable then."""
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for made in reversed(missing):
            _sync(made.parent)

    def folders(self, folder: Path) -> list[Path]:
        """Return the directories in a directory."""
        return [path for path in folder.iterdir() if path.is_dir()]

    def files(self, folder: Path) -> list[Path]:
        """Return the files in a directory."""
        return [path for path in folder.glob("*") if not path.is_dir()]

    def exists(self, file: Path) -> bool:
        """Return whether there is such a file."""
        return file.exists()

    def version(self, file: Path) -> str | None:
        """Return a hash of a small file's bytes: on some file systems inode numbers and times are wrong."""
        try:
            return hashlib.sha256(self.read(file)).hexdigest()
        except FileNotFoundError:
            return None

    def read(self, file: Path) -> bytes:
        """Return what a file holds."""
        with open_file(file) as opened:
            return opened.read()

    def on_disk(self, file: Path) -> contextlib.AbstractContextManager[Path]:
        """Return the file itself."""
        open_file(file).close()
        return contextlib.nullcontext(file)

    def write(self, file: Path, blocks: Blocks) -> None:
        """Write a file, and sync it."""
        write_blocks(file, blocks)

    def replace(self, file: Path, blocks: Blocks) -> None:
        """Write a file beside its place, sync it, and rename it."""
        with _renamed(file.with_name(f".{file.name}.unfinished"), file) as unfinished:
            write_blocks(unfinished, blocks)

    def commit(
        self, file: Path, data: bytes, stamp: str, replaced: str | None, progress: Progress
    ) -> None:
        """Write a file beside its place, sync it, and rename it."""
        with _renamed(file.with_name(f".{file.name}-{stamp}"), file) as unfinished:
            progress(unfinished)
            unfinished.write_bytes(data)
            _sync(unfinished)
            if self.version(file) != replaced:
                raise FileExistsError(f"another process has written or removed {file} meanwhile")

    def remove(self, file: Path) -> None:
        """Remove a file, if it is there."""
        file.unlink(missing_ok=True)

    def remove_folder(self, folder: Path) -> None:
        """Remove a directory with all that it holds."""
        shutil.rmtree(folder)

    def discard(self, files: list[Path]) -> None:
        """Remove files as long as the disk answers."""
        for file in files:
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                log.warning("what was not finished stays: %s", error)
                return

    def remove_unfinished(self, folder: Path) -> None:
        """Remove a directory, in which the holder of the lock alone writes."""
        shutil.rmtree(folder, ignore_errors=True)


def storage_of(place: StoragePlace) -> Storage[Any]:
    """Return the storage of a place."""
    if not isinstance(place, ObjectUrl):
        return LocalStorage()
    from steepest.data.storage.object_storage import ObjectStorage

    return ObjectStorage.of(place.scheme)


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading, in bytes.

    Raises:
        OSError: it does not exist, or is no regular file, such as a FIFO, which would block until it has a writer.
    """
    return open(path, "rb", opener=_open_regular)


def drop_cached(path: Path) -> None:
    """Have the system's cache drop a file, whose memory is free then; do nothing where that cannot be."""
    with contextlib.suppress(OSError, AttributeError), open_file(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # of a directory `open` says so itself
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


@contextlib.contextmanager
def _renamed(unfinished: Path, file: Path) -> Iterator[Path]:
    """Write a file beside its place in a block; rename it there after the block, or remove it."""
    try:
        yield unfinished
        os.replace(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    _sync(file.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
