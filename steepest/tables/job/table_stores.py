"""How servers hold embedding tables: `TableStores`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from steepest.core.engine.chunk_store import GradientStore, HeldChunk
from steepest.core.engine.incoming_weights import where_lent
from steepest.core.engine.stores import Position
from steepest.core.messages.message import Kind, Message, MessageKind, Peer, Send
from steepest.core.messages.snapshots import ReadOn, Snapshot, SnapshotEnd
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.status import Status
from steepest.core.tensors.layout import Chunk
from steepest.errors import ProtocolError
from steepest.tables.files.row_files import OnRouter, RowFiles
from steepest.tables.job.pushed_rows import RowGradientStore
from steepest.tables.job.restored_shards import RestoredShards
from steepest.tables.job.row_messages import RowKind
from steepest.tables.job.row_pulls import RowPulls
from steepest.tables.job.row_snapshots import RowSnapshots
from steepest.tables.job.slow_disks import SlowDisks
from steepest.tables.job.table_chunk import TableChunk
from steepest.tables.rows.compilation import compile_kernels
from steepest.tables.rows.dealing import Dealing


@dataclass(frozen=True)
class TableStores:
    """Makes a `TableChunk` for each opaque chunk of a job, see `steepest.core.engine.stores.Stores`.

    Attributes:
        dealing: of the job's tables into chunks.
    """

    dealing: Dealing

    @property
    def keeps_time(self) -> bool:
        """Whether a table's rows have a time to live."""
        return any(table.life for table in self.dealing.tables)

    def prepare(self) -> None:
        """Compile what rows need."""
        compile_kernels(self.dealing.tables)

    def make(self, chunk: Chunk) -> TableChunk:
        """Return a shard without rows."""
        return TableChunk(chunk, self.dealing)

    def take(self, states: Sequence[HeldChunk], spec: OptimizerSpec | None) -> GradientStore:
        """Return the store of the gradients of shards, whose tables may follow a learning rate of `spec`."""
        groups = [] if spec is None else spec.groups
        rates = [hyper.get("lr", math.nan) for _, hyper in groups]
        return RowGradientStore([*_shards(states).values()], self.dealing, rates)

    def serve(self, server: int, stores: Mapping[int, HeldChunk], send: Send) -> TableService:
        """Return the service that answers pulls, and sends rows of snapshots, for one server."""
        return TableService(server, self.dealing, stores, send)


class TableService:
    """The messages about rows on one server, see `steepest.core.engine.stores.StoreService`."""

    kinds: Collection[MessageKind] = frozenset({RowKind.PULL_ROWS, Kind.READ_ON})

    def __init__(
        self, server: int, dealing: Dealing, stores: Mapping[int, HeldChunk], send: Send
    ) -> None:
        shards = _shards(stores.values())
        self._pulls = RowPulls(server, dealing, shards, send)
        self._disks = SlowDisks(server, shards, self._pulls)
        self._snapshots = RowSnapshots(send, server)
        self._shards = shards
        self._files: RowFiles | None = None

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return memory for the keys of a pull, lent or new."""
        if message.kind is not RowKind.PULL_ROWS:
            raise ProtocolError(f"{message.kind.name} with a payload of {size} bytes")
        return where_lent(message, size)

    def handle(self, source: Peer, message: Message, at: Position) -> None:
        """Answer a pull, or send a reader more of a snapshot."""
        if message.kind is RowKind.PULL_ROWS:
            self._pulls.receive(source, message.body, message.payload, at)
        else:
            read_on: ReadOn = message.body
            self._snapshots.go_on(source, read_on.sequence, read_on.options)

    def reached(self, at: Position) -> None:
        """Answer the pulls that have waited for this position."""
        self._disks.look()
        self._pulls.answer(at)

    def read(self, order: Snapshot, stores: Sequence[HeldChunk], end: SnapshotEnd) -> None:
        """Send the first rows of some shards; the others as their reader reads on."""
        shards = _shards(stores)
        self._snapshots.begin(order, [*shards.values()], end, self._files)

    def use_rows(self, rows: RestoredShards, call: OnRouter | None) -> None:
        """Keep snapshots of rows in files of this process, take shards that it makes; `call` answers behind disks."""
        self._files, self._pulls.call, self._snapshots.call = rows.files, call, call
        self._snapshots.may_write = True
        for held in self._shards.values():
            held.made = rows

    def lost(self, peer: Peer) -> None:
        """Forget the pulls and the snapshots of a lost peer."""
        self._pulls.lost(peer)
        self._snapshots.lost(peer)

    def doing(self) -> Status:
        """Return which disk is being waited for."""
        return self._disks.doing()

    def tick(self, now: float) -> None:
        """Give up the snapshots of readers that do not read on."""
        self._snapshots.tick(now)


def _shards(stores: Collection[HeldChunk]) -> dict[int, TableChunk]:
    """Return the stores that are shards of tables, by index of the chunk."""
    return {held.chunk.index: held for held in stores if isinstance(held, TableChunk)}
