"""Copies the files of a snapshot of rows from process to process: to second ones, and to a job's new servers."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from steepest.core.messages.message import server_peer
from steepest.core.system import system
from steepest.embedding.job_tables import dealing_of
from steepest.errors import DeadlineError, PeerLostError
from steepest.runtime.calls import drop_calls, raise_remote
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import CallError, CallRaisedError, runtime

_AT_ONCE = 4  # files on their way, of some 64 MB each
_LOOK_SECONDS = 0.5


class RowCopies:
    """Copies files of a snapshot between processes; the driver sees none of them.

    Args:
        number: the snapshot's.
        files: of each copy the file's name, a process that has it, and the target.

    Attributes:
        calls: those in progress.
        failed: the error of the first file that did not arrive, or None; no further file is sent after it.
    """

    def __init__(self, number: int, files: Iterable[tuple[str, Any, Any]]) -> None:
        self._number, self._left = number, deque(files)
        self.calls: list[Any] = []
        self.failed: CallError | None = None

    def advance(self) -> bool:
        """Send further files, and return whether all have arrived or one has failed."""
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
            name, source, target = self._left.popleft()
            file = runtime().call(source, "rows", "files.read", self._number, name)
            keep = runtime().call(target, "rows", "files.keep", self._number, name, file)
            self.calls.append(keep)
        return not self.calls


def keeps_on_disk(cluster: Cluster) -> bool:
    """Return whether servers keep snapshots of rows on disk: a table has a directory, and there are two processes."""
    dealing = dealing_of(cluster.job)
    if dealing is None or all(table.directory is None for table in dealing.tables):
        return False
    return len(set(cluster.actors.values())) > 1


def second_copies(cluster: Cluster, number: int, names: Iterable[str]) -> RowCopies:
    """Return the copies of the files of a snapshot, one for each, to a second process.

    A process on another node is preferred, then one that hosts servers, then the one with the fewest copies.

    Args:
        cluster: the job's.
        number: the snapshot's.
        names: of the files, which name the servers that wrote them.
    """
    places = {member.actor: member.place for member in cluster.members.values()}
    hosting = {process for processes in cluster.holdings().values() for process in processes}
    burden: Counter[Any] = Counter()
    files = []
    for name in names:
        server = int(re.findall(r"\d+", name)[-2])
        source = cluster.members[cluster.process_of(server_peer(server))].actor
        node = places[source].node
        target = min(
            (process for process in places if process is not source),
            key=lambda process: (
                places[process].node == node,
                process not in hosting,
                burden[process],
            ),
        )
        burden[target] += 1
        files.append((name, source, target))
    return RowCopies(number, files)


def carry_files(cluster: Cluster, number: int, wanted: Iterable[tuple[str, Any]]) -> None:
    """Copy files of a snapshot, by name, from the processes that have them to others.

    Raises:
        PeerLostError: no living process has a file, or a process died meanwhile.
    """
    processes = list(cluster.living())
    asked = [runtime().call(process, "rows", "files.names", number) for process in processes]
    answers = cluster.get(asked, "say which rows it has on disk", cluster.names(processes))
    having = list(zip(processes, map(set, answers), strict=True))
    files, burden = [], Counter[Any]()
    for name, target in wanted:
        sources = [process for process, names in having if name in names]
        if not sources:
            raise PeerLostError(
                "of some rows of embedding tables no snapshot is left: the processes that had it on disk died. "
                "Start the program again: with checkpoints= it goes on from the newest checkpoint"
            )
        source = min(sources, key=lambda each: burden[each])
        burden[source] += 1
        files.append((name, source, target))
    copies = RowCopies(number, files)
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
