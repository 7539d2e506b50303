"""The parameter server's worker side: push each chunk to the server that holds it, take weights back."""

from __future__ import annotations

from collections.abc import Callable

import torch

from steepest.compression.codecs import GradientCompressor
from steepest.engine.incoming_weights import ArrivingWeights
from steepest.engine.topology import Topology
from steepest.messages.gradients import Push, Weights, WeightsShared
from steepest.messages.message import Kind, Message, Peer, Send, aggregator_peer, server_peer
from steepest.tensors.memory import as_tensor


class PushPull:
    """A worker's end of its strategy: pushes gradients chunk by chunk, receives weights in place.

    It lives as long as its worker. The worker calls `begin`, then `ready` for each chunk as the
    backward pass completes it, then `end`; messages that arrive meanwhile or afterwards go to
    `receive`, until it says that a version is complete.

    Args:
        worker: its index.
        topology: all holders of a chunk are pushed to; those of other hosts through this host's
            aggregator, if it has one.
        weights: the flat vector that new weights are written to.
        adopt: called with a flat vector of weights that all workers of this host share; returns
            whether the models use it from now on.
        own: the server of the worker's own process, if it has one: what they exchange does not
            count as bytes moved.

    Attributes:
        packer: with what compression has left out so far.
        bytes_pushed: in this step.
        bytes_pulled: of weights, so far.
        sequence: of the last push.
    """

    def __init__(
        self,
        worker: int,
        topology: Topology,
        weights: torch.Tensor,
        send: Send,
        adopt: Callable[[torch.Tensor], bool] = lambda weights: False,
        own: int | None = None,
    ) -> None:
        self.bytes_pushed = self.bytes_pulled = 0
        self._own = None if own is None else server_peer(own)
        layout, holders, hosts = topology.layout, topology.holders, topology.hosts
        self._layout = layout
        self._send = send
        self._adopt = adopt
        codec, pull_dtype = topology.wire_formats
        aggregator = (
            hosts.aggregator_of(worker) if codec is None or not codec.lossy else None
        )  # each packs its own
        self._targets = [
            [
                aggregator_peer(aggregator)
                if aggregator is not None and not hosts.beside(worker, server)
                else server_peer(server)
                for server in servers
            ]
            for servers in holders
        ]
        packed = [  # the same for all of them, so that copies stay alike
            any(
                t.role == "server" and not hosts.beside(worker, s)
                for t, s in zip(targets, servers, strict=True)
            )
            for targets, servers in zip(self._targets, holders, strict=True)
        ]
        self.compressor = GradientCompressor(layout, codec, packed)
        self.sequence = 0
        self._generation = self._incarnation = 0
        self._version = 0
        self._weights = ArrivingWeights(f"worker {worker}", layout, weights, pull_dtype)

    def begin(self, generation: int, version: int, incarnation: int) -> None:
        """Start a step of that life of the worker, from the weights of `version`."""
        self._incarnation = incarnation
        self._generation, self._version = generation, version
        self.sequence += 1
        self.bytes_pushed = 0
        self.compressor.begin()

    def ready(
        self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> None:
        """Push a chunk of the gradient that is complete (see `steepest.engine.replicas.ChunkReady`).

        `payload` stays unchanged until the step is committed.
        """
        pushed = self.compressor.pack(chunk, payload, unit, total, absent) if unit else None
        step = (self._generation, self._incarnation, self.sequence, self._version)
        push = Push(*step, chunk, unit, total, sorted(absent) if absent else (), pushed)
        for target in self._targets[chunk]:
            if pushed is not None and target != self._own:
                self.bytes_pushed += pushed.numel()
            self._send(target, push.pack())

    def end(self) -> int:
        """Return the push's sequence number: the whole gradient has been sent."""
        return self.sequence

    def committed(self, sequence: int) -> None:
        """Count what compression left out of that push, if it is the last: it is part of the weights."""
        if sequence == self.sequence:
            self.compressor.commit()

    @property
    def arriving(self) -> tuple[int, int]:
        """The newest (generation, version) of which any weights are here."""
        return self._weights.newest

    def has(self, entry: int | None, key: tuple[int, int]) -> bool:
        """Return whether a trainable parameter (all of them, with None) is here at that (generation, version)."""
        return self._weights.has(entry, key)

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Return where an arriving payload goes: weights are received where the model sees them."""
        if message.kind is Kind.WEIGHTS_SHARED and size == self._layout.nbytes:
            return (
                None if message.payload is None else as_tensor(message.payload)
            )  # only of use where it lies
        return self._weights.destination(message, size)

    def receive(self, source: Peer, message: Message) -> tuple[int, int] | None:
        """Take a message; return (generation, version) when the weights of that version are complete."""
        if message.kind is Kind.WEIGHTS_SHARED:
            vector = WeightsShared.unpack(message).payload
            if vector is not None and self._adopt(vector):
                self._weights.vector = vector
            return None
        weights = self._weights.receive(message)
        if weights is None:
            return None
        if self._answers(weights):
            self.compressor.commit()
        if source != self._own and weights.payload is not None:
            self.bytes_pulled += weights.payload.numel()
        key = (weights.generation, weights.version)
        return key if self._weights.completed(key) else None

    def _answers(self, weights: Weights) -> bool:
        """Return whether weights are of the version that the last push is part of."""
        newer = weights.generation == self._generation and weights.version > self._version
        return newer and not weights.reload
