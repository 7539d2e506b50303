"""Copies the snapshots of rows that processes keep on disk to second processes, and to a job's new servers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from steepest.checkpoint.saved_rows import TABLES
from steepest.core.engine.job import Job
from steepest.core.optim.portable import Record
from steepest.core.system import system
from steepest.embedding.job_tables import dealing_of
from steepest.embedding.row_files import ON_DISK, snapshot_of
from steepest.errors import DeadlineError, PeerLostError
from steepest.runtime.calls import drop_calls, raise_remote
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import CallError, CallRaisedError, runtime

_AT_ONCE = 16  # pieces on their way, of 4 MB each
_LOOK_SECONDS = 0.5


class _PieceOnItsWay(NamedTuple):
    """A piece of a shard's snapshot on its way from one process to another."""

    chunk: int
    at: int
    pieces: int  # that the shard has
    source: Any
    target: Any


class RowCopies:
    """Copies pieces of a snapshot between processes; the driver sees none of them.

    Args:
        job: the job with the tables.
        number: the snapshot's.
        shards: for each copy the chunk, its number of pieces, a process that has them, and the target.

    Attributes:
        calls: those in progress.
        failed: the error of the first piece that did not arrive, or None; no further piece is sent after it.
    """

    def __init__(self, job: Job, number: int, shards: Iterable[tuple[int, int, Any, Any]]) -> None:
        dealing = dealing_of(job)
        assert dealing is not None
        self._dealing, self._number = dealing, number
        self._left = deque(
            _PieceOnItsWay(chunk, at, count, source, target)
            for chunk, count, source, target in shards
            for at in range(count)
        )
        self.calls: list[Any] = []
        self.failed: CallError | None = None

    def advance(self) -> bool:
        """Send further pieces, and return whether all have arrived or one has failed."""
        for call in runtime().wait(self.calls, 0) if self.calls else ():
            self.calls.remove(call)
            try:
                call.get()
            except CallError as error:
                self.failed = self.failed or error
        if self.failed is not None:
            drop_calls(self.calls)
            return True
        while self._left and len(self.calls) < _AT_ONCE:
            one = self._left.popleft()
            arguments = self._number, one.chunk, one.at
            piece = runtime().call(one.source, "snapshot_piece", *arguments)
            directory = self._dealing.groups[self._dealing.group_of(one.chunk)][0].directory
            keep = runtime().call(
                one.target, "keep_snapshot", *arguments, one.pieces, directory, piece
            )
            self.calls.append(keep)
        return not self.calls


def keeps_on_disk(cluster: Cluster) -> bool:
    """Return whether servers keep snapshots of rows on disk: a table has a directory, and there are two processes."""
    dealing = dealing_of(cluster.job)
    if dealing is None or all(table.directory is None for table in dealing.tables):
        return False
    return len(set(cluster.actors.values())) > 1


def second_copies(cluster: Cluster, number: int, records: Iterable[Record]) -> RowCopies:
    """Return the copies of a snapshot's shards, one for each, to a second process.

    A process on another node is preferred, then one that hosts servers, then the one with the fewest copies.

    Args:
        cluster: the job's.
        number: the snapshot's.
        records: the records that stand for its pieces.
    """
    pieces = Counter(chunk for chunk, description, _ in records if description["key"] == ON_DISK)
    places = {member.actor: member.place for member in cluster.members.values()}
    holdings, order = cluster.holdings(), list(places)
    hosting = {process for processes in holdings.values() for process in processes}
    burden: Counter[Any] = Counter()
    shards = []
    for chunk, count in sorted(pieces.items()):
        source = holdings[chunk][0]
        node = places[source].node
        target = min(
            (process for process in order if process is not source),
            key=lambda process: (
                places[process].node == node,
                process not in hosting,
                burden[process],
            ),
        )
        burden[target] += 1
        shards.append((chunk, count, source, target))
    return RowCopies(cluster.job, number, shards)


def snapshot_in(state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of the snapshot on disk that a state by "parameter/key" refers to; 0 for none."""
    values = [
        v for name, v in state.items() if name.startswith(TABLES) and name.endswith(f"/{ON_DISK}")
    ]
    return snapshot_of(values) if values else 0


def carry_rows(cluster: Cluster, number: int) -> None:
    """Copy a snapshot's rows from the processes that have them on disk to the processes that are to hold them.

    Raises:
        PeerLostError: no living process has the rows of a shard, or a process died meanwhile.
    """
    dealing = dealing_of(cluster.job)
    assert dealing is not None
    processes = list(cluster.living())
    asked = [runtime().call(process, "snapshot_rows", number) for process in processes]
    answers: Sequence[dict[int, int]] = cluster.get(
        asked, "say which rows it has on disk", cluster.names(processes)
    )
    shards, burden = [], Counter[Any]()
    for chunk, holders in cluster.holdings().items():
        if (
            chunk not in dealing.chunks
            or dealing.groups[dealing.group_of(chunk)][0].directory is None
        ):
            continue
        having = {
            p: snapshots[chunk]
            for p, snapshots in zip(processes, answers, strict=True)
            if chunk in snapshots
        }
        if not having:
            raise PeerLostError(
                f"of the rows of {dealing.name(chunk)} no snapshot is left: the processes that had it on disk died. "
                "Start the program again: with checkpoints= it goes on from the newest checkpoint"
            )
        for process in holders:
            if process not in having:
                source = min(having, key=lambda each: burden[each])
                burden[source] += 1
                shards.append((chunk, having[source], source, process))
    copies = RowCopies(cluster.job, number, shards)
    limit = cluster.run_config.deadlines.step
    until = system().now() + limit
    while not copies.advance():
        if cluster.owner.attend(_LOOK_SECONDS, calls=[*copies.calls], number=1):
            until = system().now() + limit  # however many rows there are
            cluster.extend_deadline()
        elif system().now() > until:
            raise DeadlineError(f"no rows of a snapshot went from disk to disk for {limit:g} s")
    if isinstance(copies.failed, CallRaisedError):
        raise_remote(copies.failed, "a process", "take rows of a snapshot")
    if copies.failed is not None:
        raise PeerLostError(f"a process that had or took rows of a snapshot died: {copies.failed}")
