"""The files of a checkpoint that one server writes of its rows, on a thread of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from steepest.checkpoint.manifest import TABLES
from steepest.checkpoint.safetensors_file import write_tensors
from steepest.checkpoint.saved_rows import shards_in
from steepest.core.system import Queue, system
from steepest.data.storage.files import storage_of
from steepest.data.storage.places import StoragePlace
from steepest.embedding.row_files import OnRouter, Records

#: Of a file; and what waits to be written at most, but for one file.
PART_BYTES = 64 << 20
_Part = tuple[StoragePlace, dict[str, torch.Tensor], int]


def is_stamp(text: str) -> bool:
    """Return whether a text may be part of a file's name."""
    return re.fullmatch(r"[0-9a-f-]{1,64}", text, re.ASCII) is not None


class RowWriter:
    """Pieces of shards that become files; all methods are called on the router's thread.

    Args:
        folder: of the checkpoint.
        stamp: of its files' names.
        server: the index of the server.
        call: has a function run on the router's thread; None to write at once.

    Attributes:
        files: what a manifest says of each file that was written and has not been taken.
        error: the error that ended writing; None without one.
    """

    def __init__(
        self, folder: StoragePlace, stamp: str, server: int, call: OnRouter | None
    ) -> None:
        self._folder, self._stamp, self._server, self._call = folder, stamp, server, call
        self._storage = storage_of(folder)
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

    def put(self, piece: Records, then: Callable[[], None]) -> None:
        """Take a piece; `then` is called when there is room for the next one."""
        for about, value in piece:
            if about["key"] != "life":
                self._part.setdefault(f"{about['name']}/{about['key']}", []).append(value)
                self._size += value.nbytes
        if self._size >= PART_BYTES:
            self._start()
        self._room.append(then)
        self._go_on()

    def finish(self, then: Callable[[], None]) -> None:
        """Write what is left; `then` is called when all files are written, or one could not be."""
        if self._part:
            self._start()
        self._over = then
        self._go_on()

    def drop(self) -> None:
        """Write no more, and remove the files."""
        self._dropped, self._room, self._over = True, [], None
        if self._parts is None:
            self._discard()
        self.close()

    def close(self) -> None:
        """Let the thread end."""
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.put(None)

    def _go_on(self) -> None:
        """Call those that wait for room, or for the end."""
        while self._room and (self._left <= PART_BYTES or self.error is not None):
            self._room.pop(0)()
        if self._over is not None and (not self._left or self.error is not None):
            over, self._over = self._over, None
            over()

    def _start(self) -> None:
        """Have the thread write the part."""
        file = (
            self._folder / f"{TABLES}-{self._stamp}-{self._server}-{len(self._names)}.safetensors"
        )
        tensors = {
            name: found[0] if len(found) == 1 else torch.cat(found)
            for name, found in self._part.items()
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
        """Write a part; return what a manifest says of it, and the error if it cannot be written."""
        path, tensors, _ = part
        if self._dropped or self.error is not None:
            return {}, None
        try:
            about = write_tensors(path, tensors, write=self._storage.write)
        except Exception as error:  # noqa: BLE001 - it travels
            return {}, error
        return {"name": path.name, **about, "shards": list(shards_in(tensors))}, None

    def _wrote(self, part: _Part, file: dict[str, Any], error: Exception | None) -> None:
        """Note that a part is written, or could not be."""
        self._left -= part[2]
        self.error = self.error or error
        if file:
            self.files.append(file)
        self._go_on()

    def _discard(self) -> None:
        """Remove the files of a checkpoint that was given up."""
        self._storage.discard(self._names)
