"""The one stream by which rows move: pieces of some 4 MB, from a source, perhaps renamed, into a shard.

A piece is a `TableState` of some rows; the first one of a shard has also what is known of ids without rows. Sources are
files of checkpoints (`pieces_for`), snapshots (`state_of`) and shards (`TableChunk.states`); what takes them is
`LoadingRows`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steepest.errors import ConfigurationError
from steepest.tables.files.changed_rows import piece_of, rows_in
from steepest.tables.files.row_values import wide
from steepest.tables.files.saved_rows import TABLES, CheckpointRows, SavedFile, ShardMark
from steepest.tables.files.table_moves import Described, TableMoves, described_tables
from steepest.tables.rows.hashing import Distinct
from steepest.tables.rows.index import Index
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.state import TableState

if TYPE_CHECKING:
    from steepest.tables.rows.dealing import Dealing

PIECE_BYTES = 4 << 20
#: Returns the tensors of a file.
Reader = Callable[[SavedFile], Mapping[str, torch.Tensor]]
#: The arrays of a state that have an item for each row, and those of ids without one.
_OF_ROWS = ("tables", "ids", "values", "slots", "written", "sightings", "until", "scores")
#: What a state has beside `TableState`; the last begins anew.
NO_ARRAYS = (*ShardMark._fields, "life")


def state_of(arrays: Mapping[str, Any], begin: int = 0, end: int | None = None) -> TableState:
    """Return some rows of a shard's tensors or arrays by key; with the first ones all that there is beside rows.

    Raises:
        ConfigurationError: they are no state of tables.
    """
    found: dict[str, Any] = {}
    for key, value in arrays.items():
        of_rows = key in _OF_ROWS
        if of_rows or not (begin or key in NO_ARRAYS):
            array = value[begin:end] if of_rows else value
            found[key] = array if isinstance(array, np.ndarray) else wide(array)
    return TableState.of_arrays(found)


def of_shard(tensors: Mapping[str, torch.Tensor], shard: int) -> dict[str, torch.Tensor]:
    """Return the arrays of a shard by key, of tensors by "tables/shard/key"."""
    prefix = f"{TABLES}{shard}/"
    named = (
        (name.removeprefix(prefix), value)
        for name, value in tensors.items()
        if name.startswith(prefix)
    )
    return dict(named)


def pieces_for(
    saved: CheckpointRows,
    dealing: Dealing,
    group: int,
    read: Reader,
    shards: Collection[int] | None = None,
) -> Iterator[TableState]:
    """Yield the rows of a checkpoint that are of a job's group of tables, as the group has them.

    Tables have the job's numbers; slots of another optimizer are its first ones.

    Args:
        saved: the checkpoint's.
        dealing: of the job's tables.
        group: of the job.
        read: returns the tensors of a file.
        shards: of the checkpoint, of each group; None for all.

    Raises:
        ConfigurationError: rows make no sense.
    """
    moves = TableMoves(saved.tables, dealing)
    for old in moves.numbers(group) if saved.change is None else range(moves.groups):
        for at in range(saved.shards) if shards is None else sorted(shards):
            number = old * saved.shards + at
            for piece in rows_of_shard(saved, number, moves.tables_in(old), read):
                if saved.change is None:
                    yield moves.moved(piece, old, group)
                else:
                    yield from _changed(piece, old, group, saved, dealing)


def _changed(
    piece: TableState, old: int, group: int, saved: CheckpointRows, dealing: Dealing
) -> Iterator[TableState]:
    """Yield what the user's function makes of a piece for the tables of a group of the job."""
    assert saved.change is not None
    own = {table.name: (number, table) for number, table in enumerate(dealing.groups[group])}
    for before in described_tables(saved.tables).values():
        if before.group == old and len(rows := rows_in(piece, before.number)):
            for name, made in saved.change(before.name, rows).items():
                if name in own:
                    yield piece_of(name, made, *own[name])


