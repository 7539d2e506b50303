"""How servers hold what a job's models have beside the flat vector: `Stores`, and messages of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from steepest.core.engine.chunk_store import ChunkStore
from steepest.core.messages.fields import Schema
from steepest.core.messages.message import Message, MessageKind, Peer, Send
from steepest.core.messages.permissions import Line
from steepest.core.messages.snapshots import Snapshot, SnapshotEnd
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.status import Status
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import Chunk, ParameterLayout

#: The generation and version at which a server is.
Position = tuple[int, int]


class StoreService(Protocol):
    """What one server does about its opaque chunks beside staging and committing.

    Used on the thread of the server's router, as the stores are.
    """

    kinds: Collection[MessageKind]  # of the messages that it takes, which the server does not know

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return the memory for the payload of such a message, see `Role.destination`."""

    def handle(self, source: Peer, message: Message, at: Position) -> None:
        """Act on such a message while the server is at a position; ProtocolError: it is refused."""

    def reached(self, at: Position) -> None:
        """Answer what has waited for this position; called after each commit and at each new generation."""

    def read(self, order: Snapshot, stores: Sequence[ChunkStore], end: SnapshotEnd) -> None:
        """Send a snapshot's reader the state of some stores as it is now, at once or in pieces, and then `end`."""

    def lost(self, peer: Peer) -> None:
        """Forget what a lost peer has asked for."""

    def doing(self) -> Status:
        """Return what keeps the server from its messages; any thread may ask."""

    def tick(self, now: float) -> None:
        """Look at the time, in seconds that do not go back; called now and then."""


class Stores(Protocol):
    """Makes the stores of a job's opaque chunks, the same in all processes."""

    @property
    def keeps_time(self) -> bool:
        """Whether stores need the time of commits, see `ChunkStore.note_time`."""

    def prepare(self) -> None:
        """Do what takes long, such as compilation, before a process joins the job."""

    def make(self, chunk: Chunk, spec: OptimizerSpec | None) -> ChunkStore:
        """Return the store of an opaque chunk, as it is before the first step.

        Args:
            chunk: of the job's layout.
            spec: the optimizer of the dense parameters; None where pushes are added.
        """

    def serve(self, server: int, stores: Mapping[int, ChunkStore], send: Send) -> StoreService:
        """Return what answers messages for one server.

        Args:
            server: its index.
            stores: that it holds, by index of the chunk, dense ones among them.
            send: sends as the server.
        """


class OpaqueParts(Protocol):
    """What models have beside the parameters of the flat vector, for which the opaque chunks of their layout stand.

    `Extension.opaque` finds it in a model; it is the same in all workers, and hashable.
    """

    @property
    def lines(self) -> Mapping[Line, Schema]:
        """The messages about it, which the engine does not know, by who may send them to whom."""

    def require(self, strategy: Strategy, spec: OptimizerSpec) -> None:
        """Check that it can be trained so; ConfigurationError otherwise.

        Args:
            strategy: of the job.
            spec: the optimizer of the dense parameters.
        """

    def difference(self, other: OpaqueParts) -> str | None:
        """Return in words how that of another replica differs from this, or None when they agree."""

    def keeps_state(self, strategy: Strategy) -> bool:
        """Return whether workers keep some of it that no server holds."""

    def stores(self, layout: ParameterLayout, seed: int) -> Stores:
        """Return what makes the stores of a job with a layout and a seed."""
