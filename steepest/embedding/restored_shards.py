"""Shards with the rows of a checkpoint, which a process makes beside those that its servers have."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from steepest.checkpoint.imported_rows import ImportedRows
from steepest.checkpoint.manifest import MANIFEST
from steepest.checkpoint.safetensors_file import read_tensors
from steepest.checkpoint.saved_rows import CheckpointRows, SavedFile
from steepest.checkpoint.table_moves import TableMoves
from steepest.core.engine.chunk_store import HeldChunk
from steepest.core.system import system
from steepest.core.tensors.layout import Chunk
from steepest.data.storage.files import storage_of
from steepest.data.storage.nameless import nameless_file
from steepest.data.storage.places import StorageError, StoragePlace
from steepest.errors import ConfigurationError, ResourcesError

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing
    from steepest.tables.shard import TableShard


@dataclass(frozen=True)
class RowsWanted:
    """A request to read the rows of a process' shards.

    Attributes:
        number: the restore's.
        chunks: the shards that the process' servers hold, once for each server that does.
        dealing: how the job's tables are dealt into shards.
        saved: the files of the checkpoint's rows.
        dealt: True to look for rows of a shard in all shards of the checkpoint, False in the one of its number.
    """

    number: int
    chunks: Sequence[int]
    dealing: Dealing
    saved: CheckpointRows
    dealt: bool = False


class RowsRead(NamedTuple):
    """A process' answer to `RowsWanted`.

    Attributes:
        lacks: the names of the files that the process cannot reach.
        elsewhere: whether the checkpoint's shards have rows of other shards of the job.
        damaged: why a file cannot be used, or "".
        silent: why an object store did not answer, or "".
        unfit: why the job's tables cannot have these rows, or "".
    """

    lacks: Sequence[str] = ()
    elsewhere: bool = False
    damaged: str = ""
    silent: str = ""
    unfit: str = ""


@runtime_checkable
class HoldsRows(Protocol):
    """A server's shard of tables."""

    chunk: Chunk
    rows: TableShard

    def with_rows(self, name: str, rows: ImportedRows) -> tuple[TableShard, int]:
        """Return a copy with imported rows of a table, and how many rows they replace; ConfigurationError: no room."""


class _ElsewhereError(Exception):
    """A shard of the checkpoint has rows of another shard of the job."""


@dataclass
class _Received:
    """The files that the driver has sent for one restore, and the shards made of these and others.

    The files have no names on this machine's disk, so that none outlives the process.

    Attributes:
        files: maps each file's name to its descriptor.
        shards: maps each chunk to the shards made for it.
        nbytes: the bytes read so far, of all files.
    """

    files: dict[str, int] = field(default_factory=dict)
    shards: dict[int, list[TableShard]] = field(default_factory=dict)
    nbytes: int = 0

    def take(self, name: str, data: Any) -> None:
        """Add bytes to a file."""
        if name not in self.files:
            self.files[name] = nameless_file(tempfile.gettempdir())
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.files[name], rest) :]
        self.nbytes += len(data)

    def path(self, name: str) -> Path:
        """Return a path that opens a file."""
        return Path(f"/proc/self/fd/{self.files[name]}")

    def close(self) -> None:
        """Close the files, which deletes them."""
        for descriptor in self.files.values():
            os.close(descriptor)


