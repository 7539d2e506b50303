"""Shards with the rows of a checkpoint, which a process makes beside those that its servers have."""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from steepest.core.engine.chunk_store import HeldChunk
from steepest.core.engine.server import Server
from steepest.core.system import system
from steepest.core.tensors.layout import Chunk
from steepest.data.storage.files import drop_cached, storage_of
from steepest.data.storage.places import StorageError, StoragePlace
from steepest.errors import ConfigurationError
from steepest.tables.files.imported_rows import ImportedRows
from steepest.tables.files.row_files import OnRouter, RowFiles
from steepest.tables.files.saved_rows import MANIFEST, CheckpointRows, SavedFile
from steepest.tables.files.table_moves import TableMoves

if TYPE_CHECKING:
    from steepest.tables.rows.dealing import Dealing
    from steepest.tables.rows.shard import TableShard

#: The key of the record that stands for a shard that its process has made: the number of the restore.
MADE = "made"


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


class _ElsewhereError(Exception):
    """A shard of the checkpoint has rows of another shard of the job."""


@dataclass
class _ShardsMade:
    """The shards that were made for one restore, by chunk, and the bytes read for them until now."""

    shards: dict[int, list[TableShard]] = field(default_factory=dict)
    nbytes: int = 0


class RestoredShards:
    """The shards that one process has made for each restore, and its files of rows; any thread may use it."""

    def __init__(self) -> None:
        self.files = RowFiles()
        self._made: dict[int, _ShardsMade] = {}
        self._lock = system().lock()

    def _of(self, number: int) -> _ShardsMade:
        with self._lock:
            return self._made.setdefault(number, _ShardsMade())

    def take_file(self, number: int, name: str, at: int, data: Any) -> None:
        """Keep bytes of a file that a restore needs, from one of its places on.

        Raises:
            ResourcesError: there is no room.
        """
        self.files.write(number, name, at, data, tempfile.gettempdir())
        self._of(number).nbytes += len(data)

    def nbytes(self, number: int) -> int:
        """Return the number of bytes read so far for a restore."""
        return self._of(number).nbytes

    def read(self, wanted: RowsWanted) -> RowsRead:
        """Make the shards that a request names; ResourcesError: memory or a disk has no room for them."""
        made = self._of(wanted.number)
        made.shards = {chunk: [] for chunk in wanted.chunks}
        try:
            uses, groups = _uses(wanted), set(map(wanted.dealing.group_of, wanted.chunks))
            if lacks := self._lacks({file.key: file for file in uses}.values(), wanted.number):
                return RowsRead(lacks=lacks)
            alone = all(_is_one_by_one(wanted, group) for group in groups)
            read = _FilesAhead(made, uses, self.files, wanted.number, alone=alone)
            for group in sorted(groups):
                _read_group(wanted, group, read, made.shards)
        except _ElsewhereError:
            return RowsRead(elsewhere=True)
        except StorageError as error:
            return RowsRead(silent=str(error))
        except _UnfitError as error:
            return RowsRead(unfit=str(error))
        except (ConfigurationError, _DamagedError) as error:
            return RowsRead(damaged=str(error))
        return RowsRead()

    def _lacks(self, needed: Iterable[SavedFile], number: int) -> list[str]:
        """Return the names of the files that this process neither reaches nor has for a restore."""
        folders = {file.folder for file in needed if file.folder is not None}
        reached = {folder for folder in folders if reaches(folder / MANIFEST)}
        return [
            file.name
            for file in needed
            if not (file.arrays or file.folder in reached)
            and self.files.find(file.kept or number, file.name) is None
        ]

    def give(
        self,
        number: int,
        held: Iterable[HeldChunk],
        dealing: Dealing,
        table: int,
        rows: Mapping[int, ImportedRows],
    ) -> dict[int, int]:
        """Copy the shards that servers hold, with imported rows of a table.

        Args:
            number: the restore's.
            held: the servers' chunks; those without rows are ignored.
            dealing: how the job's tables are dealt into shards.
            table: the table's number in its group.
            rows: maps each chunk that has shards of the table to its imported rows; other shards stay as they are.

        Returns:
            For each chunk with imported rows, how many rows they replace.

        Raises:
            ConfigurationError: the table has no room for them.
        """
        from steepest.tables.files.imported_rows import load_with_imported  # what only tables need

        shards, replaced = self._of(number).shards, {}
        for each in held:
            if isinstance(each, HoldsRows):
                chunk, shard = each.chunk.index, each.rows
                if (mine := rows.get(chunk)) is not None:
                    shard = dealing.make(chunk, each.rows.seed)
                    replaced[chunk] = load_with_imported(shard, each.rows, table, mine)
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
            self._made.pop(number, None)
        self.files.drop(number)


