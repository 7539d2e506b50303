"""A host's aggregator: its workers' gradients leave added up, and weights arrive once for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from steepest.compression.codecs import GradientCompressor, sum_of_squares
from steepest.engine.incoming_weights import ArrivingWeights, Key, where_lent
from steepest.engine.topology import Topology
from steepest.errors import ProtocolError
from steepest.messages.gradients import HostPush, Push, Weights, WeightsShared
from steepest.messages.message import Kind, Message, Peer, PushId, Send, server_peer, worker_peer


@dataclass(slots=True)
class _Gathering:
    """One chunk of a version: the pushes that are here, by worker."""

    pushes: dict[int, Push] = field(default_factory=dict)
    left: bool = False


class HostAggregator:
    """What the workers of one host share, where every member contributes to every version.

    It lives beside a server of the host. Chunks that servers of other hosts hold are pushed to it;
    it adds the workers' gradients up in the order of the workers and pushes the sum on. New weights
    come to it, each chunk once, and lie in one vector, which workers that can take as their own
    (`Replicas.adopt`); a server in the same process updates its chunks there in place. That is safe
    because nobody reads weights when all have reported: no version is committed before.

    Args:
        index: of the aggregator, and of the server beside which it lives.
        topology: of the job, of which it serves this host's workers.
        weights: the vector, uint8 and flat; zeros but for what a server of this process holds.
        send: how to send.
        own_pending: makes copies of what has not left yet before memory changes.
        checked: whether to look for NaN and infinity, so that the server can tell whose they are.
        shown: whether workers may use the vector as their own; not where what is sent of it is a
            copy.
    """

    def __init__(
        self,
        index: int,
        topology: Topology,
        weights: torch.Tensor,
        send: Send,
        own_pending: Callable[[torch.Tensor], None] = lambda memory: None,
        *,
        checked: bool = True,
        shown: bool = True,
    ) -> None:
        self._index = index
        self._can_be_shown = shown
        layout, (codec, pull_dtype) = topology.layout, topology.wire_formats
        self._layout = layout
        self._owners = [server_peer(servers[0]) for servers in topology.holders]
        self._workers = topology.hosts.aggregators[index]
        self._send = send
        self._own_pending = own_pending
        self._compressor = GradientCompressor(
            layout, codec, [True] * len(layout.chunks), own_pending
        )
        self._checked = checked
        self._weights = ArrivingWeights(f"aggregator {index}", layout, weights, pull_dtype)
        self._shown = -1  # the generation in which workers were last told where the weights lie
        self._step: Key = (-1, -1)
        self._gathering: dict[int, _Gathering] = {}  # by chunk, of that step
        self._sum = torch.empty(0, dtype=torch.uint8)

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Where an arriving payload goes: gradients stay where they are lent, weights come into the vector."""
        if message.kind is not Kind.PUSH:
            return self._weights.destination(message, size)
        if (
            not 0 <= message.chunk < len(self._owners)
            or size != self._layout.chunks[message.chunk].nbytes
        ):
            raise ProtocolError(
                f"a push of {size} bytes for chunk {message.chunk}, which has no such size"
            )
        if (message.generation, message.version) < self._step:
            return None
        return where_lent(message, size)

    def handle(self, source: Peer, message: Message) -> None:
        """Acts on one message."""
        if message.kind is Kind.PUSH:
            self._gather(source, Push.unpack(message))
        elif (weights := self._weights.receive(message)) is not None:
            self._pass_on(weights)

    def lost(self, peer: Peer, reason: str) -> None:
        """The coordinator decides what a loss means; what was gathered is void in the next generation."""

    def tick(self, now: float) -> None:
        """An aggregator has no deadlines of its own."""

    # -- weights -------------------------------------------------------------------------------

    def _pass_on(self, arrived: Weights) -> None:
        """Send the workers a chunk that has come, and first the vector in which it lies if they were not sent it."""
        if arrived.reload and self._can_be_shown and arrived.generation > self._shown:
            self._shown = arrived.generation
            shared = WeightsShared(arrived.generation, self._weights.vector)
            for worker in self._workers:
                self._send(worker_peer(worker), shared.pack())
        weights = replace(
            arrived,
            sequence=0,
            payload=self._layout.chunk_view(self._weights.vector, arrived.chunk),
        )
        for worker in self._workers:
            self._send(worker_peer(worker), weights.pack())

    # -- gradients -----------------------------------------------------------------------------

    def _gather(self, source: Peer, push: Push) -> None:
        if source.index not in self._workers:
            raise ProtocolError(
                f"worker {source.index} is not of the host of aggregator {self._index}"
            )
        step = (push.generation, push.pulled)
        if step < self._step:
            return  # of a step that is over
        if (
            push.pulled > max(self._weights.newest[1], 0) + 1
            and self._weights.newest[0] >= push.generation
        ):
            raise ProtocolError(
                f"a push from version {push.pulled}, of which no weights can have come"
            )
        if step > self._step:
            self._step = step
            self._gathering = {}
        gathering = self._gathering.setdefault(push.chunk, _Gathering())
        if gathering.left:
            return  # a copy
        gathering.pushes[source.index] = push
        if len(gathering.pushes) == len(self._workers):
            self._push_on(
                push.chunk, {worker: gathering.pushes[worker] for worker in self._workers}
            )
            self._gathering[push.chunk] = _Gathering(left=True)

    def _push_on(self, chunk: int, pushes: dict[int, Push]) -> None:
        """Push the sum of the gradients of a chunk on, or each by itself if the sum is not finite."""
        weighing = [push for push in pushes.values() if push.payload is not None and push.unit]
        unit = weighing[0].unit if weighing else 0.0
        payload = weighing[0].payload if weighing else None
        if len(weighing) > 1:
            payload = self._add_up(chunk, weighing)
        if payload is not None and self._checked and not self._is_finite(chunk, payload):
            for worker, push in pushes.items():
                self._leave(chunk, {worker: push}, push.payload, push.unit)
        else:
            self._leave(chunk, pushes, payload, unit)

    def _is_finite(self, chunk: int, payload: torch.Tensor) -> bool:
        return math.isfinite(sum_of_squares(payload.view(self._layout.chunks[chunk].dtype)))

    def _leave(
        self, chunk: int, pushes: dict[int, Push], payload: torch.Tensor | None, unit: float
    ) -> None:
        first = next(iter(pushes.values()))
        total = math.fsum(push.total for push in pushes.values())
        absent = [frozenset(push.absent) for push in pushes.values() if push.payload is not None]
        if payload is not None and len(pushes) > 1:
            payload = self._compressor.pack(chunk, payload, unit, total, frozenset())
        host_push = HostPush(
            *(first.generation, first.pulled, chunk, unit, total),
            tuple(
                PushId(worker, push.incarnation, push.sequence) for worker, push in pushes.items()
            ),
            sorted(frozenset.intersection(*absent)) if absent else (),
            payload,
        )
        self._send(self._owners[chunk], host_push.pack())

    def _add_up(self, chunk: int, weighing: list[Push]) -> torch.Tensor:
        """The sum in units of the first one's weight, in memory that is this chunk's alone."""
        if not self._sum.numel():
            self._sum = torch.empty(self._layout.nbytes, dtype=torch.uint8)
        place = self._layout.chunk_view(self._sum, chunk)
        self._own_pending(place)
        dtype = self._layout.chunks[chunk].dtype
        result = place.view(dtype)
        first, *rest = weighing
        assert first.payload is not None
        augend = first.payload.view(dtype)
        for push in rest:
            assert push.payload is not None
            torch.add(augend, push.payload.view(dtype), alpha=push.unit / first.unit, out=result)
            augend = result
        return place
