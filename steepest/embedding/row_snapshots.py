"""The rows of tables that one server sends in snapshots: piece by piece, as their readers take them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from steepest.core.engine.optimizer_records import state_fields
from steepest.core.messages.message import Peer, Send
from steepest.core.messages.snapshots import Snapshot, SnapshotEnd, StateTensor
from steepest.data.storage.places import place_of
from steepest.embedding.restored_shards import reaches
from steepest.embedding.row_files import OnRouter, Records, RowFiles
from steepest.embedding.row_messages import MARKS, WRITTEN, RowsInto, RowsToRead
from steepest.embedding.row_writer import RowWriter, is_stamp
from steepest.embedding.table_chunk import TableChunk
from steepest.errors import ResourcesError, SteepestError

log = logging.getLogger(__name__)

_AHEAD = 2  # pieces that a reader is sent before it has taken the first
#: Seconds that a reader may take for one piece. Until it has all of them, the old values of rows that
#: change are kept for it.
READER_SECONDS = 1800.0


@dataclass
class _Begun:
    """A snapshot of which not all is sent."""

    pieces: Iterator[tuple[int, Records]]  # the rest, each with its chunk
    end: SnapshotEnd  # to be sent after them
    # when it was first seen that the reader has not read on; None before
    since: float | None = None
    writer: RowWriter | None = None  # of the rest, once the reader has said where to
    away: bool = False  # whether that place was not reached
    written: int = 0  # pieces given to it
    last: tuple[int, str] = (0, "")  # the chunk of the last one, and its name
    marks: dict[str, list[int]] = field(
        default_factory=dict
    )  # of those whose first piece was written, not told yet


class RowSnapshots:
    """The snapshots of rows that one server has begun to send.

    A piece is sent when its reader has taken the one before the last, and is copied then: commits go
    on meanwhile, see `steepest.tables.cut.RowCut`.

    Args:
        send: sends as the server.
        server: its index.

    Attributes:
        call: has a function run on the server's thread; None to write without a thread.
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
        rest = ((chunk, piece) for chunk, each in pieces for piece in each)
        self._begun[order.reader, order.sequence] = _Begun(rest, end)
        for _ in range(_AHEAD):
            self.go_on(order.reader, order.sequence)

    def go_on(self, reader: Peer, sequence: int, into: RowsInto | None = None) -> None:
        """Send a reader the next piece of a snapshot, or its end; nothing if that is sent.

        Pieces are written `into` files instead, where this server reaches them; a reader that has said so, and does
        not any more, is sent the end.
        """
        if (begun := self._begun.get((reader, sequence))) is None:
            return
        begun.since = None
        if into is not None and begun.writer is None and not begun.away:
            begun.writer = self._writer_of(into)
            begun.away = begun.writer is None
        elif into is None and begun.writer is not None:
            self._give_up(reader, sequence, "its reader wants no more")
            return
        try:
            found = next(begun.pieces, None)
        except ResourcesError as error:  # of the disk for snapshots
            self._give_up(reader, sequence, str(error))
            return
        if begun.writer is not None:
            self._write(reader, sequence, begun, begun.writer, found)
        elif found is not None:
            for message in _messages(sequence, *found):
                self._send(reader, message.pack())
        else:
            del self._begun[reader, sequence]
            self._send(reader, begun.end.pack())

    def _writer_of(self, into: RowsInto) -> RowWriter | None:
        """Return what writes a checkpoint's files; None where its place is not reached, or a disk hangs."""
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
        found: tuple[int, Records] | None,
    ) -> None:
        """Write a piece, or the last file; tell the reader when there is room for the next, or nothing is left."""

        def tell(*, waits: bool) -> None:
            if self._begun.get((reader, sequence)) is not begun:
                return
            if writer.error is not None:
                error = f"{type(writer.error).__name__}: {writer.error}"
                record = _record(sequence, begun, {"error": error}, waits=False)
                self._send(reader, record.pack())  # upon which the reader gives up
                del self._begun[reader, sequence]
                writer.drop()
                return
            told = {"files": writer.files, "marks": begun.marks}
            writer.files, begun.marks = [], {}
            self._send(reader, _record(sequence, begun, told, waits=waits).pack())
            if not waits:
                writer.close()
                del self._begun[reader, sequence]
                self._send(reader, begun.end.pack())

        if found is None:
            writer.finish(lambda: tell(waits=False))
            return
        begun.last = found[0], found[1][0][0]["name"]
        known = {about["key"]: value for about, value in found[1] if about["key"] in MARKS}
        if known:
            begun.marks[begun.last[1]] = [int(known[key]) if key in known else -1 for key in MARKS]
        writer.put(found[1], lambda: tell(waits=True))

    def _give_up(self, reader: Peer, sequence: int, why: str) -> None:
        """Send the end of a snapshot of which not all was sent, and why; remove its files."""
        begun = self._begun.pop((reader, sequence))
        if begun.writer is not None:
            begun.writer.drop()
        self._send(reader, replace(begun.end, given_up=why).pack())

    def tick(self, now: float) -> None:
        """Give up snapshots whose readers have not read on for `READER_SECONDS`; `now`: seconds that do not go back."""
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


def _record(sequence: int, begun: _Begun, told: Mapping[str, Any], *, waits: bool) -> StateTensor:
    """Return the record that stands for a piece that was written, and tells of files that were."""
    chunk, name = begun.last
    begun.written += 1
    about = {"name": name, "key": WRITTEN, "plain": False}
    about |= {"start": begun.written, "stop": begun.written + 1}
    value = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    return StateTensor(sequence, chunk, **state_fields(about, value), waits=waits)


def _messages(sequence: int, chunk: int, piece: Records) -> list[StateTensor]:
    """Return a piece as messages, of which the last one waits for a READ_ON."""
    last = len(piece) - 1
    return [
        StateTensor(sequence, chunk, **state_fields(about, value), waits=at == last)
        for at, (about, value) in enumerate(piece)
    ]