class _UnfitError(Exception):
    """The job's tables cannot have these rows."""


class _DamagedError(Exception):
    """A file is damaged or missing."""


def _read_group(
    wanted: RowsWanted, group: int, read: _FilesAhead, made: Mapping[int, list[TableShard]]
) -> None:
    """Make the shards of one group of tables; each piece is dealt to the shards that its rows belong to."""
    from steepest.tables.files.row_pieces import mark_for, pieces_for  # need what only tables need
    from steepest.tables.rows.loading import dealt
    from steepest.tables.rows.state_checks import require_possible

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
        if saved.change is not None:
            raise _UnfitError(str(error)) from error
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
    return alike and not wanted.dealt and wanted.saved.change is None


def _uses(wanted: RowsWanted) -> list[SavedFile]:
    """Return the files with rows of the wanted shards in reading order, each once for each shard."""
    dealing, saved = wanted.dealing, wanted.saved
    moves, uses = TableMoves(saved.tables, dealing), list[SavedFile]()
    for group in sorted(set(map(dealing.group_of, wanted.chunks))):
        mine = {
            dealing.shard_of(chunk) for chunk in wanted.chunks if dealing.group_of(chunk) == group
        }
        alike = _is_one_by_one(wanted, group)
        for old in moves.numbers(group) if saved.change is None else range(moves.groups):
            for at in sorted(mine) if alike else range(saved.shards):
                number = old * saved.shards + at
                uses += [file for layer in saved.layers for file in layer.files if file.has(number)]
    return uses


class _FilesAhead:
    """A reader of a checkpoint's files that reads and verifies the next file on a thread while one is used.

    A file is forgotten after its last use; rows that come later take the memory that it had in the system's cache.

    Args:
        made: counts the bytes read.
        uses: the files in the order of their uses.
        files: those of this process.
        number: the restore's.
        alone: whether no other process reads shards that this one reads.
    """

    def __init__(
        self,
        made: _ShardsMade,
        uses: Sequence[SavedFile],
        files: RowFiles,
        number: int,
        *,
        alone: bool,
    ) -> None:
        self._made, self._files, self._number, self._alone = made, files, number, alone
        self._left = list({file.key: file for file in uses}.values())[::-1]
        self._uses = Counter(file.key for file in uses)
        self._over: list[Path] = []  # files that nobody reads again, and that are in the cache
        self._read: dict[str, Future[Mapping[str, torch.Tensor]]] = {}

    def __call__(self, file: SavedFile) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a file, which is read once."""
        while len(self._over) > 1:  # of the last one a piece is still in use
            drop_cached(self._over.pop(0))
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
        self._uses[file.key] -= 1
        if not self._uses[file.key]:
            del self._read[file.key]
            if self._alone and isinstance(file.folder, Path):
                self._over.append(file.folder / file.name)
        return tensors

    def _begin(self) -> None:
        """Start to read the next file."""
        file, read = self._left.pop(), Future[Mapping[str, torch.Tensor]]()
        self._read[file.key] = read

        def fill() -> None:
            try:
                read.set_result(self._tensors(file))
            except BaseException as error:  # noqa: BLE001 - it is raised where the file is used
                read.set_exception(error)

        system().start(fill, "steepest-rows")

    def _tensors(self, file: SavedFile) -> Mapping[str, torch.Tensor]:
        here = self._files.find(file.kept or self._number, file.name)
        return file.tensors(self._note, None if here is None else here.path)

    def _note(self, count: int) -> None:
        self._made.nbytes += count


@runtime_checkable
class KeepsRows(Protocol):
    """A service of a server that uses its process' shards and files of rows."""

    def use_rows(self, rows: RestoredShards, call: OnRouter | None) -> None:
        """Keep snapshots there, and take shards; `call` runs a function on the server's thread."""


def use_rows(server: Server, rows: RestoredShards, call: OnRouter | None) -> None:
    """Have a server with rows use the shards and files of its process.

    Args:
        server: in this process.
        rows: the process'.
        call: runs a function on the server's thread; None to read and write on that thread itself.
    """
    service = server.service
    if isinstance(service, KeepsRows):
        service.use_rows(rows, call)


def reaches(file: StoragePlace) -> bool:
    """Return whether this process reaches a file of a checkpoint."""
    try:
        return bool(storage_of(file).exists(file))
    except (OSError, ConfigurationError):
        return False
