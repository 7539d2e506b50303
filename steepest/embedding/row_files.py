"""Keeps snapshots of rows in files of a process: of its own shards, and copies for others.

A snapshot has a number. Of a shard it is a sequence of pieces, as `TableChunk.pieces` yields them: records, each a
description and bytes. In place of a piece the driver is sent a record with the key `ON_DISK`, which stands for it in
the driver's copy of the job's state.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from steepest.core.engine.optimizer_records import state_fields, state_tensor
from steepest.core.engine.server import Server
from steepest.core.system import system
from steepest.core.tensors.memory import Bytes
from steepest.data.storage.nameless import nameless_file
from steepest.embedding.restored_shards import RestoredShards
from steepest.errors import ResourcesError

#: The key of the record that stands for rows in files: of each piece the snapshot's number and the piece's bytes.
ON_DISK = "on_disk"
#: A part of the state of an opaque chunk: descriptions and tensors.
Records = list[tuple[dict[str, Any], torch.Tensor]]
#: The same as it lies in a file, and travels: descriptions with dtype and shape, and bytes.
PackedPiece = list[tuple[dict[str, Any], Bytes]]
#: Has a function run on the thread of a process' router.
OnRouter = Callable[[Callable[[], None]], object]
_ALIGNED = 64  # bytes, at a multiple of which an array begins


class _RowFile:
    """The pieces of one shard in one snapshot, in a file without a name."""

    def __init__(self, directory: str) -> None:
        self._directory, self._end, self._lock = directory, 0, system().lock()
        try:
            self._file = nameless_file(directory)
        except OSError as error:
            raise self._failed(error, 0) from error
        weakref.finalize(self, os.close, self._file)
        # by number of the piece, its arrays: description, place in the file, bytes
        self._pieces: dict[int, list[tuple[dict[str, Any], int, int]]] = {}
        self.count: int | None = None  # of all pieces, once it is known

    @property
    def is_whole(self) -> bool:
        """Whether all pieces are there."""
        return self.count == len(self._pieces)

    def write(self, number: int, piece: PackedPiece) -> int:
        """Append a piece, and return its size in bytes; ResourcesError: the disk has no room."""
        size = sum(len(array) + _ALIGNED for _, array in piece)
        with self._lock:
            begin, self._end = self._end, self._end + size
        entries = []
        try:
            for description, array in piece:
                begin += -begin % _ALIGNED
                view, at = memoryview(array.data), begin
                while view:
                    written = os.pwrite(self._file, view, at)
                    view, at = view[written:], at + written
                entries.append((description, begin, len(array)))
                begin = at
        except OSError as error:
            raise self._failed(error, size) from error
        self._pieces[number] = entries
        return size

    def read(self, number: int) -> PackedPiece:
        """Return a piece."""
        return [
            (description, np.frombuffer(os.pread(self._file, size, begin), np.uint8))
            for description, begin, size in self._pieces[number]
        ]

    def records(self) -> Iterator[Records]:
        """Yield the pieces in order; their arrays are mapped, and read from the file when they are used."""
        if not self._end:
            return
        os.ftruncate(self._file, self._end)
        mapped = mmap.mmap(self._file, self._end, flags=mmap.MAP_PRIVATE)
        for number in sorted(self._pieces):
            yield [
                (description, state_tensor(description, _tensor(mapped, begin, size)))
                for description, begin, size in self._pieces[number]
            ]

    def _failed(self, error: OSError, wanted: int) -> ResourcesError:
        free = ""
        if hasattr(self, "_file"):
            disk = os.fstatvfs(self._file)
            free = f" It wants {wanted:,} more bytes; {disk.f_bavail * disk.f_frsize:,} are free."
        return ResourcesError(
            f"directory {self._directory!r} of {os.uname().nodename} cannot hold the snapshot of an embedding table's "
            f"rows: {error}.{free} Make room there, or give the table's directory= another disk"
        )


def _tensor(mapped: mmap.mmap, begin: int, size: int) -> torch.Tensor | None:
    return torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=begin) if size else None


def packed(records: Iterable[tuple[dict[str, Any], torch.Tensor]]) -> PackedPiece:
    """Return records in the form of files and messages."""
    fields_and_bytes: PackedPiece = []
    for description, value in records:
        fields, payload = state_fields(description, value)
        fields_and_bytes.append(
            (fields, np.empty(0, np.uint8) if payload is None else payload.numpy())
        )
    return fields_and_bytes


class RowFiles:
    """The snapshots of rows in one process' files; any thread may use it."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], _RowFile] = {}  # by snapshot and chunk
        self.restored = RestoredShards()  # of checkpoints, whose numbers are below 0
        self._lock = system().lock()

    def _file(self, number: int, chunk: int, directory: str) -> _RowFile:
        with self._lock:
            if (file := self._files.get((number, chunk))) is None:
                file = self._files[number, chunk] = _RowFile(directory)
            return file

    def written(
        self, number: int, chunk: int, directory: str, pieces: Iterable[Records]
    ) -> Iterator[Records]:
        """Write each piece of a shard as it is drawn, and yield a record that stands for it.

        Raises:
            ResourcesError: the directory has no room, or takes no files.
        """
        file, count = self._file(number, chunk, directory), 0
        for piece in pieces:
            size = file.write(count, packed(piece))
            description = {"name": piece[0][0]["name"], "key": ON_DISK, "plain": False}
            yield [
                (description | {"start": count, "stop": count + 1}, torch.tensor([[number, size]]))
            ]
            count += 1
        file.count = count

    def whole(self, number: int) -> dict[int, int]:
        """Map each chunk that a snapshot has here as a whole to its number of pieces."""
        with self._lock:
            files = list(self._files.items())
        return {
            chunk: file.count or 0 for (of, chunk), file in files if of == number and file.is_whole
        }

    def piece(self, number: int, chunk: int, at: int) -> PackedPiece:
        """Return a piece, for another process."""
        return self._files[number, chunk].read(at)

    def take(
        self, number: int, chunk: int, at: int, count: int, directory: str, piece: PackedPiece
    ) -> None:
        """Keep one of `count` pieces of another process' shard; ResourcesError: as `written`."""
        file = self._file(number, chunk, directory)
        file.write(at, piece)
        file.count = count

    def records(self, number: int, chunk: int) -> Iterator[Records]:
        """Yield the pieces of a shard in order."""
        return self._files[number, chunk].records()

    def keep_only(self, numbers: Collection[int]) -> None:
        """Drop all other snapshots."""
        with self._lock:
            self._files = {key: file for key, file in self._files.items() if key[0] in numbers}


def snapshot_of(records: Sequence[torch.Tensor]) -> int:
    """Return the number of the snapshot that records stand for."""
    return int(records[0].reshape(-1, 2)[0, 0])


@runtime_checkable
class KeepsSnapshots(Protocol):
    """A service that keeps snapshots of rows in files."""

    def use_files(self, files: RowFiles, call: OnRouter | None) -> None:
        """Keep and find snapshots in these files; `call` runs a function on the server's thread."""


def use_row_files(server: Server, files: RowFiles, call: OnRouter | None) -> None:
    """Have a server with rows keep their snapshots in files of this process.

    Args:
        server: in this process.
        files: the process' files.
        call: runs a function on the server's thread; None to read and write on that thread itself.
    """
    service = server.service
    if isinstance(service, KeepsSnapshots):
        service.use_files(files, call)
