"""Copies the files of a snapshot of rows to second processes."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

from steepest.core.messages.message import server_peer
from steepest.runtime.calls import drop_calls
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import CallError, runtime
from steepest.tables.job.job_tables import dealing_of

_AT_ONCE = 4  # files on their way, of some 64 MB each


class RowCopies:
    """Copies files of a snapshot between processes; the driver sees none of them.

    Args:
        number: the snapshot's.
        files: of each copy the file's name, a process that has it, and the target.

    Attributes:
        keepers: the processes that have the files then.
        calls: those in progress.
        failed: the error of the first file that did not arrive, or None; no further file is sent after it.
    """

    def __init__(self, number: int, files: Iterable[tuple[str, Any, Any]]) -> None:
        self._number, self._left = number, deque(files)
        self.keepers = {process for _, *both in self._left for process in both}
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

    A living process is preferred, then one on another node, one that hosts servers, the one with the fewest copies.

    Args:
        cluster: the job's.
        number: the snapshot's.
        names: of the files, which name the servers that wrote them.
    """
    places = {member.actor: member.place for member in cluster.members.values()}
    living = cluster.living()
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
                process not in living,
                places[process].node == node,
                process not in hosting,
                burden[process],
            ),
        )
        burden[target] += 1
        files.append((name, source, target))
    return RowCopies(number, files)
