"""Writes the rows of one server into files of a checkpoint, on a thread."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from steepest.core.system import system
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import StoragePlace
from steepest.data.storage.safetensors_file import write_tensors
from steepest.tables.files.row_files import OnRouter, Records, SnapshotStorage
from steepest.tables.files.saved_rows import ROW_FILES, shards_in
from steepest.tables.job.row_messages import MARKS

#: The size from which a part becomes a file; while one is written, the next comes.
PART_BYTES = 64 << 20
_Part = tuple[StoragePlace, dict[str, list[torch.Tensor]]]  # of each array the pieces


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
        is_busy: whether a file is being written.
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
        self._ready: list[_Part] = []  # are to be written
        self._room: list[Callable[[], None]] = []  # wait until none is
        self._over: Callable[[], None] | None = None  # waits for the end
        self._dropped = False
        self.is_busy = False

    def put(self, piece: Records, then: Callable[[], None], directory: str | None = None) -> None:
        """Take a piece, and call `then` when the next one may follow; `directory` replaces the folder from now on."""
        if directory is not None and Path(directory) != self._folder:
            if self._part:
                self._end_part()
            self._folder = Path(directory)
        for description, value in piece:
            if description["key"] not in MARKS:  # which the manifest has
                self._part.setdefault(f"{description['name']}/{description['key']}", []).append(
                    value
                )
                self._size += value.nbytes
        if self._size >= PART_BYTES:
            self._end_part()
        self._room.append(then)
        self._go_on()

    def finish(self, then: Callable[[], None]) -> None:
        """Write the rest, and call `then` when all files are written or one has failed."""
        if self._part:
            self._end_part()
        self._over = then
        self._go_on()

    def drop(self) -> None:
        """Stop writing, and remove the files."""
        self._dropped, self._room, self._over, self._ready = True, [], None, []
        if not self.is_busy:
            self._aside(self._discard)

    def _go_on(self) -> None:
        """Write the next part if none is being written, and call the waiting functions whose condition holds."""
        if self._ready and not self.is_busy and self.error is None:
            self.is_busy, part = True, self._ready.pop(0)
            self._aside(lambda: self._write(part))
        while self._room and (not self._ready or self.error is not None):
            self._room.pop(0)()
        if self._over is not None and (self.error is not None or not (self._ready or self.is_busy)):
            over, self._over = self._over, None
            over()

    def _end_part(self) -> None:
        """Have the part written when those before it are."""
        file = (
            self._folder
            / f"{ROW_FILES}-{self._stamp}-{self._server}-{len(self._names)}.safetensors"
        )
        self._names.append(file)
        self._ready.append((file, self._part))
        self._part, self._size = {}, 0

    def _aside(self, work: Callable[[], None]) -> None:
        """Do something on a thread of its own, if there may be one."""
        if self._call is None:
            work()
        else:
            system().start(work, "steepest-rows")

    def _write(self, part: _Part) -> None:
        """Write a part, and note the outcome on the router's thread."""
        outcome = self._written(*part)
        if self._dropped:
            self._discard()
        (self._call or (lambda note: note()))(lambda: self._wrote(*outcome))

    def _written(
        self, path: StoragePlace, tensors: dict[str, list[torch.Tensor]]
    ) -> tuple[dict[str, Any], Exception | None]:
        """Write a file; return the manifest's entry for it, and the error if that failed."""
        try:
            description = write_tensors(path, tensors, write=self._storage.write)
        except Exception as error:  # noqa: BLE001 - it travels
            return {}, error
        return {"name": path.name, **description, "shards": list(shards_in(tensors))}, None

    def _wrote(self, file: dict[str, Any], error: Exception | None) -> None:
        """Note the outcome of a part."""
        self.is_busy, self.error = False, self.error or error
        if file:
            self.files.append(file)
        self._go_on()

    def _discard(self) -> None:
        """Remove the files written so far."""
        self._storage.discard(self._names)
