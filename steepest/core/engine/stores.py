"""How servers hold the parts of models that are not in the flat vector: `Stores`, with messages of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch

from steepest.core.engine.chunk_store import GradientStore, HeldChunk
from steepest.core.messages.message import Message, MessageKind, Peer, Send
from steepest.core.messages.permissions import Line
from steepest.core.messages.schema import Body
from steepest.core.messages.snapshots import Snapshot, SnapshotEnd
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.status import Status
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import Chunk, ParameterLayout

#: The generation and version at which a server is.
Position = tuple[int, int]


class StoreService(Protocol):
    """One server's work on its opaque chunks besides staging and committing.

    Used on the thread of the server's router, as the stores are.
    """

    kinds: Collection[MessageKind]  # of the messages that it takes, which the server does not know

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return the memory for the payload of a message of `kinds`, see `Role.destination`."""

    def handle(self, source: Peer, message: Message, at: Position) -> None:
        """Act on a message of `kinds` while the server is at a position; ProtocolError: it is refused."""

    def reached(self, at: Position) -> None:
        """Answer the requests that waited for this position; called after each commit and at each new generation."""

    def read(self, order: Snapshot, stores: Sequence[HeldChunk], end: SnapshotEnd) -> None:
        """Send a snapshot's reader the state of some stores as it is now, at once or in pieces, and then `end`."""

    def lost(self, peer: Peer) -> None:
        """Forget the requests of a lost peer."""

    def doing(self) -> Status:
        """Return what keeps the server from its messages; any thread may call this."""

    def tick(self, now: float) -> None:
        """Act on the passing of time, in seconds on a monotonic clock; called now and then."""


class Stores(Protocol):
    """Makes the stores of a job's opaque chunks, the same in all processes."""

    @property
    def keeps_time(self) -> bool:
        """Whether stores need the time of commits, see `GradientStore.note_time`."""

    def prepare(self) -> None:
        """Do slow preparations, such as compilation, before a process joins the job."""

    def make(self, chunk: Chunk) -> HeldChunk:
        """Return the state of an opaque chunk of the job's layout, as it is before the first step."""

    def take(self, states: Sequence[HeldChunk], spec: OptimizerSpec | None) -> GradientStore:
        """Return what takes the gradients of opaque chunks that are pushed together.

        Args:
            states: of the chunks, as `make` returned them.
            spec: the optimizer of the dense parameters; None to add pushes to the weights.
        """

    def serve(self, server: int, stores: Mapping[int, HeldChunk], send: Send) -> StoreService:
        """Return the service of one server.

        Args:
            server: its index.
            stores: all that it holds, dense ones too, by index of the chunk.
            send: sends as the server.
        """


class OpaqueParts(Protocol):
    """The parts of models that are not in the flat vector, and that the layout's opaque chunks stand for.

    `Extension.opaque` returns it for a model; it is the same in all workers, and hashable.
    """

    @property
    def lines(self) -> Mapping[Line, type[Body]]:
        """The schemas of its messages, which the engine does not know, by sender and receiver."""

    def require(self, strategy: Strategy, spec: OptimizerSpec) -> None:
        """Check that a strategy and an optimizer can train it; ConfigurationError otherwise.

        Args:
            strategy: of the job.
            spec: the optimizer of the dense parameters.
        """

    def difference(self, other: OpaqueParts) -> str | None:
        """Return in words how another replica's parts differ from these, or None if they agree."""

    def keeps_state(self, strategy: Strategy) -> bool:
        """Return whether workers keep state of it that no server holds."""

    def stores(self, layout: ParameterLayout, seed: int) -> Stores:
        """Return the maker of the stores of a job with a layout and a seed."""
