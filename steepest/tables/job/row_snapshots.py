"""Sends or writes the rows of one server's snapshots piece by piece, at the pace of their readers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from steepest.core.engine.optimizer_records import state_fields
from steepest.core.messages.message import Message, Peer, Send
from steepest.core.messages.snapshots import Snapshot, SnapshotEnd, StateTensor
from steepest.data.storage.places import place_of
from steepest.errors import SteepestError
from steepest.tables.files.row_files import OnRouter, Records, RowFiles, SnapshotStorage
from steepest.tables.job.restored_shards import reaches
from steepest.tables.job.row_messages import MARKS, WRITTEN, RowsInto, RowsToRead
from steepest.tables.job.row_writer import RowWriter, is_stamp
from steepest.tables.job.table_chunk import TableChunk

log = logging.getLogger(__name__)

_AHEAD = 2  # pieces that a reader is sent before it has taken the first
#: Seconds that a reader may take for one piece. Until it has all of them, the old values of rows that
#: change are kept for it.
READER_SECONDS = 1800.0


@dataclass
class _Begun:
    """A snapshot that is being sent."""

    pieces: Iterator[tuple[TableChunk, Records]]  # the rest, each with its shard
    kept: int  # the number of a snapshot that stays on disk here; 0 for none
    end: SnapshotEnd  # to be sent after them
    # when it was first seen that the reader has not read on; None before
    since: float | None = None
    writer: RowWriter | None = None  # of the rest, once the reader has said where to
    away: bool = False  # whether that place was not reached
    written: int = 0  # pieces given to it
    last: tuple[int, str] = (0, "")  # the chunk of the last one, and its name


class RowSnapshots:
    """The snapshots of rows that one server is sending.

    A piece is copied and sent when its reader has taken the one before the last. Commits go on
    meanwhile, see `steepest.tables.rows.cut.RowCut`.

    Args:
        send: sends a message as the server.
        server: the server's index.

    Attributes:
        call: runs a function on the server's thread; None to write without a thread.
        may_write: whether `call` is known.
    """

    def __init__(self, send: Send, server: int = 0) -> None:
        self._send, self._server = send, server
        self.call: OnRouter | None = None
        self.may_write = False  # whether it is known how to come back from a thread
        self._begun: dict[tuple[Peer, int], _Begun] = {}
        self._writers: list[
            RowWriter
        ] = []  # of which a file may be on its way yet, whoever wanted it

    def begin(
        self,
        order: Snapshot,
        shards: Sequence[TableChunk],
        end: SnapshotEnd,
        files: RowFiles | None = None,  # of a snapshot that is to be kept on disk
    ) -> None:
        """Start to send the rows of shards as they are now; `end` is sent after the last piece."""
        wanted: RowsToRead = order.options or RowsToRead()
        bases = {chunk: (life, version) for chunk, life, version in wanted.since}
        pieces = [(held, held.pieces(wanted.table, bases.get(held.chunk.index))) for held in shards]
        rest = ((held, piece) for held, each in pieces for piece in each)
        kept = 0 if files is None else wanted.keep
        begun = self._begun[order.reader, order.sequence] = _Begun(rest, kept, end)
        directories = [held.directory for held in shards if held.directory is not None]
        if kept and directories:
            assert files is not None
            about = Path(directories[0]), str(kept), self._server, self.call
            begun.writer = RowWriter(*about, SnapshotStorage(files, kept))
        for _ in range(_AHEAD):
            self.go_on(order.reader, order.sequence)

    def go_on(self, reader: Peer, sequence: int, into: RowsInto | None = None) -> None:
        """Send a reader the next piece of a snapshot, or its end; do nothing if the end was sent.

        With `into` pieces are written to files instead if this server reaches their folder. A reader that leaves
        `into` out after it had given it ends the snapshot.
        """
        if (begun := self._begun.get((reader, sequence))) is None:
            return
        begun.since = None
        if into is not None and begun.writer is None and not begun.away:
            begun.writer = self._writer_of(into)
            begun.away = begun.writer is None
        elif into is None and begun.writer is not None and not begun.kept:
            self._give_up(reader, sequence, "its reader wants no more")
            return
        piece = next(begun.pieces, None)
        sent = piece is not None and begun.kept and piece[0].directory is None
        if begun.writer is not None and not sent:
            self._write(reader, sequence, begun, begun.writer, piece)
        elif piece is not None:
            for message in _messages(sequence, *piece):
                self._send(reader, message)
        else:
            del self._begun[reader, sequence]
            self._send(reader, begun.end.pack())

    def _writer_of(self, into: RowsInto) -> RowWriter | None:
        """Return a writer of a checkpoint's files; None if its folder is out of reach, or another writer is busy."""
        self._writers = [writer for writer in self._writers if writer.is_busy]
        if self.may_write and not self._writers and is_stamp(into.stamp):
            with contextlib.suppress(SteepestError):
                folder = place_of(into.folder)
                if reaches(folder / f"weights-{into.stamp}.safetensors"):
                    self._writers.append(RowWriter(folder, into.stamp, self._server, self.call))
                    return self._writers[-1]
        return None

    def _write(
        self,
        reader: Peer,
        sequence: int,
        begun: _Begun,
        writer: RowWriter,
        piece: tuple[TableChunk, Records] | None,
    ) -> None:
        """Write a piece, or the last file, and tell the reader when that is done."""

        def tell(*, waits: bool) -> None:
            if self._begun.get((reader, sequence)) is not begun:
                return
            if writer.error is not None and begun.kept:
                self._give_up(reader, sequence, str(writer.error))
                return
            if writer.error is not None:
                error = f"{type(writer.error).__name__}: {writer.error}"
                record = _record(sequence, begun, {"error": error}, waits=False)
                self._send(reader, record)  # upon which the reader gives up
                del self._begun[reader, sequence]
                writer.drop()
                return
            told, writer.files = {"files": writer.files, "kept": begun.kept}, []
            self._send(reader, _record(sequence, begun, told, waits=waits))
            if not waits:
                del self._begun[reader, sequence]
                self._send(reader, begun.end.pack())

        if piece is None:
            writer.finish(lambda: tell(waits=False))
            return
        held, records = piece
        begun.last = held.chunk.index, records[0][0]["name"]
        marks = [record for record in records if record[0]["key"] in MARKS]
        for message in _messages(sequence, held, marks, waits=False):
            self._send(reader, message)
        folder = held.directory if begun.kept else None
        writer.put(records, lambda: tell(waits=True), folder)

    def _give_up(self, reader: Peer, sequence: int, why: str) -> None:
        """End a snapshot early: send its end with the reason, and remove its files."""
        begun = self._begun.pop((reader, sequence))
        if begun.writer is not None:
            begun.writer.drop()
        self._send(reader, replace(begun.end, given_up=why).pack())

    def tick(self, now: float) -> None:
        """Give up snapshots whose readers have not read on for `READER_SECONDS`; `now`: of a monotonic clock."""
        for (reader, sequence), begun in list(self._begun.items()):
            if begun.since is None or (begun.writer is not None and begun.writer.is_busy):
                begun.since = now
            elif now - begun.since >= READER_SECONDS:
                why = f"its reader has not read on for {READER_SECONDS:g} s"
                log.warning("a snapshot of rows for %s is dropped: %s", reader, why)
                self._give_up(reader, sequence, why)

    def lost(self, peer: Peer) -> None:
        """Forget the snapshots of a reader that is lost."""
        for key in [key for key in self._begun if key[0] == peer]:
            if (writer := self._begun.pop(key).writer) is not None:
                writer.drop()


def _record(sequence: int, begun: _Begun, told: Mapping[str, Any], *, waits: bool) -> Message:
    """Return the record that replaces a written piece and lists the files written since the last one."""
    chunk, name = begun.last
    begun.written += 1
    description = {"name": name, "key": WRITTEN, "plain": False}
    description |= {"start": begun.written, "stop": begun.written + 1}
    value = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    fields, payload = state_fields(description, value)
    return StateTensor(sequence, chunk, **fields, waits=waits).pack(payload)


def _messages(
    sequence: int, held: TableChunk, piece: Records, *, waits: bool = True
) -> list[Message]:
    """Return a piece as messages; after the last one the reader owes a READ_ON if the server waits."""
    last, chunk = len(piece) - 1, held.chunk.index
    parts = [state_fields(description, value) for description, value in piece]
    return [
        StateTensor(sequence, chunk, **fields, waits=waits and at == last).pack(payload)
        for at, (fields, payload) in enumerate(parts)
    ]
