"""The parameter server's worker side: push each chunk to the server that holds it, take weights back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from steepest.comm.message import WHOLE, Kind, Message, Peer, Send, relay_peer, server_peer
from steepest.comm.precision import WIRE_DTYPES, narrow, narrow_size
from steepest.comm.shared import allocate
from steepest.config import ParameterServerStrategy, SimpleStrategy, StrategyConfig
from steepest.hosts import Hosts
from steepest.model import ParameterLayout
from steepest.optimizer import OptimizerSpec
from steepest.rules import CommitAll, CommitEach, CommitFirst, CommitRule
from steepest.weights import ArrivingWeights


class PushPull:
    """An `Exchange` with servers: pushes gradients chunk by chunk, receives weights in place.

    Args:
        hosts: where everybody runs; who has a relay pushes to servers of other hosts through it.
        adopt: told where weights lie that all workers of this host share; whether the models use them from there.
        own: the server of the worker's own process, if it has one: what they exchange does not count as bytes moved.
    """

    def __init__(
        self,
        worker: int,
        layout: ParameterLayout,
        owners: Sequence[int],
        weights: torch.Tensor,
        send: Send,
        hosts: Hosts,
        wire_dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
        adopt: Callable[[torch.Tensor], bool] = lambda weights: False,
        own: int | None = None,
    ) -> None:
        self.bytes_pushed = self.bytes_pulled = 0
        self._own = None if own is None else server_peer(own)
        self._layout = layout
        self._send = send
        self._adopt = adopt
        relay = hosts.relay_of(worker)
        self._targets = [
            relay_peer(relay) if relay is not None and not hosts.beside(worker, owner) else server_peer(owner)
            for owner in owners
        ]
        self._push_dtype = wire_dtypes[0]
        self._narrows = [
            target.role == "server" and not hosts.beside(worker, owner)
            for target, owner in zip(self._targets, owners, strict=True)
        ]
        self._narrow: torch.Tensor | None = None  # of half the size: the gradient as it travels
        self.sequence = 0
        self._generation = self._incarnation = 0
        self._version = 0
        self._weights = ArrivingWeights(f"worker {worker}", layout, weights, wire_dtypes[1])

    def begin(self, generation: int, version: int, incarnation: int) -> None:
        """A step starts."""
        self._incarnation = incarnation
        self._generation, self._version = generation, version
        self.sequence += 1
        self.bytes_pushed = 0

    def ready(self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]) -> None:
        """Pushes one chunk."""
        message = Message(Kind.PUSH, self._generation, self._incarnation, self.sequence, self._version, chunk)
        message.weight, message.total = unit, total
        if absent:
            message.meta = {"absent": sorted(absent)}
        if unit:
            message.payload = self._as_pushed(chunk, payload)
            if self._targets[chunk] != self._own:
                self.bytes_pushed += message.payload.numel()
        self._send(self._targets[chunk], message)

    def _as_pushed(self, index: int, payload: torch.Tensor) -> torch.Tensor:
        chunk, wire = self._layout.chunks[index], self._push_dtype
        size = narrow_size(chunk.dtype, chunk.nbytes, wire) if self._narrows[index] else None
        if size is None or wire is None:
            return payload
        if self._narrow is None:
            self._narrow = allocate(self._layout.nbytes // 2)
        place = self._narrow[chunk.start // 2 : chunk.start // 2 + size]
        return place if narrow(payload, wire, place) else payload

    def end(self) -> int:
        """The whole gradient is out."""
        return self.sequence

    @property
    def arriving(self) -> tuple[int, int]:
        """The newest version of which any weights are here."""
        return self._weights.newest

    def has(self, entry: int | None, key: tuple[int, int]) -> bool:
        """Whether a parameter (all of them, with None) is here at that version."""
        return self._weights.has(entry, key)

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Weights are received where the model sees them."""
        if message.kind is Kind.WEIGHTS and message.chunk == WHOLE and size == self._layout.nbytes:
            return message.payload  # only of use where it lies
        return self._weights.destination(message, size)

    def receive(self, source: Peer, message: Message) -> tuple[int, int] | None:
        """Waits for all chunks of a version."""
        if message.kind is Kind.WEIGHTS and message.chunk == WHOLE:
            if message.payload is not None and self._adopt(message.payload):
                self._weights.vector = message.payload
            return None
        key = (message.generation, message.version)
        if not self._weights.receive(message):
            return None
        if source != self._own and message.payload is not None:
            self.bytes_pulled += message.payload.numel()
        return key if self._weights.completed(key) else None


class ServerStrategy:
    """All modes of the parameter server, which differ by their rule; and `simple`, with the driver as server."""

    in_workers = False
    in_place = True
    updates = 1

    def __init__(self, config: StrategyConfig) -> None:
        self.rule: CommitRule = CommitAll()
        self.hierarchical = True
        self.in_driver = isinstance(config, SimpleStrategy)
        self.chunk_bytes: int | None = 1 << 62
        self.nonfinite = "refuse"
        self.clip_norm = config.clip_norm
        self.scale_rate = False
        self.wire_dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
        self._num_servers: int | None = 1
        if not isinstance(config, SimpleStrategy):
            self.chunk_bytes = config.chunk_bytes
            self.nonfinite = config.nonfinite
            push, pull = (None if name is None else WIRE_DTYPES[name] for name in config.wire_dtypes)
            self.wire_dtypes = (push, pull)
        if isinstance(config, ParameterServerStrategy):
            self.rule = _rule(config)
            self.scale_rate = config.correction == "learning_rate"
            self._num_servers = config.num_servers

    def server_spec(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The user's own."""
        return spec

    def num_servers(self, nodes: int, workers: int) -> int:
        """As configured, or one for each node."""
        return self._num_servers or nodes

    def exchange(
        self,
        worker: int,
        layout: ParameterLayout,
        owners: Sequence[int],
        weights: torch.Tensor,
        send: Send,
        hosts: Hosts,
        adopt: Callable[[torch.Tensor], bool] = lambda weights: False,
        *,
        alone: bool = False,
    ) -> PushPull:
        """A worker's end."""
        wire_dtypes = (None, None) if alone else self.wire_dtypes
        own = worker if self.in_workers else None
        return PushPull(worker, layout, owners, weights, send, hosts, wire_dtypes, adopt, own)


def _rule(config: ParameterServerStrategy) -> CommitRule:
    if config.mode == "sync":
        return CommitFirst(config.backup_workers) if config.backup_workers else CommitAll()
    if config.mode == "ssp":
        return CommitEach(lead=config.lead)
    return CommitEach(drop_above=config.staleness)
