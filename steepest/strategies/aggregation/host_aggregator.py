"""A host's aggregator: gradients of its workers leave it as one sum, weights come to it once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from steepest.core.engine.hosting import host_role
from steepest.core.engine.in_words import pushes_in_words
from steepest.core.engine.incoming_weights import ArrivingWeights, Key, where_lent
from steepest.core.engine.job import Job
from steepest.core.engine.spans import RoleSpans, SpanKind
from steepest.core.engine.topology import Topology
from steepest.core.messages.gradients import HostPush, Push, Weights, WeightsShared
from steepest.core.messages.message import (
    Kind,
    Message,
    Peer,
    PushId,
    Send,
    aggregator_peer,
    server_peer,
    worker_peer,
)
from steepest.core.status import Status
from steepest.core.tensors.half_precision import sum_dtype
from steepest.core.tensors.memory import Memory, sum_of_squares
from steepest.core.transport.router import Router
from steepest.errors import ProtocolError
from steepest.strategies.compression.gradient_compressor import GradientCompressor


class _GatheredPush(NamedTuple):
    """A worker's push of one chunk."""

    push: Push
    payload: torch.Tensor | None


class HostAggregator:
    """The role between one host's workers and the servers of other hosts.

    It exists where every member contributes to every version, in the process of a server of the
    host. Workers push to it the chunks that servers of other hosts hold; it adds up the gradients
    in the order of the workers and pushes the sum on. New weights come to it, each chunk once, into
    one vector, which workers use as their own if they can (`Replicas.adopt`); a server in the same
    process updates its chunks there in place. No worker reads weights at that time, because a
    version is committed only when all workers have reported. Used on the router's thread.

    Args:
        index: of the aggregator, and of the server beside which it lives.
        topology: of the job; the aggregator serves this host's workers.
        weights: the vector (uint8, flat, of the layout's size), zeros but for the chunks of a
            server of this process.
        send: sends as the aggregator.
        own_pending: copies the unsent part of some memory, before that changes.
        checked: whether to look for NaN and infinity, so that the server can name their workers.
        shown: whether workers may use the vector as their own; they may not if the transport sends
            copies of it.
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
        self._can_be_shared = shown
        layout, (codec, pull_dtype) = topology.layout, topology.wire_formats
        self._layout = layout
        self._owners = [server_peer(servers[0]) for servers in topology.holders]
        self._workers = topology.hosts.aggregators[index]
        self._send = send
        self._own_pending = own_pending
        self._compressor: GradientCompressor | None = None
        if codec is not None:
            everything = [True] * len(layout.chunks)
            self._compressor = GradientCompressor(layout, codec, everything, own_pending)
        self._checked = checked
        self._weights = ArrivingWeights(f"aggregator {index}", layout, weights, pull_dtype)
        self._shared_in = -1  # the generation of the last WEIGHTS_SHARED
        self._step: Key = (-1, -1)
        self._gathering: dict[
            int, dict[int, _GatheredPush]
        ] = {}  # by chunk and worker, of that step
        self._sum = torch.empty(0, dtype=torch.uint8)
        self._spans: RoleSpans | None = None

    def record(self, spans: RoleSpans | None) -> None:
        """Record what the aggregator does, see `RecordsSpans`."""
        self._spans = spans

    # -- Role ----------------------------------------------------------------------------------

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return memory for a payload: in the vector for weights, for gradients the lent payload itself.

        See `Role.destination`.
        """
        if message.kind is not Kind.PUSH:
            return self._weights.destination(message, size)
        push: Push = message.body
        if size != self._layout.chunks[push.chunk].nbytes:
            raise ProtocolError(
                f"a push of {size} bytes for chunk {push.chunk}, which has no such size"
            )
        if (push.generation, push.pulled) < self._step:
            return None
        return where_lent(message, size)

    def handle(self, source: Peer, message: Message) -> None:
        """Act on one message: gather a gradient, or pass weights on; ProtocolError: it takes no such message."""
        if message.kind is Kind.PUSH:
            self._gather(source, message.body, message.payload)
        elif (weights := self._weights.receive(message)) is not None:
            self._pass_on(weights)

    def lost(self, peer: Peer, reason: str) -> None:
        """Do nothing: the coordinator begins a generation, in which gathered gradients are void."""

    def tick(self, now: float) -> None:
        """Do nothing: an aggregator has no deadlines of its own."""

    def doing(self) -> Status:
        """Return which pushes the aggregator waits for, see `Role.doing`."""
        lacking = {
            chunk: set(self._workers) - gathering.keys()
            for chunk, gathering in list(self._gathering.items())
            if len(gathering) < len(self._workers)
        }
        if not lacking:
            return Status("waits for pushes")
        return Status(
            f"waits for pushes from version {self._step[1]} of {pushes_in_words(lacking)}"
        )

    # -- weights -------------------------------------------------------------------------------

    def _pass_on(self, arrived: Weights) -> None:
        """Send the workers a chunk that has come; before the first one, the vector it lies in."""
        if arrived.reload and self._can_be_shared and arrived.generation > self._shared_in:
            self._shared_in = arrived.generation
            shared = WeightsShared(arrived.generation)
            for worker in self._workers:
                self._send(worker_peer(worker), shared.pack(self._weights.vector))
        weights = Weights(
            arrived.generation,
            sequence=0,
            version=arrived.version,
            chunk=arrived.chunk,
            reload=arrived.reload,
            skipped=arrived.skipped,
        )
        payload = self._weights.chunk(arrived.chunk)
        for worker in self._workers:
            self._send(worker_peer(worker), weights.pack(payload))

    # -- gradients -----------------------------------------------------------------------------

    def _gather(self, source: Peer, push: Push, payload: torch.Tensor | None) -> None:
        """Keep a worker's chunk; after the last worker's push the sum. ProtocolError: another host's, or version."""
        if source.index not in self._workers:
            raise ProtocolError(
                f"worker {source.index} is not of the host of aggregator {self._index}"
            )
        step = (push.generation, push.pulled)
        if step < self._step:
            return  # late
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
        gathering = self._gathering.setdefault(push.chunk, {})
        known = gathering.get(source.index)
        if known is not None and (push.incarnation, push.sequence) <= (
            known.push.incarnation,
            known.push.sequence,
        ):
            return  # a copy
        # perhaps instead of one that was taken back
        gathering[source.index] = _GatheredPush(push, payload)
        spans = self._spans
        if spans is not None:
            place = (push.sequence, push.pulled, push.chunk, source.index)
            spans.add(SpanKind.STAGE, spans.now(), *place)
        if len(gathering) == len(self._workers):
            began = 0.0 if spans is None else spans.now()
            pushes = {worker: gathering[worker] for worker in self._workers}
            self._push_on(push.chunk, pushes, source.index)
            if spans is not None:
                spans.add(SpanKind.REDUCE, began, -1, push.pulled + 1, push.chunk)

    def _push_on(self, chunk: int, pushes: dict[int, _GatheredPush], last: int) -> None:
        """Push on the sum of a chunk's gradients; if it is not finite, each by itself, the `last` worker's first.

        If that worker has taken back an earlier gradient, its push voids the sum that the server has.
        """
        weighing = [
            (payload, push)
            for push, payload in pushes.values()
            if payload is not None and push.unit
        ]
        unit = weighing[0][1].unit if weighing else 0.0
        payload = weighing[0][0] if weighing else None
        if len(weighing) > 1:
            payload, unit = self._add_up(chunk, weighing)
        if payload is not None and self._checked and not self._is_finite(chunk, payload):
            for worker in sorted(pushes, key=lambda worker: worker != last):
                one = pushes[worker]
                self._send_on(chunk, {worker: one}, one.payload, one.push.unit)
        else:
            self._send_on(chunk, pushes, payload, unit)

    def _is_finite(self, chunk: int, payload: torch.Tensor) -> bool:
        return math.isfinite(sum_of_squares(payload.view(self._layout.chunks[chunk].dtype)))

    def _send_on(
        self,
        chunk: int,
        pushes: dict[int, _GatheredPush],
        payload: torch.Tensor | None,
        unit: float,
    ) -> None:
        """Send a chunk's server one HOST_PUSH for `pushes`, by worker: their sum's flat bytes, in units of `unit`."""
        first = next(iter(pushes.values())).push
        total = math.fsum(one.push.total for one in pushes.values())
        absent = [frozenset(one.push.absent) for one in pushes.values() if one.payload is not None]
        if payload is not None and len(pushes) > 1 and self._compressor is not None:
            payload = self._compressor.pack(chunk, payload, unit, total, frozenset())
        host_push = HostPush(
            *(first.generation, first.pulled, chunk, unit, total),
            tuple(
                PushId(worker, push.incarnation, push.sequence)
                for worker, (push, _) in pushes.items()
            ),
            sorted(frozenset.intersection(*absent)) if absent else (),
        )
        self._send(self._owners[chunk], host_push.pack(payload))

    def _add_up(
        self, chunk: int, weighing: list[tuple[torch.Tensor, Push]]
    ) -> tuple[torch.Tensor, float]:
        """Return the sum of gradients in units of the first one's weight, and that unit.

        In half precision return their mean, which overflows least, in units of their summed weight. The chunk's next
        sum overwrites the memory.
        """
        if not self._sum.numel():
            self._sum = torch.empty(self._layout.nbytes, dtype=torch.uint8)
        total = self._layout.chunk_view(self._sum, chunk)
        self._own_pending(total)
        dtype = self._layout.chunks[chunk].dtype
        result = total.view(dtype)
        (augend, first), *rest = weighing
        augend = augend.view(dtype)
        if sum_dtype(dtype) is not dtype:
            weight = math.fsum(push.total for _, push in weighing)
            sum_ = augend.to(sum_dtype(dtype))
            for payload, push in rest:
                sum_.add_(payload.view(dtype), alpha=push.unit / first.unit)
            result.copy_(sum_.div_(weight / first.unit))
            return total, weight
        for payload, push in rest:
            torch.add(augend, payload.view(dtype), alpha=push.unit / first.unit, out=result)
            augend = result
        return total, first.unit


def host_aggregator(
    router: Router, job: Job, index: int, weights: torch.Tensor, *, shown: bool = True
) -> HostAggregator:
    """Host the aggregator beside a server in this process.

    Args:
        router: of the process.
        job: of the aggregator.
        index: of the aggregator, and of the server.
        weights: the flat vector of the server of this process, which updates its chunks in place.
        shown: see `HostAggregator`.
    """
    peer = aggregator_peer(index)
    aggregator = HostAggregator(
        index,
        job.topology,
        weights,
        router.sender(peer),
        router.own_pending,
        checked=job.strategy.nonfinite != "pass",
        shown=shown,
    )
    host_role(router, job, peer, aggregator)
    return aggregator
