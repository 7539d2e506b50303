"""The rows of a checkpoint on their way to tables on disk: piece by piece, never a shard at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from steepest.core.optim.portable import Record
from steepest.embedding.job_tables import dealing_of
from steepest.embedding.row_files import ON_DISK, PackedPiece, Records, packed
from steepest.runtime.calls import drop_calls
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import runtime

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing

PIECE_BYTES = 4 << 20
_AT_ONCE = 4  # pieces on their way to processes
#: The arrays of a state that have an item for each row.
_OF_ROWS = ("tables", "ids", "values", "slots", "written", "sightings", "until", "scores")


class RestoredRows:
    """Rows of a checkpoint in files of the processes that are to hold them, in place of records of whole shards.

    Args:
        cluster: the job.
        number: below 0, another one for each checkpoint that is restored; servers' own snapshots have positive ones.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster, self._number = cluster, number
        self._used = False

    def sent(self, records: Sequence[Record]) -> list[Record]:
        """Write the shards of tables on disk to files of their processes; return records that stand for them.

        Tables in memory stay as they are, and those whose rows have scores, since each is compared with all others.

        Raises:
            ResourcesError: a disk has no room. PeerLostError: a process died.
        """
        dealing = dealing_of(self._cluster.job)
        if dealing is None:
            return list(records)
        found, shards = list[Record](), dict[int, dict[str, Record]]()
        for record in records:
            if record[0] in dealing.chunks and _is_on_disk(dealing, record[0]):
                shards.setdefault(record[0], {})[record[1]["key"]] = record
            else:
                found.append(record)
        holdings = self._cluster.holdings()
        for chunk, own in sorted(shards.items()):
            found += self._sent_shard(dealing, chunk, own, holdings[chunk])
        return found

    def _sent_shard(
        self, dealing: Dealing, chunk: int, records: Mapping[str, Record], holders: Sequence[Any]
    ) -> Iterator[Record]:
        """Write one shard to its processes; yield the records that stand for its pieces."""
        directory = dealing.groups[dealing.group_of(chunk)][0].directory
        calls: list[Any] = []
        self._used = True
        pieces = _pieces(records)
        count = len(pieces)
        self._cluster.extend_deadline()
        try:
            for at, bounds in enumerate(pieces):
                piece = _piece(records, *bounds)
                about = self._number, chunk, at, count, directory, piece
                calls += [runtime().call(holder, "keep_snapshot", *about) for holder in holders]
                while len(calls) > _AT_ONCE * len(holders):
                    self._await(calls, holders)
                size = sum(len(part) for _, part in piece)
                stands = {"name": dealing.name(chunk), "key": ON_DISK, "plain": False}
                value = torch.tensor([[self._number, size]])
                yield chunk, stands | {"start": at, "stop": at + 1}, value
            while calls:
                self._await(calls, holders)
        finally:
            drop_calls(calls)

    def _await(self, calls: list[Any], holders: Sequence[Any]) -> None:
        """Wait until the oldest piece on its way is written by all its processes."""
        oldest = calls[: len(holders)]
        names = self._cluster.names(list(holders))
        self._cluster.get(oldest, "take rows of a checkpoint", names)
        del calls[: len(holders)]
        self._cluster.extend_deadline()

    def drop(self) -> None:
        """Drop the files: the rows are installed, or will not be."""
        if self._used:
            actors = set(self._cluster.actors.values())
            drop_calls([runtime().call(actor, "drop_snapshot", self._number) for actor in actors])


def _is_on_disk(dealing: Dealing, chunk: int) -> bool:
    """Return whether a shard's rows go by files."""
    group = dealing.groups[dealing.group_of(chunk)]
    return group[0].directory is not None and not any(
        getattr(table.eviction, "half_life", None) for table in group
    )


def _pieces(records: Mapping[str, Record]) -> list[tuple[int, int]]:
    """Return the first row of each piece, and the one after its last."""
    rows = {key: value for key, (_, _, value) in records.items() if key in _OF_ROWS}
    count = len(rows["ids"]) if "ids" in rows else 0
    width = sum(value.nbytes for value in rows.values()) // max(count, 1)
    most = max(PIECE_BYTES // max(width, 1), 1)
    return [(begin, min(begin + most, count)) for begin in range(0, max(count, 1), most)]


def _piece(records: Mapping[str, Record], begin: int, end: int) -> PackedPiece:
    """Return some rows as they lie in a file; with the first ones all that is no array of rows."""
    found: Records = []
    for key, (_, about, value) in sorted(records.items()):
        if key in _OF_ROWS:
            part = value[begin:end]
            found.append((about | {"start": begin, "stop": end}, part))
        elif not begin:
            found.append((about, value))
    return packed(found)
