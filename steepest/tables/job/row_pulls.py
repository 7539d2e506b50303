"""A server's answers to workers that pull rows of embedding tables."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from steepest.core.engine.incoming_weights import Key
from steepest.core.messages.message import Peer, Send
from steepest.core.system import system
from steepest.errors import ConfigurationError, ProtocolError, ResourcesError
from steepest.tables.files.row_files import OnRouter
from steepest.tables.job.row_messages import ROW_MEMORY, PullRows, Rows
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows.checks import require_keys
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.gradients import aligned, unpack_keys
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.row_formats import RowFormat

_MOST_WAITING = 64  # pulls of one worker


class _PulledLookUp(NamedTuple):
    """The rows of one look-up in a pull."""

    group: int  # of tables
    training: bool
    tables: Int32s  # (n,), their numbers
    ids: Int64s
    parts: list[
        tuple[TableChunk, slice]
    ]  # shards of the group with some of them, and which of them
    form: RowFormat  # of the group


class _WantedRows(NamedTuple):
    """The rows that a pull asks for."""

    pull: PullRows
    lookups: list[_PulledLookUp]


@dataclass(eq=False)
class _ReadAhead:
    """A pull whose rows a disk is reading."""

    source: Peer
    wanted: _WantedRows
    chunk: int  # the first shard with some of the rows
    since: float
    left: int  # reads that have not ended

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def has_ended(self) -> bool:
        """Note that a read ended; return whether all have."""
        with self.lock:
            self.left -= 1
            return not self.left


class RowPulls:
    """The pulls of rows at one server, of which those of a version to come wait for it.

    Where `call` is set, a pull with many rows on disk waits until the system has them in its cache, and pulls that come
    after it are answered meanwhile.

    Attributes:
        call: has a function run on the server's thread; None where no other thread may read.
        seconds: by chunk, the seconds for which such pulls have waited.
    """

    def __init__(
        self,
        server: int,  # its index, for errors
        tables: Dealing,
        shards: Mapping[int, TableChunk],  # that the server holds, by index of the chunk
        send: Send,  # sends as the server
    ) -> None:
        self._server = server
        self._tables = tables
        self._on_disk = {
            number for number, group in enumerate(tables.groups) if group[0].directory is not None
        }
        self._forms = [group[0].form for group in tables.groups]
        self._shards = shards
        self._send = send
        self._waiting: list[tuple[Peer, _WantedRows]] = []
        self.call: OnRouter | None = None
        self.seconds: dict[int, float] = {}
        self._reading: list[_ReadAhead] = []
        self._at: Key = (0, 0)

    def receive(self, source: Peer, pull: PullRows, payload: torch.Tensor | None, at: Key) -> None:
        """Answer a worker's pull, or keep it until its version is here; one of an old generation is dropped.

        Raises:
            ProtocolError: it asks for rows that this server does not hold, or the worker has asked too
                often.
        """
        self._at = at
        if pull.generation >= at[0]:
            self._answer_in_time(source, self._checked(pull, payload), at)

    def answer(self, at: Key) -> None:
        """Answer the pulls that waited for the present version."""
        self._at = at
        waiting, self._waiting = self._waiting, []
        for source, wanted in waiting:
            if wanted.pull.generation >= at[0]:
                self._answer_in_time(source, wanted, at)

    def lost(self, peer: Peer) -> None:
        """Forget the pulls of a peer that is lost."""
        self._waiting = [(source, wanted) for source, wanted in self._waiting if source != peer]
        self._reading = [reading for reading in self._reading if reading.source != peer]

    @property
    def oldest(self) -> tuple[int, float] | None:
        """The chunk whose rows a disk has been reading for longest, and when it began."""
        readings = list(self._reading)  # another thread may ask
        return min(
            ((each.chunk, each.since) for each in readings), key=lambda of: of[1], default=None
        )

    def _read_ahead(self, source: Peer, wanted: _WantedRows) -> bool:
        """Begin to read the rows of a pull that are on disk; return whether it is answered when they are there."""
        if (call := self.call) is None or not self._on_disk:
            return False
        reads: list[Future[int]] = []
        chunk = -1
        for of in wanted.lookups:
            for shard, part in of.parts if of.group in self._on_disk else ():
                begun = shard.rows.read_ahead(of.tables[part], of.ids[part])
                chunk = shard.chunk.index if begun and not reads else chunk
                reads += begun
        if not reads:
            return False
        reading = _ReadAhead(source, wanted, chunk, system().now(), len(reads))
        self._reading.append(reading)

        def ended(_: Future[int]) -> None:
            if reading.has_ended():
                call(lambda: self._answer_read(reading))

        for read in reads:
            read.add_done_callback(ended)
        return True

    def _answer_read(self, reading: _ReadAhead) -> None:
        """Answer a pull whose rows are in the system's cache, unless its generation is over."""
        if reading not in self._reading:
            return
        self._reading.remove(reading)
        waited = system().now() - reading.since
        self.seconds[reading.chunk] = self.seconds.get(reading.chunk, 0.0) + waited
        if reading.wanted.pull.generation >= self._at[0]:
            self._answer(reading.source, reading.wanted, self._at)

    def _answer_in_time(self, source: Peer, wanted: _WantedRows, at: Key) -> None:
        """Answer a pull, or keep it."""
        pull = wanted.pull
        if (pull.generation, pull.version) <= at:
            if not self._read_ahead(source, wanted):
                self._answer(source, wanted, at)
            return
        if sum(peer == source for peer, _ in self._waiting) >= _MOST_WAITING:
            raise ProtocolError(f"{source} has {_MOST_WAITING} pulls of rows that wait")
        self._waiting.append((source, wanted))

    def _answer(self, source: Peer, wanted: _WantedRows, at: Key) -> None:
        generation, version = at
        refused, values = "", None
        try:
            values = self._values(wanted)
        except ConfigurationError as error:
            refused = str(error)
        except ResourcesError as error:
            refused = f"server {self._server}, {error}"
        answer = Rows(generation, wanted.pull.sequence, version, refused)
        self._send(source, answer.pack(values))

    def _checked(self, pull: PullRows, payload: torch.Tensor | None) -> _WantedRows:
        """Return the rows that a pull asks for; ProtocolError: this server does not hold them."""
        packed = np.empty(0, np.uint8) if payload is None else payload.numpy()
        try:
            tables, ids = unpack_keys(packed)
        except ConfigurationError as error:
            raise ProtocolError(f"a pull of rows: {error}") from error
        parts, begin = [], 0
        for group, count, training in pull.lookups:
            end = begin + count
            parts.append(self._checked_part(group, training, tables[begin:end], ids[begin:end]))
            begin = end
        if begin != len(ids):
            raise ProtocolError(f"a pull of {begin} rows with {len(ids)} keys")
        return _WantedRows(pull, parts)

    def _checked_part(
        self, group: int, training: bool, tables: Int32s, ids: Int64s
    ) -> _PulledLookUp:
        """Return the rows of one look-up; ProtocolError: this server does not hold them."""
        dealing = self._tables
        if group >= len(dealing.groups):
            raise ProtocolError(f"a pull from group {group} of tables, which is not there")
        try:
            tables, ids = require_keys(tables, ids, [table.name for table in dealing.groups[group]])
        except ConfigurationError as error:
            raise ProtocolError(f"a pull of rows: {error}") from error
        order, begins = dealing.deal(group, tables, ids)
        if order is not None:
            raise ProtocolError("a pull of rows that are not in the order of their shards")
        bounds: list[int] = begins.tolist()
        parts = []
        for shard, (begin, end) in enumerate(pairwise(bounds)):
            if begin < end:
                held = self._shards.get(dealing.chunk(group, shard))
                if held is None:
                    raise ProtocolError(
                        f"server {self._server} does not hold shard {shard} of tables"
                    )
                parts.append((held, slice(begin, end)))
        return _PulledLookUp(group, training, tables, ids, parts, self._forms[group])

    def _values(self, wanted: _WantedRows) -> torch.Tensor | None:
        """Return the rows of a pull, flat bytes, None of no rows."""
        # ConfigurationError or ResourcesError: no room, no memory.
        if not any(of.parts for of in wanted.lookups):
            return None
        sizes = [len(of.ids) * of.form.sent_bytes for of in wanted.lookups]
        packed = ROW_MEMORY.empty(sum(map(aligned, sizes)))
        begin = 0
        for of, size in zip(wanted.lookups, sizes, strict=True):
            values = packed[begin : begin + size].reshape(-1, of.form.sent_bytes)
            for shard, part in of.parts:
                shard.rows.pull_sent(
                    of.tables[part], of.ids[part], values[part], training=of.training
                )
            packed[begin + size : begin + aligned(size)] = 0
            begin += aligned(size)
        return torch.from_numpy(packed)
