"""Copies of a job's state in the driver's memory, for when only dead processes held the newest one."""

from __future__ import annotations

import time
from concurrent.futures import Future

from steepest.cluster.job_state import JobState
from steepest.cluster.launch import Cluster
from steepest.cluster.stock import Copy
from steepest.config.strategies import SimpleStrategy
from steepest.engine.client import Position, Snapshot

#: A snapshot is taken at most this share of the time, and at most once in so many seconds.
_SHARE = 0.01
_PAUSE_SECONDS = 1.0


class Snapshots:
    """Takes a copy of weights and optimizer state now and then, while workers train.

    Args:
        cluster: the job's processes.
        state: of the job.

    Attributes:
        taken: the last copy; None before the first, and after `forget`.
    """

    def __init__(self, cluster: Cluster, state: JobState) -> None:
        self.taken: Copy | None = None
        self._cluster = cluster
        self._state = state
        self._taking: Future[Snapshot] | None = None
        self._asked = 0.0  # when the snapshot under way was asked for
        self._due = 0.0  # when the next one may be asked for
        self._position: Position | None = None  # where the job stood then

    def remember(self) -> None:
        """Ask for a copy if one is due, and keep the one that has come; to be called often."""
        every, client = self._cluster.run_config.failure.snapshot_every, self._cluster.client
        if every == 0 or isinstance(self._cluster.job.config, SimpleStrategy):
            return
        now = time.monotonic()
        if self._taking is not None:
            if self._taking.done():
                if self._taking.exception() is None:
                    self.taken = self._state.copy(self._taking.result())
                self._taking = None
                self._due = now + max((now - self._asked) / _SHARE, _PAUSE_SECONDS)
            return
        if self.taken is None:
            due = True
        elif every is None:
            due = now >= self._due and client.position != self._position
        else:
            due = abs(client.position.version - self.taken.found.version) >= every
        if due:
            self._asked, self._position = now, client.position
            self._taking = self._cluster.on_router(lambda: client.read("state"))

    def interrupted(self) -> None:
        """Give up the copy under way: the client that asked for it is gone."""
        self._taking = None

    def forget(self) -> None:
        """Drop the copy: the job is another one, or its weights were set."""
        self._taking = self.taken = None
