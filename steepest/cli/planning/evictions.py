"""Which rows a table removes by its settings: tried on ids of a sample, or on rows of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from steepest.checkpoint.files import read_apart
from steepest.data.storage.places import place_of
from steepest.errors import ConfigurationError
from steepest.tables.files.row_pieces import pieces_for
from steepest.tables.files.saved_rows import CheckpointRows
from steepest.tables.job.restored_shards import RestoredShards, RowsWanted
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.eviction import GlobalStepEvict
from steepest.tables.rows.index import Index
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.row_optimizers import SGD
from steepest.tables.rows.shard import UPDATES_BETWEEN_EVICTIONS, TableShard
from steepest.tables.rows.table import Table

#: Why rows are removed: a table is full; they are old, or small; their time to live is over.
CAUSES = ("full", "age", "norm", "ttl")


@dataclass(frozen=True)
class Evictions:
    """What a table's settings remove.

    Attributes:
        rows: that stay.
        removed: how often a row was removed, by cause, see `CAUSES`.
        ids: (n,), of the removed rows that did not come back, the most often seen first.
        share: of look-ups: those of a sample that asked for a removed row, or those that a checkpoint has counted of
            the rows that go.
    """

    rows: int
    removed: Mapping[str, int]
    ids: Int64s
    share: float


class EvictionTrial:
    """Pushes the ids of a sample, batch by batch, to a table with the settings of another, and rows of one number.

    What a table removes by `ttl` and `L2WeightEvict` is not known of ids alone. `evict` takes place after each 1,000
    batches, and at the end.
    """

    def __init__(self, table: Table) -> None:
        evict = tuple(way for way in table.evict if isinstance(way, GlobalStepEvict))
        one = Table(
            table.name,
            1,
            optimizer=SGD(),
            capacity=table.capacity,
            eviction=table.eviction,
            admission=table.admission,
            evict=evict,
            pinned=table.pinned,
        )
        self._shard, self._had = TableShard([one]), Index(1)  # ids that had a row at some time
        self._seen = self._missed = 0

    def push(self, ids: Int64s, counts: Int64s) -> None:
        """Push the distinct ids of a batch (n,), each of which was `counts` times in it."""
        shard, of = self._shard, np.zeros(len(ids), np.int32)
        had = self._had.find(of, ids)[0] >= 0
        self._seen += int(counts.sum())
        self._missed += int(counts[had & ~self._has(of, ids)].sum())
        gradients = np.zeros((len(ids), 1), np.float32)
        shard.push(of, ids, gradients, shard.version + 1, sightings=counts, strict=False)
        if shard.version % UPDATES_BETWEEN_EVICTIONS == 0:
            shard.evict(shard.version)
        fresh = ~had & self._has(of, ids)
        self._had.insert(of[fresh], ids[fresh], of[fresh])

    def _has(self, of: Int32s, ids: Int64s) -> np.typing.NDArray[np.bool_]:
        return self._shard.sightings_of(of, ids) >= 0

    def end(self, ids: Int64s, counts: Int64s) -> Evictions:
        """Return what was removed of all ids (n,) of the sample, each of which was seen `counts` times."""
        shard, of = self._shard, np.zeros(len(ids), np.int32)
        shard.evict(shard.version)
        gone = (self._had.find(of, ids)[0] >= 0) & ~self._has(of, ids)
        share = self._missed / max(self._seen, 1)
        return _evictions([shard], 0, ids[gone], counts[gone], share)


def is_tried(table: Table) -> bool:
    """Return whether a trial with ids shows something: a table that only grows removes nothing."""
    by_age = any(isinstance(way, GlobalStepEvict) for way in table.evict)
    return table.trainable and (table.eviction is not None or by_age)


def evictions_at(path: str | os.PathLike[str], tables: Iterable[Table]) -> dict[str, Evictions]:
    """Return by name what tables remove of a checkpoint's rows: as they are restored, then by `evict` and `ttl`.

    All rows are in this process meanwhile. Tables that the checkpoint has not are left out.

    Raises:
        CheckpointError: the checkpoint cannot be read.
        ConfigurationError: it has no rows, or the tables cannot have them, such as one that is too small and evicts
            none.
    """
    saved = read_apart(place_of(path)).saved_rows
    if saved is None:
        raise ConfigurationError(
            f"{path} has no rows of embedding tables: give a checkpoint that has"
        )
    named = {each[0] for each in saved.tables}
    in_memory = {"directory": None, "memory_rows": None, "memory_bytes": None}
    known = tuple(replace(table, **in_memory) for table in tables if table.name in named)  # type: ignore[arg-type]
    dealing = Dealing(known, saved.shards, 0, 0)
    made, count = RestoredShards(), saved.shards
    chunks = range(count * len(dealing.groups))
    answer = made.read(RowsWanted(1, chunks, dealing, saved, dealt=True))
    if said := answer.damaged or answer.silent or answer.unfit:
        raise ConfigurationError(f"{path}: {said}")
    found: dict[str, Evictions] = {}
    for number, group in enumerate(dealing.groups):
        shards = [made.take(1, chunk) for chunk in chunks[number * count : (number + 1) * count]]
        held = [shard for shard in shards if shard is not None]
        for shard in held:
            shard.evict(shard.version)
            shard.end_lives(shard.version)
        found |= _of_group(saved, dealing, number, group, held)
    return found


def _of_group(
    saved: CheckpointRows,
    dealing: Dealing,
    number: int,
    group: Sequence[Table],
    shards: Sequence[TableShard],
) -> dict[str, Evictions]:
    """Return what shards lack of the rows that a group has in a checkpoint."""
    parts = []
    for piece in pieces_for(saved, dealing, number, lambda file: file.tensors()):
        held = [shard.sightings_of(piece.tables, piece.ids) >= 0 for shard in shards]
        parts.append((piece.tables, piece.ids, piece.sightings, np.logical_or.reduce(held)))
    of, ids, seen, kept = (np.concatenate(each) for each in zip(*parts, strict=True))
    found = {}
    for at, table in enumerate(group):
        mine, gone = of == at, (of == at) & ~kept
        share = seen[gone].sum() / max(seen[mine].sum(), 1)
        found[table.name] = _evictions(shards, at, ids[gone], seen[gone], float(share))
    return found


def _evictions(
    shards: Sequence[TableShard], table: int, ids: Int64s, seen: Int64s, share: float
) -> Evictions:
    removed = {
        cause: sum(int(shard.counts[f"evicted_{cause}"][table]) for shard in shards)
        for cause in CAUSES
    }
    rows = sum(int(shard.rows_of()[table]) for shard in shards)
    return Evictions(rows, removed, ids[np.argsort(-seen, kind="stable")], share)
