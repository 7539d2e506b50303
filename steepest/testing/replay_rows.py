"""Rows of embedding tables for a replay, read where the one server has them."""

from __future__ import annotations

from typing import cast

import numpy as np

from steepest.engine.row_collector import RowCollector
from steepest.engine.server import Server
from steepest.engine.table_chunk import TableChunk
from steepest.errors import ConfigurationError
from steepest.tables.dealing import Dealing
from steepest.tables.kernels import Floats, Int32s, Int64s


class RowsInPlace(RowCollector):
    """Rows of the tables of one server in this process.

    Args:
        dealing: of tables into chunks.
        server: that holds all chunks.
    """

    def __init__(self, dealing: Dealing, server: Server) -> None:
        super().__init__(dealing)
        self._server = server

    def begin(self, worker: int, pulled: int) -> None:
        """Begin a worker's gradient.

        Args:
            worker: its index, for the error.
            pulled: version of the weights from which it was computed.

        Raises:
            ConfigurationError: the rows of that version are not here any more.
        """
        if pulled != self._server.version:
            raise ConfigurationError(
                f"a push of worker {worker} from version {pulled} was committed after version "
                f"{self._server.version}: the log does not tell of which version its rows of "
                "embedding tables were, so only runs without staleness can be replayed"
            )
        self.clear()

    def pull(self, group: int, tables: Int32s, ids: Int64s, training: bool = True) -> Floats:
        """Return the values of rows, (n, dim)."""
        order, begins = self.dealing.deal(tables, ids)
        one = self.dealing.groups[group][0]
        values = np.empty((len(ids), one.dim), one.dtype)
        for shard in range(self.dealing.num_shards):
            part = slice(begins[shard], begins[shard + 1])
            mine = part if order is None else order[part]
            held = self._server.chunks[self.dealing.chunk(group, shard)]
            values[mine] = cast(TableChunk, held).rows.pull(tables[mine], ids[mine])
        return values