class RestoredShards:
    """The shards that one process has made for each restore; any thread may use it."""

    def __init__(self) -> None:
        self._made: dict[int, _Received] = {}
        self._lock = system().lock()

    def _of(self, number: int) -> _Received:
        with self._lock:
            return self._made.setdefault(number, _Received())

    def take_file(self, number: int, name: str, data: Any) -> None:
        """Append bytes to a file that the driver sends; ResourcesError: the disk has no room."""
        try:
            self._of(number).take(name, data)
        except OSError as error:
            raise ResourcesError(
                f"{tempfile.gettempdir()!r} of {os.uname().nodename} cannot hold rows of a checkpoint, whose place "
                f"cannot be reached from there: {error}. Make room there, or give checkpoints a place that all "
                "machines reach, such as s3://bucket/run7"
            ) from error

    def nbytes(self, number: int) -> int:
        """Return the number of bytes read so far for a restore."""
        return self._of(number).nbytes

    def read(self, wanted: RowsWanted) -> RowsRead:
        """Make the shards that a request names; ResourcesError: memory or a disk has no room for them."""
        received = self._of(wanted.number)
        received.shards.clear()
        try:
            for chunk in wanted.chunks:
                received.shards.setdefault(chunk, [])
            needed = _needed(wanted)
            if lacks := _out_of_reach(needed, received.files):
                return RowsRead(lacks=lacks)
            read = _FilesAhead(received, needed)
            for group in sorted(set(map(wanted.dealing.group_of, wanted.chunks))):
                _read_group(wanted, group, read, received.shards)
        except _ElsewhereError:
            return RowsRead(elsewhere=True)
        except StorageError as error:
            return RowsRead(silent=str(error))
        except _UnfitError as error:
            return RowsRead(unfit=str(error))
        except (ConfigurationError, _DamagedError) as error:
            return RowsRead(damaged=str(error))
        return RowsRead()

    def give(
        self,
        number: int,
        held: Iterable[HeldChunk],
        name: str,
        rows: Mapping[int, ImportedRows | None],
    ) -> dict[int, int]:
        """Copy the shards that servers hold, with imported rows of a table.

        Args:
            number: the restore's.
            held: the servers' chunks; those without rows are ignored.
            name: the table's.
            rows: maps each chunk to its imported rows, or to None to keep the shard.

        Returns:
            For each chunk with imported rows, how many rows they replace.

        Raises:
            ConfigurationError: the table has no room for them.
        """
        shards, replaced = self._of(number).shards, {}
        for each in held:
            if isinstance(each, HoldsRows):
                chunk, shard = each.chunk.index, each.rows
                if (mine := rows[chunk]) is not None:
                    shard, replaced[chunk] = each.with_rows(name, mine)
                shards.setdefault(chunk, []).append(shard)
        return replaced

    def take(self, number: int, chunk: int) -> TableShard | None:
        """Remove and return a shard that was made for a chunk; None if there is none left."""
        shards = self._of(number).shards.get(chunk, [])
        return shards.pop() if shards else None

    def has(self, number: int, chunk: int) -> bool:
        """Return whether a shard is left for a chunk."""
        return bool(self._of(number).shards.get(chunk))

    def drop(self, number: int) -> None:
        """Forget the shards and files of a restore."""
        with self._lock:
            made = self._made.pop(number, None)
        if made is not None:
            made.close()


class _UnfitError(Exception):
    """The job's tables cannot have these rows."""


class _DamagedError(Exception):
    """A file is damaged or missing."""


def _read_group(
    wanted: RowsWanted, group: int, read: _FilesAhead, made: Mapping[int, list[TableShard]]
) -> None:
    """Make the shards of one group of tables; each piece is dealt to the shards that its rows belong to."""
    from steepest.checkpoint.row_pieces import mark_for, pieces_for  # need what only tables need
    from steepest.tables.loading import dealt
    from steepest.tables.state_checks import require_possible

    dealing, saved = wanted.dealing, wanted.saved
    mark = mark_for(saved, dealing, group)
    shards: dict[int, list[TableShard]] = {}
    for chunk in wanted.chunks:
        if dealing.group_of(chunk) == group:
            shard = dealing.make(chunk, mark.seed)
            shard.begin_load(mark.updates, mark.clock)
            shard.take(shard.nothing())  # the checkpoint may have no rows of it
            made[chunk].append(shard)
            shards.setdefault(dealing.shard_of(chunk), []).append(shard)
    one_by_one = _is_one_by_one(wanted, group)
    try:
        for piece in pieces_for(saved, dealing, group, read, shards if one_by_one else None):
            require_possible(piece, dealing.groups[group], mark.updates)
            for at, part in dealt(piece, dealing.spreads[group]):
                if one_by_one and at not in shards and len(part.ids) + len(part.counted_ids):
                    raise _ElsewhereError
                for shard in shards.get(at, ()):
                    shard.take(part)
        loaded = list(itertools.chain.from_iterable(shards.values()))
        for shard in loaded:
            shard.end_load()
    except ConfigurationError as error:
        raise _DamagedError(f"embedding tables: {error}") from error
    for shard in loaded:
        try:
            shard.require_kept()
        except ConfigurationError as error:
            raise _UnfitError(str(error)) from error


