"""The parameter server's worker side: push each chunk to the server that holds it, take weights back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from steepest.compression.codecs import Packer, Packing, make_packing
from steepest.config.compression import PowerSGD
from steepest.config.strategies import ParameterServerStrategy, SimpleStrategy, StrategyConfig
from steepest.engine.incoming_weights import ArrivingWeights
from steepest.engine.topology import Hosts
from steepest.messages.message import WHOLE, Kind, Message, Peer, Send, relay_peer, server_peer
from steepest.optim.spec import OptimizerSpec
from steepest.protocol.commit_rules import CommitAll, CommitEach, CommitFirst, CommitRule
from steepest.tensors.half_precision import WIRE_DTYPES
from steepest.tensors.layout import Cut, ParameterLayout


class PushPull:
    """An `Exchange` with servers: pushes gradients chunk by chunk, receives weights in place.

    Args:
        holders: the servers of each chunk, which all get what is pushed.
        hosts: where everybody runs; who has a relay pushes to servers of other hosts through it.
        adopt: told where weights lie that all workers of this host share; whether the models use them from there.
        own: the server of the worker's own process, if it has one: what they exchange does not count as bytes moved.
    """

    def __init__(
        self,
        worker: int,
        layout: ParameterLayout,
        holders: Sequence[Sequence[int]],
        weights: torch.Tensor,
        send: Send,
        hosts: Hosts,
        wire_formats: tuple[Packing | None, torch.dtype | None] = (None, None),
        adopt: Callable[[torch.Tensor], bool] = lambda weights: False,
        own: int | None = None,
    ) -> None:
        self.bytes_pushed = self.bytes_pulled = 0
        self._own = None if own is None else server_peer(own)
        self._layout = layout
        self._send = send
        self._adopt = adopt
        packing, pull_dtype = wire_formats
        relay = hosts.relay_of(worker) if packing is None or not packing.lossy else None  # each packs its own
        self._targets = [
            [
                relay_peer(relay) if relay is not None and not hosts.beside(worker, server) else server_peer(server)
                for server in servers
            ]
            for servers in holders
        ]
        packed = [  # the same for all of them, so that copies stay alike
            any(t.role == "server" and not hosts.beside(worker, s) for t, s in zip(targets, servers, strict=True))
            for targets, servers in zip(self._targets, holders, strict=True)
        ]
        self.packer = Packer(layout, packing, packed)
        self.sequence = 0
        self._generation = self._incarnation = 0
        self._version = 0
        self._weights = ArrivingWeights(f"worker {worker}", layout, weights, pull_dtype)

    def begin(self, generation: int, version: int, incarnation: int) -> None:
        """A step starts."""
        self._incarnation = incarnation
        self._generation, self._version = generation, version
        self.sequence += 1
        self.bytes_pushed = 0
        self.packer.begin()

    def ready(self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]) -> None:
        """Pushes one chunk."""
        pushed = self.packer.pack(chunk, payload, unit, total, absent) if unit else None
        for target in self._targets[chunk]:
            message = Message(Kind.PUSH, self._generation, self._incarnation, self.sequence, self._version, chunk)
            message.weight, message.total = unit, total
            if absent:
                message.meta = {"absent": sorted(absent)}
            message.payload = pushed
            if pushed is not None and target != self._own:
                self.bytes_pushed += pushed.numel()
            self._send(target, message)

    def end(self) -> int:
        """The whole gradient is out."""
        return self.sequence

    def committed(self, sequence: int) -> None:
        """If it is the last one, what it left out counts from now on."""
        if sequence == self.sequence:
            self.packer.commit()

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
        if self._answers(message):
            self.packer.commit()
        if source != self._own and message.payload is not None:
            self.bytes_pulled += message.payload.numel()
        return key if self._weights.completed(key) else None

    def _answers(self, message: Message) -> bool:
        """Whether weights are of the version that the last push is part of."""
        newer = message.generation == self._generation and message.version > self._version
        return newer and not message.values().get("reload")


class ServerStrategy:
    """All modes of the parameter server, which differ by their rule; and `simple`, with the driver as server."""

    in_workers = False
    replication = 1
    in_place = True
    updates = 1

    def __init__(self, config: StrategyConfig) -> None:
        self.rule: CommitRule = CommitAll()
        self.hierarchical = True
        self.in_driver = isinstance(config, SimpleStrategy)
        self.cut = Cut(1 << 62)
        self.nonfinite = "refuse"
        self.clip_norm = config.clip_norm
        self.scale_rate = False
        self.wire_formats: tuple[Packing | None, torch.dtype | None] = (None, None)
        self._num_servers: int | None = 1
        if not isinstance(config, SimpleStrategy):
            self.cut = Cut(config.chunk_bytes, whole=isinstance(config.push_format, PowerSGD))
            self.nonfinite = config.nonfinite
            pull = config.pull_format
            self.wire_formats = (make_packing(config.push_format), None if pull is None else WIRE_DTYPES[pull])
        if isinstance(config, ParameterServerStrategy):
            self.rule = _rule(config)
            self.scale_rate = config.correction == "learning_rate"
            self._num_servers = config.num_servers
            self.replication = config.replication

    def server_spec(self, spec: OptimizerSpec) -> OptimizerSpec:
        """The user's own."""
        return spec

    def num_servers(self, nodes: int, workers: int) -> int:
        """As configured, or one for each node, and as many as hold a chunk."""
        return self._num_servers or max(nodes, self.replication if workers > 1 else 1)

    def exchange(
        self,
        worker: int,
        layout: ParameterLayout,
        holders: Sequence[Sequence[int]],
        weights: torch.Tensor,
        send: Send,
        hosts: Hosts,
        adopt: Callable[[torch.Tensor], bool] = lambda weights: False,
        *,
        alone: bool = False,
    ) -> PushPull:
        """A worker's end."""
        wire_formats = (None, None) if alone else self.wire_formats
        own = worker if self.in_workers else None
        return PushPull(worker, layout, holders, weights, send, hosts, wire_formats, adopt, own)


def _rule(config: ParameterServerStrategy) -> CommitRule:
    if config.mode == "sync":
        return CommitFirst(config.backup_workers) if config.backup_workers else CommitAll()
    if config.mode == "ssp":
        return CommitEach(lead=config.lead)
    return CommitEach(drop_above=config.staleness)
