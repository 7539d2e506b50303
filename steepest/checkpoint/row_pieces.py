"""The rows of a checkpoint on their way into a job's shards: piece by piece, never a file at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from steepest.checkpoint.row_values import wide
from steepest.checkpoint.saved_rows import TABLES, CheckpointRows, SavedFile, ShardMark
from steepest.checkpoint.table_moves import Described, TableMoves, moved_rows
from steepest.errors import ConfigurationError
from steepest.tables.hashing import Distinct
from steepest.tables.index import Index
from steepest.tables.kernels import Int32s, Int64s
from steepest.tables.state import TableState, appended
from steepest.tables.state_checks import require_distinct, require_possible

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing
    from steepest.tables.table import Table

PIECE_BYTES = 4 << 20
#: Returns the tensors of a file.
Reader = Callable[[SavedFile], Mapping[str, torch.Tensor]]
#: The arrays of a state that have an item for each row, and those of ids without one.
_OF_ROWS = ("tables", "ids", "values", "slots", "written", "sightings", "until", "scores")
#: What a state has beside `TableState`; the last begins anew.
NO_ARRAYS = (*ShardMark._fields, "life")
_BESIDE = {
    "counted_tables": np.int32,
    "counted_ids": np.int64,
    "counted": np.int32,
    "removed_tables": np.int32,
    "removed_ids": np.int64,
}


class RowPieces(Sequence[TableState]):
    """Pieces of rows, each made when it is asked for, and kept by nobody.

    Args:
        makers: each returns a piece.
        mark: of the shards that they are of.

    Raises:
        ConfigurationError: when it is asked for, a piece makes no sense.
    """

    def __init__(self, makers: Sequence[Callable[[], TableState]], mark: ShardMark) -> None:
        self._makers, self.mark = makers, mark

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self._makers)

    @overload
    def __getitem__(self, at: int) -> TableState: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[TableState]: ...

    def __getitem__(self, at: int | slice) -> TableState | Sequence[TableState]:
        """Return a piece."""
        if isinstance(at, slice):
            return [make() for make in self._makers[at]]
        return self._makers[at]()

    def __iter__(self) -> Iterator[TableState]:
        """Yield the pieces in order."""
        for make in self._makers:
            yield make()

    def kept(self, *, together: bool) -> RowPieces:
        """Return the same pieces in memory, as one piece if they are to be `together`."""
        states = list(self)
        if together and states:
            states = [appended(states)]
        return RowPieces([partial(_itself, state) for state in states], self.mark)

    def require_sound(self, tables: Sequence[Table]) -> None:
        """Check all pieces as one state, see `steepest.tables.state_checks.require_sound`; rows may be there twice."""
        counted = [(np.zeros(0, np.int32), np.zeros(0, np.int64))]
        for piece in self:
            require_possible(piece, tables, self.mark.updates)
            counted.append((piece.counted_tables, piece.counted_ids))
        keys = (np.concatenate(each) for each in zip(*counted, strict=True))
        require_distinct("counted_ids", *keys)


def rows_of_table(saved: CheckpointRows, table: Described, read: Reader) -> Iterator[TableState]:
    """Yield the rows of one table of a checkpoint, piece by piece; ConfigurationError: they make no sense."""
    count = sum(each[4] == table.group for each in saved.tables)
    for at in range(saved.shards):
        for make in _of_shard(saved, table.group * saved.shards + at, count, read):
            state = make()
            yield state.only(state.tables == table.number, slice(0))


def snapshot_pieces(
    records: Iterable[Iterable[tuple[dict[str, Any], torch.Tensor]]], tables: int
) -> RowPieces:
    """Return the rows of a shard of so many tables, from the pieces of a snapshot, of which the first has all keys."""
    parts = [{about["key"]: value for about, value in piece} for piece in records]
    makers = [
        partial(_piece, part, 0, len(part["ids"]), tables=tables, newer=None, pause=0)
        for part in parts
    ]
    return RowPieces(makers, ShardMark.of(parts[0]))


def _itself(state: TableState) -> TableState:
    return state


def pieces_for(
    saved: CheckpointRows, dealing: Dealing, group: int, read: Reader, shard: int | None = None
) -> RowPieces:
    """Return the rows of a checkpoint that are of a job's group of tables, as the group has them.

    Tables have the job's numbers; slots of another optimizer are its first ones.

    Args:
        saved: the checkpoint's.
        dealing: of the job's tables.
        group: of the job.
        read: returns the tensors of a file.
        shard: this shard of the checkpoint alone, of a group whose tables are the same there; None for all.

    Raises:
        ConfigurationError: rows make no sense.
    """
    moves = TableMoves(saved.tables, dealing)
    same, now = moves.same(group), saved.now or 0
    newest = max(mark.updates for mark in saved.marks)
    clock = max(mark.clock and max(mark.clock, now) for mark in saved.marks)
    mark = saved.marks[0]._replace(updates=newest, clock=clock)
    makers: list[Callable[[], TableState]] = []
    for old, numbers in moves.numbers(group).items():
        first = old * saved.shards
        for at in range(saved.shards) if shard is None else (shard,):
            found = _of_shard(saved, first + at, moves.tables_in(old), read)
            stay = not found or moves.slots_stay(group, old, found[0]().slots)
            if old == same and stay:
                mark = saved.marks[first]._replace(clock=clock)
                makers += found
            else:
                begun = None if stay else dealing.groups[group][0].optimizer
                makers += [partial(_moved, make, numbers, begun) for make in found]
    return RowPieces(makers, mark)


def _moved(make: Callable[[], TableState], numbers: Mapping[int, int], begun: Any) -> TableState:
    return moved_rows(make(), numbers, begun)


def _of_shard(
    saved: CheckpointRows, shard: int, tables: int, read: Reader
) -> list[Callable[[], TableState]]:
    """Return what makes the rows of a shard of so many tables of a checkpoint, of each id the newest layer's."""
    newest = saved.layers[0].marks[shard]
    pause = max((saved.now or 0) - newest.clock, 0) if newest.clock else 0
    makers: list[Callable[[], TableState]] = []
    newer: Index | None = None
    keys: list[tuple[Int32s, Int64s]] = []
    for layer in saved.layers:
        known = partial(_piece, tables=tables, newer=newer, pause=pause)
        found = [
            partial(known, arrays, begin, end)
            for file in layer.files
            if file.has(shard)
            for arrays, begin, end in _parts(file, shard, read)
        ]
        makers += found
        if layer.marks[shard].since == -1:
            break
        for make in found:
            state = make()
            keys += [(state.tables.copy(), state.ids.copy())]
            keys += [(state.removed_tables, state.removed_ids)]
        newer = _index_of(keys, tables)  # another one: pieces of this layer are yet to be made
    return makers


