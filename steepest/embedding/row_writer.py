"""Writes the rows of one server into files of a checkpoint, on a thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from steepest.checkpoint.manifest import TABLES
from steepest.checkpoint.safetensors_file import write_tensors
from steepest.checkpoint.saved_rows import shards_in
from steepest.core.system import Queue, system
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import StoragePlace
from steepest.embedding.row_files import OnRouter, Records, SnapshotStorage

#: The size from which a part becomes a file; pieces are awaited again when no more than this is unwritten.
PART_BYTES = 64 << 20
_Part = tuple[StoragePlace, dict[str, torch.Tensor], int]


def is_stamp(text: str) -> bool:
    """Return whether a text is valid as the stamp in file names."""
    return re.fullmatch(r"[0-9a-f-]{1,64}", text, re.ASCII) is not None


class RowWriter:
    """Writes pieces of shards to files; all methods are called on the router's thread.

    Args:
        folder: the checkpoint's.
        stamp: part of the files' names.
        server: the server's index.
        call: runs a function on the router's thread; None to write without a thread.
        storage: writes and discards files; None for the folder's.

    Attributes:
        files: the manifest's entries for the files written so far; whoever reports them empties it.
        error: the error that ended writing, or None.
    """

    def __init__(
        self,
        folder: StoragePlace,
        stamp: str,
        server: int,
        call: OnRouter | None,
        storage: SnapshotStorage | None = None,
    ) -> None:
        self._folder, self._stamp, self._server, self._call = folder, stamp, server, call
        self._storage: Any = storage or storage_of(folder)
        self.files: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._names: list[StoragePlace] = []
        self._part: dict[str, list[torch.Tensor]] = {}
        self._size = 0  # of the part
        self._left = 0  # bytes that the thread has not written
        self._room: list[Callable[[], None]] = []  # wait for it
        self._over: Callable[[], None] | None = None  # waits for the end
        self._parts: Queue[_Part | None] | None = None  # while there is a thread
        self._dropped = False

    @property
    def is_busy(self) -> bool:
        """Whether a file is being written."""
        return self._left > 0

    def put(self, piece: Records, then: Callable[[], None], directory: str | None = None) -> None:
        """Take a piece, and call `then` when the next one may follow; `directory` replaces the folder from now on."""
        if directory is not None and Path(directory) != self._folder:
            if self._part:
                self._start()
            self._folder = Path(directory)
        for description, value in piece:
            if description["key"] != "life":
                self._part.setdefault(f"{description['name']}/{description['key']}", []).append(
                    value
                )
                self._size += value.nbytes
        if self._size >= PART_BYTES:
            self._start()
        self._room.append(then)
        self._go_on()

    def finish(self, then: Callable[[], None]) -> None:
        """Write the rest, and call `then` when all files are written or one has failed."""
        if self._part:
            self._start()
        self._over = then
        self._go_on()

    def drop(self) -> None:
        """Stop writing, and remove the files."""
        self._dropped, self._room, self._over = True, [], None
        if self._parts is None:
            self._discard()
        self.close()

    def close(self) -> None:
        """End the thread after the parts that it was given."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.put(None)

    def _go_on(self) -> None:
        """Call the waiting functions whose condition holds."""
        while self._room and (self._left <= PART_BYTES or self.error is not None):
            self._room.pop(0)()
        if self._over is not None and (not self._left or self.error is not None):
            over, self._over = self._over, None
            over()

    def _start(self) -> None:
        """Give the part to the thread."""
        file = (
            self._folder / f"{TABLES}-{self._stamp}-{self._server}-{len(self._names)}.safetensors"
        )
        tensors = {
            name: arrays[0] if len(arrays) == 1 else torch.cat(arrays)
            for name, arrays in self._part.items()
        }
        part, self._part, self._size = (file, tensors, self._size), {}, 0
        if self.error is not None:
            return
        self._names.append(file)
        self._left += part[2]
        if self._call is None:
            self._wrote(part, *self._written(part))
            return
        if self._parts is None:
            self._parts = system().queue()
            parts, call = self._parts, self._call
            system().start(lambda: self._serve(parts, call), "steepest-rows")
        self._parts.put(part)

    def _serve(self, parts: Queue[_Part | None], call: OnRouter) -> None:
        """Write parts until None comes; on the thread."""
        while (part := parts.get()) is not None:
            file, error = self._written(part)
            call(lambda part=part, file=file, error=error: self._wrote(part, file, error))  # type: ignore[misc]
            del part
        if self._dropped:
            self._discard()

    def _written(self, part: _Part) -> tuple[dict[str, Any], Exception | None]:
        """Write a part; return the manifest's entry for its file, and the error if that failed."""
        path, tensors, _ = part
        if self._dropped or self.error is not None:
            return {}, None
        try:
            description = write_tensors(path, tensors, write=self._storage.write)
        except Exception as error:  # noqa: BLE001 - it travels
            return {}, error
        return {"name": path.name, **description, "shards": list(shards_in(tensors))}, None

    def _wrote(self, part: _Part, file: dict[str, Any], error: Exception | None) -> None:
        """Note the outcome of a part."""
        self._left -= part[2]
        self.error = self.error or error
        if file:
            self.files.append(file)
        self._go_on()

    def _discard(self) -> None:
        """Remove the files written so far."""
        self._storage.discard(self._names)