def _is_one_by_one(wanted: RowsWanted, group: int) -> bool:
    """Return whether each shard of a group may have the rows of one shard of the checkpoint."""
    same = TableMoves(wanted.saved.tables, wanted.dealing).same(group)
    alike = same is not None and wanted.saved.shards == wanted.dealing.num_shards
    return alike and not wanted.dealt


def _needed(wanted: RowsWanted) -> list[SavedFile]:
    """Return the files with rows of the wanted shards, in reading order."""
    dealing, saved = wanted.dealing, wanted.saved
    moves, needed = TableMoves(saved.tables, dealing), dict[str, SavedFile]()
    for group in sorted(set(map(dealing.group_of, wanted.chunks))):
        mine = {
            dealing.shard_of(chunk) for chunk in wanted.chunks if dealing.group_of(chunk) == group
        }
        alike = _is_one_by_one(wanted, group)
        for old in moves.numbers(group):
            for at in sorted(mine) if alike else range(saved.shards):
                number = old * saved.shards + at
                needed |= {
                    file.key: file
                    for layer in saved.layers
                    for file in layer.files
                    if file.has(number)
                }
    return list(needed.values())


def _out_of_reach(needed: Iterable[SavedFile], received: Collection[str]) -> list[str]:
    """Return the names of the files that this process can neither reach nor was sent."""
    folders = {file.folder for file in needed}
    away = {folder for folder in folders if folder is None or not reaches(folder / MANIFEST)}
    return [file.name for file in needed if file.folder in away and file.name not in received]


class _FilesAhead:
    """A reader of a checkpoint's files that reads and verifies the next file on a thread while one is used.

    Args:
        received: the files that the driver has sent; counts the bytes read.
        order: the files in reading order.
    """

    def __init__(self, received: _Received, order: Sequence[SavedFile]) -> None:
        self._received, self._left = received, list(reversed(order))
        self._read: dict[str, Future[dict[str, torch.Tensor]]] = {}

    def __call__(self, file: SavedFile) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a file, which is read once."""
        while file.key not in self._read:
            self._begin()
        try:
            tensors = system().result(self._read[file.key])
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            raise _DamagedError(f"{file.name}: {error}") from error
        if self._left and all(read.done() for read in self._read.values()):
            self._begin()
        return tensors

    def _begin(self) -> None:
        """Start to read the next file."""
        file, read = self._left.pop(), Future[dict[str, torch.Tensor]]()
        self._read[file.key] = read

        def fill() -> None:
            try:
                read.set_result(self._tensors(file))
            except BaseException as error:  # noqa: BLE001 - it is raised where the file is used
                read.set_exception(error)

        system().start(fill, "steepest-rows")

    def _tensors(self, file: SavedFile) -> dict[str, torch.Tensor]:
        if file.name in self._received.files:
            return read_tensors(self._received.path(file.name), file.about)
        return file.tensors(self._note)

    def _note(self, count: int) -> None:
        self._received.nbytes += count


def reaches(file: StoragePlace) -> bool:
    """Return whether this process reaches a file of a checkpoint."""
    try:
        return bool(storage_of(file).exists(file))
    except (OSError, ConfigurationError):
        return False