def _index_of(keys: Sequence[tuple[Int32s, Int64s]], tables: int) -> Index:
    """Return an index that has some keys of so many tables."""
    index = Index(tables)
    if keys:
        of, ids = (np.concatenate(each) for each in zip(*keys, strict=True))
        distinct = Distinct(of, ids)
        index.insert(distinct.tables, distinct.ids, np.zeros(len(distinct.ids), np.int32))
    return index


def _parts(
    file: SavedFile, shard: int, read: Reader
) -> Iterator[tuple[dict[str, torch.Tensor], int, int]]:
    """Yield what a file has of a shard, and the first row of each piece and the one after its last."""
    prefix = f"{TABLES}{shard}/"
    arrays = {
        name.removeprefix(prefix): value
        for name, value in read(file).items()
        if name.startswith(prefix)
    }
    rows = {key: value for key, value in arrays.items() if key in _OF_ROWS and value.dim()}
    if "ids" not in rows:
        return
    count = len(rows["ids"])
    width = sum(value.nbytes for value in rows.values()) // max(count, 1)
    most = max(PIECE_BYTES // max(width, 1), 1)
    for begin in range(0, max(count, 1), most):
        yield arrays, begin, min(begin + most, count)


def _piece(
    arrays: Mapping[str, torch.Tensor],
    begin: int,
    end: int,
    *,
    tables: int,
    newer: Index | None,
    pause: int,
) -> TableState:
    """Return some rows of a file; with its first ones all that it has beside rows."""
    # newer: keys of rows that are left out, since a newer layer has them, or has them removed. pause: seconds that are
    # no part of rows' lives.
    found: dict[str, Any] = {key: np.zeros(0, kind) for key, kind in _BESIDE.items()}
    for key, value in arrays.items():
        if key in _OF_ROWS:
            found[key] = wide(value[begin:end])
        elif not begin and key not in NO_ARRAYS:
            found[key] = wide(value)
    state = TableState.of_arrays(found)
    for of in (state.tables, state.removed_tables):
        if len(of) and not 0 <= of.min() <= of.max() < tables:
            raise ConfigurationError(
                f"a state of {tables} tables with rows of tables {of.min()} to {of.max()}"
            )
    if pause:
        state = replace(state, until=np.where(state.until > 0, state.until + pause, state.until))
    if newer is not None:
        state = state.only(newer.find(state.tables, state.ids)[0] < 0, slice(0))
        state = replace(state, counters={})
    return state
