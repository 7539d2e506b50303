"""Reads the rows of one instant from servers while training goes on, for a checkpoint."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, dataclass
from typing import Any

import torch

from steepest.checkpoint import files
from steepest.core.engine.job import Job
from steepest.core.engine.optimizer_slices import assemble
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.snapshots import Options
from steepest.core.optim.portable import Record
from steepest.core.system import system
from steepest.core.tensors.layout import ParameterLayout
from steepest.data.storage.places import StoragePlace
from steepest.errors import CheckpointError
from steepest.runtime.cluster import Cluster
from steepest.tables.files.saved_rows import (
    TABLES,
    CheckpointRows,
    RowLayer,
    SavedFile,
    ShardMark,
    shards_in,
)
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.row_messages import MARKS, WRITTEN, Bases, RowsInto, RowsToRead

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


class ArrivedRows:
    """The rows of one instant, as they have come from servers.

    Attributes:
        size: bytes of the rows that no part has.
        files: the manifest's entries of files that servers have written.
        kept: the number of the snapshot that these are of; 0 for files of a checkpoint.
    """

    def __init__(self, layout: ParameterLayout) -> None:
        self.size = self.kept = 0
        self.files: list[dict[str, Any]] = []
        self._layout = layout
        self._records: list[Record] = []
        self._marks: dict[int, dict[str, int]] = {}  # by shard, in the order of `MARKS`

    @classmethod
    def of(cls, layout: ParameterLayout, records: Iterable[Record]) -> ArrivedRows:
        """Return what has come as all of these records, in any order."""
        arrived = cls(layout)
        for record in sorted(records, key=lambda record: (record[0], record[1]["start"])):
            arrived.take(record)
        return arrived

    def take(self, record: Record) -> None:
        """Take a record; CheckpointError: its server could not write rows."""
        _, about, value = record
        if (key := about["key"]) == WRITTEN:
            self._note(json.loads(value.numpy().tobytes()))
            return
        if key in MARKS:
            shard = int(about["name"].removeprefix(TABLES))
            self._marks.setdefault(shard, {})[key] = int(value)
            return
        self._records.append(record)
        self.size += value.nbytes

    def _note(self, told: dict[str, Any]) -> None:
        """Note the files that a server has written."""
        if "error" in told:
            raise CheckpointError(told["error"])
        self.kept = told["kept"]
        self.files += told["files"]

    def part(self) -> dict[str, torch.Tensor]:
        """Return the rows that no part has, as arrays by name."""
        records, self._records, self.size = self._records, [], 0
        return assemble(self._layout, records)[0]

    @property
    def marks(self) -> dict[int, ShardMark]:
        """The marks of the shards of which the first rows have come, in order."""
        return {
            shard: ShardMark(**{key: n for key, n in self._marks[shard].items() if key != "life"})
            for shard in sorted(self._marks)
        }

    @property
    def place(self) -> Bases:
        """The instant, for a later read of changes since then."""
        chunks = self._layout.opaque_chunks
        known = ((shard, self._marks[shard]) for shard in sorted(self._marks))
        return [(chunks[shard], mark["life"], mark["updates"]) for shard, mark in known]


def rows_of(job: Job, records: Sequence[Record]) -> CheckpointRows | None:
    """Return the rows among the records of a snapshot, in the driver's memory or files of processes; None for none.

    Args:
        job: whose snapshot it is.
        records: of a whole state.
    """
    if (dealing := dealing_of(job)) is None:
        return None
    arrived, files = ArrivedRows(job.description.layout), list[SavedFile]()

    def end_part() -> None:
        part = arrived.part()
        files.append(SavedFile(f"part-{len(files)}", None, {}, shards_in(part), part))

    of_rows = (record for record in records if record[0] in dealing.chunks)
    for record in sorted(of_rows, key=lambda record: (record[0], record[1]["start"])):
        arrived.take(record)
        if arrived.size >= _PART_BYTES:
            end_part()
    end_part()
    for each in arrived.files:
        kept = SavedFile(each["name"], None, each, tuple(each["shards"]), kept=arrived.kept)
        files.append(kept)
    marks = tuple(arrived.marks.values())
    layers = (RowLayer(tuple(files), marks),)
    return CheckpointRows(dealing.description(), layers) if marks else None


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
        self._arrived = ArrivedRows(read.layout)

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
        arrived = self._arrived
        for records in self._looks():
            if records:
                yield {}
            while records:
                self._take(records.pop())
            if arrived.size >= _PART_BYTES:
                yield arrived.part()
        if arrived.size:
            yield arrived.part()
        self.written = sorted(
            arrived.files, key=lambda file: [int(n) for n in re.findall(r"\d+", file["name"])[-2:]]
        )
        self.changes = any(mark.since != -1 for mark in arrived.marks.values())
        self.place = arrived.place

    def _take(self, record: Record) -> None:
        """Take a record; CheckpointError: its server could not write rows."""
        try:
            self._arrived.take(record)
        except CheckpointError as error:
            assert self._into is not None
            raise CheckpointError(
                f"cannot write a checkpoint to {self._into.folder}: {error}"
            ) from error

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
                yield self._read.take(self._into)

    def about(self) -> dict[str, Any]:
        """Return the marks of the shards, and the base of the checkpoint, if it has only changes."""
        marks = {"shards": [list(mark) for mark in self._arrived.marks.values()]}
        if not self.changes:
            return marks if marks["shards"] else {}
        assert self._base is not None
        return {**marks, "base": asdict(self._base)}


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
        options = RowsToRead(since=since) if since else None
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
