"""The rows of tables that one server sends in snapshots: piece by piece, as their readers take them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from steepest.core.engine.optimizer_records import state_fields
from steepest.core.messages.message import Peer, Send
from steepest.core.messages.snapshots import Snapshot, SnapshotEnd, StateTensor
from steepest.embedding.row_files import Records, RowFiles
from steepest.embedding.row_messages import RowsToRead
from steepest.embedding.table_chunk import TableChunk
from steepest.errors import ResourcesError

log = logging.getLogger(__name__)

_AHEAD = 2  # pieces that a reader is sent before it has taken the first
#: Seconds that a reader may take for one piece. Until it has all of them, the old values of rows that
#: change are kept for it.
READER_SECONDS = 1800.0


@dataclass
class _Begun:
    """A snapshot of which not all is sent."""

    messages: Iterator[list[StateTensor]]  # the rest, piece by piece
    end: SnapshotEnd  # to be sent after them
    # when it was first seen that the reader has not read on; None before
    since: float | None = None


class RowSnapshots:
    """The snapshots of rows that one server has begun to send.

    A piece is sent when its reader has taken the one before the last, and is copied then: commits go
    on meanwhile, see `steepest.tables.cut.RowCut`.

    Args:
        send: sends as the server.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun: dict[tuple[Peer, int], _Begun] = {}

    def begin(
        self,
        order: Snapshot,
        shards: Sequence[TableChunk],
        end: SnapshotEnd,
        files: RowFiles | None = None,  # of a snapshot that is to be kept on disk
    ) -> None:
        """Send the rows of some shards as they are now, or the first of them; `end` follows all of them."""
        wanted = RowsToRead.of(order.options)
        bases = {chunk: (life, version) for chunk, life, version in wanted.since}
        pieces = []
        for held in shards:
            chunk, directory = held.chunk.index, held.directory
            found: Iterator[Records] = held.pieces(wanted.table, bases.get(chunk))
            if wanted.keep and directory is not None and files is not None:
                found = files.written(wanted.keep, chunk, directory, found)
            pieces.append((chunk, found))
        messages = chain.from_iterable(
            (_messages(order.sequence, chunk, piece) for piece in each) for chunk, each in pieces
        )
        self._begun[order.reader, order.sequence] = _Begun(messages, end)
        for _ in range(_AHEAD):
            self.go_on(order.reader, order.sequence)

    def go_on(self, reader: Peer, sequence: int) -> None:
        """Send a reader the next piece of a snapshot, or its end; nothing if that is sent."""
        if (begun := self._begun.get((reader, sequence))) is None:
            return
        begun.since = None
        try:
            piece = next(begun.messages, None)
        except ResourcesError as error:  # of the disk for snapshots
            del self._begun[reader, sequence]
            self._send(reader, replace(begun.end, given_up=str(error)).pack())
            return
        if piece:
            for message in piece:
                self._send(reader, message.pack())
        else:
            del self._begun[reader, sequence]
            self._send(reader, begun.end.pack())

    def tick(self, now: float) -> None:
        """Give up snapshots whose readers have not read on for `READER_SECONDS`; `now`: seconds that do not go back."""
        for (reader, sequence), begun in list(self._begun.items()):
            if begun.since is None:
                begun.since = now
            elif now - begun.since >= READER_SECONDS:
                del self._begun[reader, sequence]
                why = f"its reader has not read on for {READER_SECONDS:g} s"
                log.warning("a snapshot of rows for %s is dropped: %s", reader, why)
                self._send(reader, replace(begun.end, given_up=why).pack())

    def lost(self, peer: Peer) -> None:
        """Forget the snapshots of a reader that is lost."""
        self._begun = {key: begun for key, begun in self._begun.items() if key[0] != peer}


def _messages(
    sequence: int, chunk: int, piece: Sequence[tuple[dict[str, Any], torch.Tensor]]
) -> list[StateTensor]:
    """Return a piece as messages, of which the last one waits for a READ_ON."""
    last = len(piece) - 1
    return [
        StateTensor(sequence, chunk, **state_fields(about, value), waits=at == last)
        for at, (about, value) in enumerate(piece)
    ]
