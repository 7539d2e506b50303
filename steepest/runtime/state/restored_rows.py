"""Restores rows of a checkpoint or a snapshot: the driver names the files, each process reads those of its shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from steepest.checkpoint.files import DamagedRowsError, UnreachableError
from steepest.core.optim.portable import Record
from steepest.core.system import system
from steepest.data.storage.places import StorageError
from steepest.errors import CheckpointError, DeadlineError, PeerLostError, listed
from steepest.runtime.calls import drop_calls
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import runtime
from steepest.tables.files.imported_rows import ImportedRows
from steepest.tables.files.saved_rows import CheckpointRows, SavedFile
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.restored_shards import MADE, RowsRead, RowsWanted

if TYPE_CHECKING:
    from steepest.tables.rows.dealing import Dealing
    from steepest.tables.rows.table import Table

_LOOK_SECONDS = 0.5


class RestoredRows:
    """Rows that processes have read and servers have not installed yet; a context manager that drops the rest.

    Args:
        cluster: the job's.
        number: negative, and unique to each restore; the numbers of servers' own snapshots are positive.

    Attributes:
        replaced: how many ids of the last import had rows.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster, self._number = cluster, number
        self._asked: list[Any] = []  # processes
        self.replaced = 0

    def __enter__(self) -> RestoredRows:
        return self

    def __exit__(self, *_: object) -> None:
        """Have processes drop the rows that no server has installed."""
        calls = [runtime().call(each, "rows", "drop", self._number) for each in self._asked]
        drop_calls(calls)

    def read(self, saved: CheckpointRows | None) -> list[Record]:
        """Have processes read rows, and return records for servers to install in their place.

        Args:
            saved: the files of the rows; None for no rows.

        Raises:
            CheckpointError: the job's tables cannot have the rows. DamagedRowsError: files are damaged or missing.
            UnreachableError: an object store does not answer.
            ResourcesError: a machine has no room. PeerLostError: a process died.
        """
        dealing = dealing_of(self._cluster.job)
        if dealing is None or saved is None:
            return []
        wanted = {
            process: RowsWanted(self._number, chunks, dealing, saved)
            for process, chunks in self._chunks(dealing).items()
        }
        answers = self._read(wanted, saved)
        if any(answer.elsewhere for answer in answers.values()):
            wanted = {process: replace(each, dealt=True) for process, each in wanted.items()}
            answers = self._read(wanted, saved)
        for answer in answers.values():
            if answer.silent:
                raise UnreachableError(f"cannot read rows of a checkpoint: {answer.silent}")
            if answer.damaged:
                raise DamagedRowsError(answer.damaged)
            if answer.unfit:
                raise CheckpointError(f"embedding tables: {answer.unfit}")
        return self._records(dealing)

    def given(self, dealing: Dealing, table: Table, rows: ImportedRows) -> list[Record]:
        """Have processes copy a table's shards with imported rows, return records as `read`, and set `replaced`.

        Raises:
            ConfigurationError: the table has no room for the rows.
        """
        group, number = dealing.place(table)
        order, begins = dealing.deal(
            group, np.full(len(rows.ids), number, np.int32), rows.ids.numpy()
        )
        ids, values = (each if order is None else each[order] for each in rows)
        parts = {
            dealing.chunk(group, shard): ImportedRows(ids[begin:end], values[begin:end])
            for shard, (begin, end) in enumerate(pairwise(begins.tolist()))
        }
        asked = {
            process: (self._number, dealing, number, {c: parts[c] for c in chunks if c in parts})
            for process, chunks in self._chunks(dealing).items()
        }
        replaced: dict[int, int] = {}
        for answer in self._call("give_rows", asked).values():
            replaced |= answer
        self.replaced = sum(replaced.values())
        return self._records(dealing)

    def _chunks(self, dealing: Dealing) -> dict[Any, list[int]]:
        """Map each process to the chunks of tables that its servers hold, and note the processes."""
        chunks_of: dict[Any, list[int]] = {}
        for chunk, holders in self._cluster.holdings().items():
            for process in holders if chunk in dealing.chunks else ():
                chunks_of.setdefault(process, []).append(chunk)
        self._asked = list(chunks_of)
        return chunks_of

    def _records(self, dealing: Dealing) -> list[Record]:
        stands = {"key": MADE, "plain": False, "start": 0, "stop": 1}
        value = torch.tensor([self._number])
        return [(chunk, stands | {"name": dealing.name(chunk)}, value) for chunk in dealing.chunks]

    def _read(self, wanted: Mapping[Any, RowsWanted], saved: CheckpointRows) -> dict[Any, RowsRead]:
        """Return each process' answer, after giving it the files that it cannot reach."""
        asked = {process: ("read", each) for process, each in wanted.items()}
        answers = self._call("rows", asked)
        lacking = {process: asked[process] for process in asked if answers[process].lacks}
        known = {file.name: file for layer in saved.layers for file in layer.files}
        for process in lacking:
            for name in answers[process].lacks:
                self._send(process, known[name])
        return answers | (self._call("rows", lacking) if lacking else {})

    def _send(self, process: Any, file: SavedFile) -> None:
        """Give a process a file: from the driver, or from the disk of another process."""
        if file.kept:
            copy = runtime().call(self._keeper(file), "rows", "files.read", file.kept, file.name)
            self._call("rows", {process: ("files.keep", file.kept, file.name, copy)})
            return
        at = 0
        for data in _parts(file):
            self._call("rows", {process: ("take_file", self._number, file.name, at, data)})
            at += len(data)

    def _keeper(self, file: SavedFile) -> Any:
        """Return a process that has a file of a snapshot; PeerLostError: none has."""
        processes = [*self._cluster.living()]
        asked = [runtime().call(each, "rows", "files.names", file.kept) for each in processes]
        names = self._cluster.names(processes)
        answers = self._cluster.get(asked, "say which rows it has on disk", names)
        for process, kept in zip(processes, answers, strict=True):
            if file.name in kept:
                return process
        raise PeerLostError(
            "of some rows of embedding tables no snapshot is left: the processes that had it on disk died. Start the "
            "program again: with checkpoints= it goes on from the newest checkpoint"
        )

    def _call(self, method: str, arguments: Mapping[Any, Sequence[Any]]) -> dict[Any, Any]:
        """Call a method of each process, and return the results; the deadline begins anew whenever bytes were read."""
        cluster = self._cluster
        calls = {
            process: runtime().call(process, method, *values)
            for process, values in arguments.items()
        }
        limit, known = cluster.run_config.deadlines.step, -1
        until = system().now() + limit
        try:
            while not cluster.owner.attend(_LOOK_SECONDS, calls=list(calls.values())):
                cluster.meanwhile()
                read = self._progress()
                if read != known:
                    known, until = read, system().now() + limit
                    cluster.extend_deadline()
                elif system().now() > until:
                    late = listed(cluster.names(calls))
                    raise DeadlineError(f"{late} read no rows of a checkpoint for {limit:g} s")
            cluster.extend_deadline()
            names = cluster.names(calls)
            return dict(
                zip(calls, cluster.get(list(calls.values()), "read rows", names), strict=True)
            )
        finally:
            drop_calls(calls.values())

    def _progress(self) -> int:
        """Return the number of bytes that processes have read so far."""
        asked = [runtime().call(each, "rows", "nbytes", self._number) for each in self._asked]
        return sum(
            self._cluster.get(asked, "say how much it has read", self._cluster.names(self._asked))
        )


def _parts(file: SavedFile) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the bytes of a file in blocks; UnreachableError, DamagedRowsError: it cannot be read."""
    try:
        yield from file.parts()
    except StorageError as error:
        raise UnreachableError(f"cannot read rows of a checkpoint: {error}") from error
    except OSError as error:
        raise DamagedRowsError(f"{file.name}: {error}") from error