def mark_for(saved: CheckpointRows, dealing: Dealing, group: int) -> ShardMark:
    """Return the version, seed and clock of a job's group of tables with the rows of a checkpoint."""
    now, same = saved.now or 0, TableMoves(saved.tables, dealing).same(group)
    clock = max(mark.clock and max(mark.clock, now) for mark in saved.marks)
    if same is not None and saved.change is None:
        return saved.marks[same * saved.shards]._replace(clock=clock)
    newest = max(mark.updates for mark in saved.marks)
    return saved.marks[0]._replace(updates=newest, clock=clock)


def rows_of_table(saved: CheckpointRows, table: Described, read: Reader) -> Iterator[TableState]:
    """Yield the rows of one table of a checkpoint, piece by piece; ConfigurationError: they make no sense."""
    count = sum(each[4] == table.group for each in saved.tables)
    for at in range(saved.shards):
        for piece in rows_of_shard(saved, table.group * saved.shards + at, count, read):
            yield piece.only(piece.tables == table.number, slice(0))


class NewerIds:
    """The ids whose rows in older layers are outdated: a newer layer has the row, or its removal."""

    def __init__(self, tables: int) -> None:
        self._tables = tables
        self._keys: list[tuple[Int32s, Int64s]] = [(np.empty(0, np.int32), np.empty(0, np.int64))]
        self._index: Index | None = None

    def note(self, piece: TableState) -> None:
        """Note the ids of a piece, and those that were removed; they count from `seal` on."""
        self._keys += [(piece.tables.copy(), piece.ids.copy())]
        self._keys += [(piece.removed_tables, piece.removed_ids)]

    def seal(self) -> None:
        """Make `older` leave out all ids noted so far."""
        of, ids = (np.concatenate(each) for each in zip(*self._keys, strict=True))
        distinct = Distinct(of, ids)
        self._index = Index(self._tables)
        self._index.insert(distinct.tables, distinct.ids, np.zeros(len(distinct.ids), np.int32))

    def older(self, piece: TableState) -> TableState:
        """Return the rows of a piece that are not left out, and nothing beside them; before `seal`, the piece."""
        if self._index is None:
            return piece
        known, _ = self._index.find(piece.tables, piece.ids)
        return replace(piece.only(known < 0, slice(0)), counters={})


def rows_of_shard(
    saved: CheckpointRows, shard: int, tables: int, read: Reader
) -> Iterator[TableState]:
    """Yield the rows of a shard of so many tables of a checkpoint, of each id the newest layer's."""
    newest = saved.layers[0].marks[shard]
    pause = max((saved.now or 0) - newest.clock, 0) if newest.clock else 0
    newer = NewerIds(tables)
    for layer in saved.layers:
        is_last = layer.marks[shard].since == -1
        for file in layer.files:
            for piece in _pieces_in(file, shard, read, tables) if file.has(shard) else ():
                if not is_last:
                    newer.note(piece)
                yield _lives_on(newer.older(piece), pause)
        if is_last:
            return
        newer.seal()


def _pieces_in(file: SavedFile, shard: int, read: Reader, tables: int) -> Iterator[TableState]:
    """Yield what a file has of a shard of so many tables."""
    arrays = of_shard(read(file), shard)
    rows = {key: value for key, value in arrays.items() if key in _OF_ROWS and value.dim()}
    if "ids" not in rows:
        return
    count = len(rows["ids"])
    width = sum(value.nbytes for value in rows.values()) // max(count, 1)
    most = max(PIECE_BYTES // max(width, 1), 1)
    for begin in range(0, max(count, 1), most):
        piece = state_of(arrays, begin, min(begin + most, count))
        for of in (piece.tables, piece.removed_tables):
            if len(of) and not 0 <= of.min() <= of.max() < tables:
                raise ConfigurationError(
                    f"a state of {tables} tables with rows of tables {of.min()} to {of.max()}"
                )
        yield piece


def _lives_on(piece: TableState, pause: int) -> TableState:
    """Return a piece with the end of each row's life moved by `pause` seconds."""
    if not pause:
        return piece
    return replace(piece, until=np.where(piece.until > 0, piece.until + pause, piece.until))
