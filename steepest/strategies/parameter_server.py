"""The parameter server's worker side: push each chunk to the server that holds it, take weights back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steepest.comm.message import Kind, Message, Peer, Send, server_peer
from steepest.comm.precision import WIRE_DTYPES, narrow, narrow_size
from steepest.comm.shared import allocate
from steepest.config import ParameterServerStrategy, SimpleStrategy, StrategyConfig
from steepest.errors import ProtocolError
from steepest.model import ParameterLayout
from steepest.rules import CommitAll, CommitEach, CommitFirst, CommitRule


class PushPull:
    """An `Exchange` with servers: pushes gradients chunk by chunk, receives weights in place."""

    def __init__(
        self,
        worker: int,
        layout: ParameterLayout,
        owners: Sequence[int],
        weights: torch.Tensor,
        send: Send,
        wire_dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None),
    ) -> None:
        self.bytes_pushed = 0
        self._worker = worker
        self._layout = layout
        self._owners = [server_peer(owner) for owner in owners]
        self._weights = weights
        self._send = send
        self._push_dtype, self._pull_dtype = wire_dtypes
        self._narrow: torch.Tensor | None = None  # of half the size: the gradient as it travels
        self._sequence = 0
        self._generation = self._incarnation = 0
        self._version = 0
        self._newest = [(-1, -1)] * len(layout.chunks)  # (generation, version) of each chunk's weights
        self._all = frozenset(range(len(layout.chunks)))
        self._trainable = frozenset(chunk.index for chunk in layout.chunks if chunk.trainable)
        self._awaited: dict[tuple[int, int], set[int]] = {}  # (generation, version) -> chunks still to come

    def begin(self, generation: int, version: int, incarnation: int) -> None:
        """A step starts."""
        self._incarnation = incarnation
        self._generation, self._version = generation, version
        self._sequence += 1
        self.bytes_pushed = 0

    def ready(self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]) -> None:
        """Pushes one chunk."""
        message = Message(Kind.PUSH, self._generation, self._incarnation, self._sequence, self._version, chunk)
        message.weight, message.total = unit, total
        if absent:
            message.meta = {"absent": sorted(absent)}
        if unit:
            message.payload = self._as_pushed(chunk, payload)
            self.bytes_pushed += message.payload.numel()
        self._send(self._owners[chunk], message)

    def _as_pushed(self, index: int, payload: torch.Tensor) -> torch.Tensor:
        chunk, wire = self._layout.chunks[index], self._push_dtype
        if wire is None or (size := narrow_size(chunk.dtype, chunk.nbytes, wire)) is None:
            return payload
        if self._narrow is None:
            self._narrow = allocate(self._layout.nbytes // 2)
        place = self._narrow[chunk.start // 2 : chunk.start // 2 + size]
        return place if narrow(payload, wire, place) else payload

    def end(self) -> int:
        """The whole gradient is out."""
        return self._sequence

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Weights are received where the model sees them."""
        if message.kind is not Kind.WEIGHTS or not 0 <= message.chunk < len(self._layout.chunks):
            raise ProtocolError(f"worker {self._worker} takes no payload of {message.kind.name}")
        view = self._layout.chunk_view(self._weights, message.chunk)
        is_new = (message.generation, message.version) > self._newest[message.chunk]
        if size == narrow_size(self._layout.chunks[message.chunk].dtype, view.numel(), self._pull_dtype):
            if not is_new:
                return None
            return message.payload if message.payload is not None else torch.empty(size, dtype=torch.uint8)
        if view.numel() != size:
            raise ProtocolError(f"chunk {message.chunk} has {view.numel()} bytes, {size} arrive")
        return view if is_new else None

    def receive(self, source: Peer, message: Message) -> tuple[int, int] | None:
        """Waits for all chunks of a version."""
        if message.kind is not Kind.WEIGHTS:
            raise ProtocolError(f"worker {self._worker} does not take {message.kind.name}")
        payload = message.payload
        key = (message.generation, message.version)
        if payload is None or key <= self._newest[message.chunk]:
            return None  # old, or a copy
        self._newest[message.chunk] = key
        view = self._layout.chunk_view(self._weights, message.chunk)
        if payload.numel() != view.numel():
            assert self._pull_dtype is not None
            view.view(torch.float32).copy_(payload.view(self._pull_dtype))
        elif payload.data_ptr() != view.data_ptr():
            view.copy_(payload)
        if key not in self._awaited:
            everything = bool(message.values().get("reload"))  # frozen chunks too
            self._awaited[key] = set(self._all if everything else self._trainable)
        self._awaited[key].discard(message.chunk)
        if self._awaited[key]:
            return None
        self._awaited = {later: left for later, left in self._awaited.items() if later > key}
        return key


class ServerStrategy:
    """All modes of the parameter server, which differ by their rule; and `simple`, with the driver as server."""

    def __init__(self, config: StrategyConfig) -> None:
        self.rule: CommitRule = CommitAll()
        self.in_driver = isinstance(config, SimpleStrategy)
        self.chunk_bytes: int | None = 1 << 62
        self.nonfinite = "refuse"
        self.scale_rate = False
        self.wire_dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
        self._num_servers: int | None = 1
        if isinstance(config, ParameterServerStrategy):
            self.rule = _rule(config)
            self.chunk_bytes = config.chunk_bytes
            self.nonfinite = config.nonfinite
            self.scale_rate = config.correction == "learning_rate"
            self._num_servers = config.num_servers
            push, pull = (None if name is None else WIRE_DTYPES[name] for name in config.wire_dtypes)
            self.wire_dtypes = (push, pull)

    def num_servers(self, nodes: int) -> int:
        """As configured, or one for each node."""
        return self._num_servers or nodes

    def exchange(
        self,
        worker: int,
        layout: ParameterLayout,
        owners: Sequence[int],
        weights: torch.Tensor,
        send: Send,
        *,
        alone: bool = False,
    ) -> PushPull:
        """A worker's end."""
        return PushPull(worker, layout, owners, weights, send, (None, None) if alone else self.wire_dtypes)


def _rule(config: ParameterServerStrategy) -> CommitRule:
    if config.mode == "sync":
        return CommitFirst(config.backup_workers) if config.backup_workers else CommitAll()
    if config.mode == "ssp":
        return CommitEach(lead=config.lead)
    return CommitEach(drop_above=config.staleness)
