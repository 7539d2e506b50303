"""A server's answers to workers that pull rows of embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from steepest.engine.incoming_weights import Key
from steepest.engine.staged_chunk import StagedChunk
from steepest.errors import ConfigurationError, ProtocolError
from steepest.messages.message import Peer, Send
from steepest.messages.rows import PullRows, Rows

if TYPE_CHECKING:
    from steepest.engine.table_chunk import TableChunk
    from steepest.tables.dealing import Dealing

_MOST_WAITING = 64  # pulls of one worker


class RowPulls:
    """The pulls of rows at one server, of which those of a version to come wait for it.

    Args:
        server: its index, for errors.
        tables: how tables are dealt into chunks; None without tables.
        chunks: that the server holds, by index.
        send: sends as the server.
    """

    def __init__(
        self,
        server: int,
        tables: Dealing | None,
        chunks: Mapping[int, StagedChunk],
        send: Send,
    ) -> None:
        self._server = server
        self._tables = tables
        self._chunks = chunks
        self._send = send
        self._waiting: list[tuple[Peer, PullRows]] = []

    def receive(self, source: Peer, pull: PullRows, at: Key) -> None:
        """Answer a pull, or keep it until its version is here; one of an old generation is dropped.

        Args:
            source: the worker.
            pull: its request.
            at: generation and version of the server.

        Raises:
            ProtocolError: it asks for rows that this server does not hold, or the worker has asked
                too often.
        """
        if (pull.generation, pull.version) > at:
            if sum(peer == source for peer, _ in self._waiting) >= _MOST_WAITING:
                raise ProtocolError(f"{source} has {_MOST_WAITING} pulls of rows that wait")
            self._waiting.append((source, pull))
        elif pull.generation == at[0]:
            self._answer(source, pull, at)

    def answer(self, at: Key) -> None:
        """Answer the pulls whose version is here now."""
        waiting, self._waiting = self._waiting, []
        for source, pull in waiting:
            self.receive(source, pull, at)

    def lost(self, peer: Peer) -> None:
        """Forget the pulls of a peer that is lost."""
        self._waiting = [(source, pull) for source, pull in self._waiting if source != peer]

    def _answer(self, source: Peer, pull: PullRows, at: Key) -> None:
        generation, version = at
        refused, values = "", None
        try:
            values = self._values(pull)
        except ConfigurationError as error:
            refused = str(error)
        answer = Rows(generation, pull.sequence, version, refused, values)
        self._send(source, answer.pack())

    def _values(self, pull: PullRows) -> torch.Tensor | None:
        """Return the values of the rows of a pull, flat bytes; None of no rows.

        Raises:
            ConfigurationError: a table has no room for them.
            ProtocolError: this server does not hold them.
        """
        from steepest.tables.gradients import unpack_keys

        dealing = self._tables
        if dealing is None or pull.group >= len(dealing.groups):
            raise ProtocolError(f"a pull from group {pull.group} of tables, which is not there")
        if pull.payload is None:
            return None
        tables, ids = unpack_keys(pull.payload.numpy())
        order, begins = dealing.deal(tables, ids)
        if not np.array_equal(order, np.arange(len(order))):
            raise ProtocolError("a pull of rows that are not in the order of their shards")
        one = dealing.groups[pull.group][0]
        values = np.empty((len(ids), one.dim), one.dtype)
        for shard in np.flatnonzero(np.diff(begins)):
            held = self._chunks.get(dealing.chunk(pull.group, int(shard)))
            if held is None:
                raise ProtocolError(f"server {self._server} does not hold shard {shard} of tables")
            rows = cast("TableChunk", held).rows
            part = slice(begins[shard], begins[shard + 1])
            if pull.training:
                rows.require_room(tables[part], ids[part])
            rows.pull(tables[part], ids[part], out=values[part])
        return torch.from_numpy(values.reshape(-1).view(np.uint8))
