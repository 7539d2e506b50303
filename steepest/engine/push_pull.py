"""A worker's exchange with servers: each chunk is pushed to its holders, weights come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from steepest.compression.gradient_compressor import GradientCompressor
from steepest.engine.in_words import chunks_in_words
from steepest.engine.incoming_weights import ArrivingWeights
from steepest.engine.topology import Topology
from steepest.errors import listed
from steepest.messages.gradients import Push, Weights, WeightsShared
from steepest.messages.message import Kind, Message, Peer, Send, aggregator_peer, server_peer
from steepest.tensors.memory import Memory, as_tensor

if TYPE_CHECKING:
    from steepest.engine.row_exchange import RowExchange


class PushPull:
    """A worker's end of its strategy: pushes gradients chunk by chunk, receives weights in place.

    It exists as long as its worker. The worker calls `begin`, then `ready` for each chunk as the
    backward pass completes it, then `end`. Messages that arrive meanwhile or afterwards go to
    `receive`, until it returns that a version is complete. Used on the router's thread.

    Args:
        worker: its index.
        topology: of the job. A chunk is pushed to all its holders, to those of other hosts through
            this host's aggregator, if it has one.
        weights: the flat vector (uint8, of the layout's size) to which new weights are written.
        send: sends as the worker.
        adopt: called with a flat vector of weights that all workers of this host share; returns
            whether the models use it from now on.
        own: index of the server of the worker's own process, None if there is none; bytes between
            the two do not count as moved.
        left_out: called, once or more, when the last push was left out of the servers' weights.
    """

    def __init__(
        self,
        worker: int,
        topology: Topology,
        weights: torch.Tensor,
        send: Send,
        adopt: Callable[[torch.Tensor], bool] = lambda weights: False,
        own: int | None = None,
        left_out: Callable[[], None] = lambda: None,
    ) -> None:
        self.bytes_pushed = 0  # to other processes in this step
        self.bytes_pulled = 0  # of weights from other processes, so far
        self._own = None if own is None else server_peer(own)
        layout, holders, hosts = topology.layout, topology.holders, topology.hosts
        self._layout = layout
        self._send = send
        self._adopt = adopt
        self._undo = left_out
        codec, pull_dtype = topology.wire_formats
        # With a lossy codec each worker compresses its own gradient and keeps what is left out.
        everywhere = codec is not None and codec.everywhere
        added_up = codec is None or not (codec.lossy or everywhere)
        aggregator = hosts.aggregator_of(worker) if added_up else None
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
            everywhere
            or any(
                t.role == "server" and not hosts.beside(worker, s)
                for t, s in zip(targets, servers, strict=True)
            )
            for targets, servers in zip(self._targets, holders, strict=True)
        ]
        for chunk in layout.opaque_chunks:  # no aggregator adds up rows, no codec packs them
            packed[chunk] = False
            self._targets[chunk] = [server_peer(server) for server in holders[chunk]]
        self.rows: RowExchange | None = None  # of embedding tables; None without tables
        if topology.tables is not None:
            from steepest.engine.row_exchange import RowExchange

            self.rows = RowExchange(worker, topology.tables, holders, send)
        # of the gradients, with what it has left out so far; None where they travel as they are
        self.compressor = None if codec is None else GradientCompressor(layout, codec, packed)
        self.sequence = 0  # number of the last push, from 1
        self.unpushed = 0  # chunks of this step that are not pushed yet
        self._generation = self._incarnation = 0
        self._version = 0
        self._weights = ArrivingWeights(f"worker {worker}", layout, weights, pull_dtype)

    def begin(self, generation: int, version: int, incarnation: int) -> None:
        """Begin a push of the worker's life `incarnation`, of a gradient that is computed from a version's weights."""
        self._incarnation = incarnation
        self._generation, self._version = generation, version
        self.sequence += 1
        self.bytes_pushed, self.unpushed = 0, len(self._layout.trainable_chunks)
        if self.rows is not None:
            self.rows.begin(generation, version)
        if self.compressor is not None:
            self.compressor.begin()

    def ready(
        self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> None:
        """Push a complete chunk of the gradient, see `steepest.engine.replicas.ChunkReady`."""
        # payload: must not change before the weights that come of the push are here; empty for a shard of tables of
        # which no row has a gradient.
        self.unpushed -= 1
        pushed = payload if unit and payload.numel() else None
        if pushed is not None and self.compressor is not None:
            pushed = self.compressor.pack(chunk, pushed, unit, total, absent)
        step = (self._generation, self._incarnation, self.sequence, self._version)
        push = Push(*step, chunk, unit, total, sorted(absent) if absent else (), pushed)
        for target in self._targets[chunk]:
            if pushed is not None and target != self._own:
                self.bytes_pushed += pushed.numel()
            self._send(target, push.pack())

    def end(self) -> int:
        """Return the push's sequence number, once the whole gradient has been sent."""
        return self.sequence

    def committed(self, sequence: int) -> None:
        """Note that the last push, if that has this number, is part of the servers' weights."""
        if self.compressor is not None and sequence == self.sequence:
            self.compressor.commit()

    def left_out(self) -> None:
        """Note that the last push was left out of the servers' weights: it changes nothing here."""
        if self.compressor is not None:
            self.compressor.begin()
        if self.rows is not None:
            self.rows.delayed.left_out()
        self._undo()

    @property
    def arriving(self) -> tuple[int, int]:
        """The newest generation and version of which any weights are here."""
        return self._weights.newest

    def has(self, entry: int | None, key: tuple[int, int]) -> bool:
        """Return whether a trainable parameter is here, see `ArrivingWeights.has`."""
        return self._weights.has(entry, key)

    def missing(self, key: tuple[int, int]) -> str:
        """Return in words the chunks of a version that have not come, and who sends them; "" for none."""
        by_sender: dict[Peer, list[int]] = {}
        for chunk in self._weights.missing(key):
            by_sender.setdefault(self._targets[chunk][0], []).append(chunk)
        return listed(
            f"{chunks_in_words(chunks)} of {sender}" for sender, chunks in sorted(by_sender.items())
        )

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return memory for a payload: for weights, where the model uses them, unless they are old."""
        # See `Role.destination`. None too for a shared vector that does not lie in memory of this host.
        if message.kind is Kind.ROWS and self.rows is not None:
            return self.rows.destination(message, size)
        if message.kind is Kind.WEIGHTS_SHARED and size == self._layout.nbytes:
            return None if message.payload is None else as_tensor(message.payload)
        return self._weights.destination(message, size)

    def receive(self, source: Peer, message: Message) -> tuple[int, int] | None:
        """Take a message with weights; return generation and version, if all of that version are here now."""
        # ProtocolError: the message is neither WEIGHTS, WEIGHTS_SHARED nor ROWS.
        if message.kind is Kind.ROWS and self.rows is not None:
            self.rows.receive(source, message)
            return None
        if message.kind is Kind.WEIGHTS_SHARED:
            vector = WeightsShared.unpack(message).payload
            if vector is not None and self._adopt(vector):
                self._weights.vector = vector
            return None
        weights = self._weights.receive(message)
        if weights is None:
            return None
        if self._answers(weights):
            if weights.skipped:
                self.left_out()
            else:
                self.committed(self.sequence)
        if source != self._own and weights.payload is not None:
            self.bytes_pulled += weights.payload.nbytes
        key = (weights.generation, weights.version)
        return key if self._weights.completed(key) else None

    def _answers(self, weights: Weights) -> bool:
        """Return whether the last push was decided on before servers had these weights."""
        newer = weights.generation == self._generation and weights.version > self._version
        return newer and not weights.reload
