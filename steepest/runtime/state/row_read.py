"""Reads the rows of one instant from servers while training goes on, for a checkpoint."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from typing import Any

import torch

from steepest.checkpoint import files, rows
from steepest.checkpoint.saved_rows import TABLES, ShardMark
from steepest.core.engine.optimizer_slices import assemble
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.snapshots import Options
from steepest.core.optim.portable import Record
from steepest.core.system import system
from steepest.core.tensors.layout import ParameterLayout
from steepest.data.storage.places import StoragePlace
from steepest.embedding.row_messages import MARKS, WRITTEN, Bases, RowsInto, RowsToRead
from steepest.errors import CheckpointError
from steepest.runtime.cluster import Cluster

_LOOK_SECONDS, _HURRIED_SECONDS = 0.2, 0.01
_PART_BYTES = 64 << 20


@dataclass(frozen=True)
class RowRead:
    """A read of the rows of one instant; each server sends at least 40 MB a second."""

    layout: ParameterLayout
    snapshot: Future[SharedState] | None  # what the servers send; None without tables
    # what has come; has servers send further rows, or write them by options that `RowsInto` has
    take: Callable[[Options | None], list[Record]] = lambda options: []
    give_up: Callable[[], object] = lambda: None  # fails `snapshot`, unless it is done

    @contextlib.contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Return a context that gives up the rows on an error: until all are sent, servers keep old values of them."""
        try:
            yield
        except BaseException:
            self.give_up()
            raise


class RowsAsTheyCome(files.RowParts):
    """The rows of a read as parts of a checkpoint: no more than one part lies in memory.

    When all parts have come, `place` is the instant, for a later read of changes since then, and
    `changes` says whether any shard's part has only changes.
    """

    def __init__(
        self,
        read: RowRead,
        hurried: Callable[[], bool] = lambda: True,  # asked at least five times a second
        base: files.BaseLink
        | None = None,  # what the checkpoint continues, if there are changes alone
    ) -> None:
        self.place: Bases = ()
        self.changes = False
        self.written: list[dict[str, Any]] = []
        self._into: RowsInto | None = None
        self._read, self._hurried, self._base = read, hurried, base
        self._lives: dict[int, int] = {}  # of shards
        self._marks: dict[int, ShardMark] = {}

    def write_into(self, folder: StoragePlace, stamp: str) -> None:
        """Let servers write the rows that they have not sent."""
        self._into = RowsInto(str(folder), stamp)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the rows that servers send in parts of some 64 MB, and a part of nothing whenever some have come.

        Raises:
            PeerLostError, ShutdownError: the servers have ended, or have got other chunks.
            DeadlineError: a server has waited too long for a part to be taken.
            CheckpointError: the rows were given up, or a server cannot write them.
        """
        records: list[Record] = []
        size = 0
        for arrived in self._looks():
            if arrived:
                yield {}
            for record in arrived:
                if record[1]["key"] == WRITTEN:
                    self._note(record)
                else:
                    records.append(record)
                    size += record[2].nbytes
            arrived.clear()
            if size >= _PART_BYTES:
                yield self._part(records)
                size = 0
        if records:
            yield self._part(records)
        self.written.sort(key=lambda file: [int(n) for n in re.findall(r"\d+", file["name"])[-2:]])
        self.changes = any(mark.since != -1 for mark in self._marks.values())
        numbered = enumerate(self._read.layout.opaque_chunks if self._marks else ())
        self.place = [
            [chunk, self._lives[number], self._marks[number].updates] for number, chunk in numbered
        ]

    def _looks(self) -> Iterator[list[Record]]:
        """Yield the records that have come at each look."""
        snapshot = self._read.snapshot
        while snapshot is not None:
            hurried = self._hurried()
            try:
                seconds = _HURRIED_SECONDS if hurried else _LOOK_SECONDS
                yield system().result(snapshot, seconds).records
                return
            except FutureTimeoutError:
                yield self._read.take(None if self._into is None else self._into.options())

    def _note(self, record: Record) -> None:
        """Note the file that a server has written."""
        told = json.loads(record[2].numpy().tobytes())
        if "error" in told:
            assert self._into is not None
            raise CheckpointError(
                f"cannot write a checkpoint to {self._into.folder}: {told['error']}"
            )
        self.written += told["files"]
        for name, mark in told["marks"].items():
            *known, life = mark
            shard = int(name.removeprefix(TABLES))
            clock = max(known[MARKS.index("clock")], 0)
            self._lives[shard], self._marks[shard] = life, ShardMark(*known)._replace(clock=clock)

    def _part(self, records: list[Record]) -> dict[str, torch.Tensor]:
        """Return records as arrays by name; empties the list."""
        part, _ = assemble(self._read.layout, _taken_out(records))
        for shard, arrays in rows.by_shard(part).items():
            if "life" in arrays:
                self._lives[shard], self._marks[shard] = int(arrays["life"]), ShardMark.of(arrays)
                del part[f"{TABLES}{shard}/life"]
        return part

    def about(self) -> dict[str, Any]:
        """Return the marks of the shards, and the base of the checkpoint, if it has only changes."""
        marks = {"shards": [list(self._marks[shard]) for shard in sorted(self._marks)]}
        if not self.changes:
            return marks if self._marks else {}
        assert self._base is not None
        return {**marks, "base": asdict(self._base)}


def _taken_out(records: list[Record]) -> Iterator[Record]:
    """Yield records and take them out of their list, so that they need not lie in memory twice."""
    records.reverse()
    while records:
        yield records.pop()


def read_apart(cluster: Cluster, since: Bases | None) -> tuple[SharedState, RowRead]:
    """Return the state without rows, and the rows of the same instant, which are yet to come.

    No step may be in progress. Training may go on when this returns: the rows are those of now. Of
    shards in `since` only changed rows are read, if these are known; no rows for None.
    """
    client, layout = cluster.client, cluster.job.description.layout
    dense = [chunk.index for chunk in layout.chunks if not chunk.is_opaque]
    if not layout.opaque_chunks or since is None:
        future = cluster.on_router(lambda: client.read("state", chunks=dense))
        return cluster.wait(future, "a snapshot of the state"), RowRead(layout, None)

    def read() -> Sequence[Future[SharedState]]:
        options = RowsToRead(since=since).options()
        later = client.read("state", chunks=layout.opaque_chunks, options=options, held=True)
        return client.read("state", chunks=dense), later

    def take(options: Options | None) -> list[Record]:
        records: list[Record] = cluster.on_router(lambda: client.take(later, options))
        return records

    def give_up() -> None:
        error = CheckpointError("the rows of a checkpoint were given up")
        router.call(lambda: client.give_up(later, error))

    router = cluster.router
    state, later = cluster.on_router(read)
    rows_to_come = RowRead(layout, later, take, give_up)
    with rows_to_come.given_up_on_error():
        return cluster.wait(state, "a snapshot of the state"), rows_to_come
