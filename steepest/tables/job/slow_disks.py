"""Warns of disks that keep a server's updates waiting for rows of tables."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from steepest.core.status import Status
from steepest.core.system import system
from steepest.tables.job.row_pulls import RowPulls
from steepest.tables.job.table_chunk import TableChunk

log = logging.getLogger(__name__)

_LONG_SECONDS = 1.0  # of one update, of which the user is told


class SlowDisks:
    """The disks of one server's tables: tells, once a table, that an update waited long.

    Args:
        server: its index.
        shards: that it holds, by index of the chunk.
        pulls: of these, some of which wait for a disk while others are answered.
    """

    def __init__(self, server: int, shards: Mapping[int, TableChunk], pulls: RowPulls) -> None:
        self._server, self._shards, self._pulls = server, shards, pulls
        self._on_disk = [held for held in shards.values() if held.directory is not None]
        self._before = dict.fromkeys((held.chunk.index for held in self._on_disk), 0.0)
        self._told: set[str] = set()

    def look(self) -> None:
        """Note the end of an update, and log a warning for each table with a disk that delayed it for long."""
        waited: dict[str, float] = {}
        for held in self._on_disk:
            at = held.chunk.index
            now = held.rows.disk_seconds + self._pulls.seconds.get(at, 0.0)
            since, self._before[at] = self._before[at], now
            name = held.rows.tables[0].name
            waited[name] = waited.get(name, 0.0) + max(now - since, 0.0)
        for held in self._on_disk:
            name = held.rows.tables[0].name
            if waited[name] >= _LONG_SECONDS and name not in self._told:
                self._told.add(name)
                log.warning(
                    "an update of table %r waited %.1f s for the disk of server %d, directory %r: if that goes on, "
                    "give more memory_rows= or memory_bytes=, directory= a faster disk, table_staleness=1 to have "
                    "rows read ahead, or use more servers",
                    name, waited[name], self._server, held.directory,
                )  # fmt: skip

    def doing(self) -> Status:
        """Return which disk is being waited for; any thread may ask."""
        waits = [(held.chunk.index, held.rows.disk_since) for held in self._on_disk]
        for chunk, since in (*waits, self._pulls.oldest or (0, None)):
            if since is not None:
                held = self._shards[chunk]
                return Status(
                    f"waits for the disk of directory {held.directory!r}, table {held.rows.tables[0].name!r}",
                    system().now() - since,
                    is_held_up=True,
                )
        return Status()
