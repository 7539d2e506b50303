"""The rows of a checkpoint, which servers send while training goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import NamedTuple

import torch

from steepest.checkpoint import files, rows
from steepest.cluster.launch import Cluster
from steepest.engine.client import Snapshot
from steepest.messages.snapshots import Bases
from steepest.tensors.layout import ParameterLayout

_LOOK_SECONDS = 0.2


class Rows(NamedTuple):
    """All rows of all tables at one instant, or what has changed of them.

    Attributes:
        state: by "tables/shard/key".
        place: the instant, for a later read of what has changed.
        changes: whether of any shard there is only what has changed.
    """

    state: dict[str, torch.Tensor]
    place: Bases
    changes: bool


@dataclass(frozen=True)
class RowRead:
    """The rows of one instant, as servers send them: 40 MB of each server in a second, or faster.

    Attributes:
        layout: of the job.
        snapshot: what the servers send; None without tables.
        read_on: has servers send further rows, as `Client.read_on`.
    """

    layout: ParameterLayout
    snapshot: Future[Snapshot] | None
    read_on: Callable[[bool], object] = lambda freely: None

    def wait(self, hurried: Callable[[], bool] = lambda: True) -> Rows:
        """Return the rows when all have come.

        Args:
            hurried: returns whether they are to come as fast as can be; called five times a second.

        Raises:
            PeerLostError, ShutdownError: the servers have ended, or have got other chunks.
        """
        if self.snapshot is None:
            return Rows({}, (), False)
        while True:
            self.read_on(hurried())
            try:
                found = self.snapshot.result(_LOOK_SECONDS)
                break
            except FutureTimeoutError:
                pass
        state, _ = files.assemble(self.layout, _taken_out(found.records))
        place = []
        for number, chunk in enumerate(self.layout.table_shards):
            name = f"{rows.TABLES}{number}"
            life, version = state.pop(f"{name}/life"), state[f"{name}/updates"]
            place.append([chunk, int(life), int(version)])
        return Rows(state, place, any(name.endswith("/since") for name in state))

    @contextlib.contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Have servers send all rows at once if a block raises: they keep what changes until then."""
        try:
            yield
        except BaseException:
            self.read_on(True)
            raise


def _taken_out(records: list[files.Record]) -> Iterator[files.Record]:
    """Yield records and take them out of their list, so that they need not lie in memory twice."""
    records.reverse()
    while records:
        yield records.pop()


def read_apart(cluster: Cluster, since: Bases) -> tuple[Snapshot, RowRead]:
    """Return the state without rows, and the rows of the same instant, which are yet to come.

    No step may be going on. Training may go on when this returns: the rows are as they are now.

    Args:
        cluster: the job.
        since: rows that there are; of these shards only what has changed is read, if that is known.
    """
    client, layout = cluster.client, cluster.job.description.layout
    if not layout.table_shards:
        future = cluster.on_router(lambda: client.read("state"))
        return cluster.wait(future, "a snapshot of the state"), RowRead(layout, None)
    dense = [chunk.index for chunk in layout.chunks if not chunk.has_rows]

    def read() -> Sequence[Future[Snapshot]]:
        later = client.read("state", chunks=layout.table_shards, since=since, held=True)
        return client.read("state", chunks=dense), later

    def read_on(freely: bool) -> None:
        router.call(lambda: client.read_on(later, freely=freely))

    router = cluster.router
    state, later = cluster.on_router(read)
    return cluster.wait(state, "a snapshot of the state"), RowRead(layout, later, read_on)
