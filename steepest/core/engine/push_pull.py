"""A worker's exchange with servers: each chunk is pushed to its holders, weights come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from steepest.core.engine.exchange import NOTHING_YET, Arrived, Companion, WaitUntil
from steepest.core.engine.in_words import chunks_in_words
from steepest.core.engine.incoming_weights import ArrivingWeights, Key
from steepest.core.engine.topology import Topology
from steepest.core.messages.gradients import Push, Weights
from steepest.core.messages.message import Kind, Message, Peer, Send, server_peer
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.layout import ParameterLayout
from steepest.core.tensors.memory import Memory

#: The name of a compressor's state in the state of an exchange.
COMPRESSION = "compression"


class Compressor(Protocol):
    """Packs a worker's gradients in the form of a codec, and keeps what that has left out of them so far."""

    def begin(self) -> None:
        """Begin a gradient; the error of the last one is dropped unless it was committed."""

    def commit(self) -> None:
        """Keep the error of the last gradient: its packed form is part of the weights now."""

    def pack(
        self, index: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> torch.Tensor:
        """Return one chunk in its packed form, see `ChunkReady`; the next gradient overwrites it."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the errors so far, by name."""

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned; empty to begin with nothing left out."""


#: Makes a compressor, given a layout, a codec, and for each chunk whether it is to be packed.
MakeCompressor = Callable[[ParameterLayout, Codec, Sequence[bool]], Compressor]


class PushPull:
    """The exchange of dense models: pushes gradients chunk by chunk, receives weights in place; see `Exchange`.

    Args:
        worker: its index.
        topology: of the job. A chunk is pushed to all its holders.
        weights: the flat vector (uint8, of the layout's size) to which new weights are written.
        send: sends as the worker.
        own: index of the server of the worker's own process, None if there is none; bytes between
            the two do not count as moved.
        compressor: makes the compressor of gradients if the topology has a codec.
        route: returns the peer that takes pushes for a server, given its index; not for opaque chunks.
    """

    #: weights may come in the middle of a step
    kinds = frozenset({Kind.WEIGHTS})

    def __init__(
        self,
        worker: int,
        topology: Topology,
        weights: torch.Tensor,
        send: Send,
        own: int | None = None,
        compressor: MakeCompressor | None = None,
        route: Callable[[int], Peer] = server_peer,
    ) -> None:
        self.companion = Companion()
        self.bytes_pushed = 0  # to other processes in this step
        self.bytes_pulled = 0  # of weights from other processes, so far
        self._own = None if own is None else server_peer(own)
        layout, holders, hosts = topology.layout, topology.holders, topology.hosts
        self._send = send
        codec, pull_dtype = topology.wire_formats
        everywhere = codec is not None and codec.everywhere
        self._targets = [list(map(route, servers)) for servers in holders]
        packed = [  # the same for all of them, so that copies stay alike
            everywhere
            or any(
                t.role == "server" and not hosts.beside(worker, s)
                for t, s in zip(targets, servers, strict=True)
            )
            for targets, servers in zip(self._targets, holders, strict=True)
        ]
        self._count = len(topology.pushed)
        for chunk in layout.opaque_chunks:  # no aggregator adds them up, no codec packs them
            packed[chunk] = False
            self._targets[chunk] = [server_peer(server) for server in holders[chunk]]
        # of the gradients, with what it has left out so far; None where they travel as they are
        self._compressor: Compressor | None = None
        if codec is not None:
            assert compressor is not None
            self._compressor = compressor(layout, codec, packed)
        self.sequence = 0  # number of the last push, from 1
        self._unpushed = 0  # chunks of this step that are not pushed yet
        self._generation = self._incarnation = 0
        self._version = 0
        self._holders = holders
        self._held: list[tuple[int, Push]] = []  # chunks that are held back, see `hold_back`
        # by server: its chunks, and those that are to come; None if none is held back
        self._each = Counter(s for chunk in topology.pushed for s in holders[chunk])
        self._lacking: dict[int, int] | None = None
        self._weights = ArrivingWeights(
            f"worker {worker}", layout, weights, pull_dtype, topology.pull_codec
        )

    def begin_life(self, incarnation: int, wait_until: WaitUntil) -> None:
        """Do nothing: each push names its life."""

    def begin_generation(self) -> None:
        """Do nothing: there are no requests to other members."""

    def stand_at(self, generation: int, version: int) -> None:
        """Do nothing: the weights are here."""

    def begin(self, generation: int, version: int, incarnation: int, *, is_last: bool) -> None:
        """Begin a push of the worker's life `incarnation`, of a gradient that is computed from a version's weights."""
        self._incarnation = incarnation
        self._generation, self._version = generation, version
        self.sequence += 1
        self.bytes_pushed, self._unpushed = 0, self._count
        if self._compressor is not None:
            self._compressor.begin()
        self._lacking = None
        self._held.clear()

    def hold_back(self) -> None:
        """Hold the last chunk for each server back until `end`, so that the push that has begun may be taken back."""
        self._lacking = dict(self._each)

    def take_back(self) -> None:
        """Begin the push anew: its first chunk replaces all chunks that were pushed; see `Push`."""
        pushed = self.bytes_pushed
        self.begin(self._generation, self._version, self._incarnation, is_last=False)
        self.hold_back()
        self.bytes_pushed = pushed

    def ready(
        self, chunk: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> bool:
        """Push a complete chunk of the gradient, see `ChunkReady`; return whether further ones are to come.

        Args:
            payload: must not change before the resulting weights are here; empty if there is no gradient.
        """
        self._unpushed -= 1
        pushed = payload if unit and payload.numel() else None
        if pushed is not None and self._compressor is not None:
            pushed = self._compressor.pack(chunk, pushed, unit, total, absent)
        step = (self._generation, self._incarnation, self.sequence, self._version)
        push = Push(*step, chunk, unit, total, sorted(absent) if absent else (), pushed)
        if self._lacking is not None and self._is_last(chunk, self._lacking):
            self._held.append((chunk, push))
        else:
            self._push(chunk, push)
        return self._unpushed > 0

    def _is_last(self, chunk: int, lacking: dict[int, int]) -> bool:
        """Count a chunk for its servers; return whether one of them would have the whole gradient with it."""
        has_passed = False
        for server in self._holders[chunk]:
            lacking[server] -= 1
            has_passed = has_passed or lacking[server] == 0
        return has_passed

    def _push(self, chunk: int, push: Push) -> None:
        """Send a chunk to each of its servers."""
        for target in self._targets[chunk]:
            if push.payload is not None and target != self._own:
                self.bytes_pushed += push.payload.numel()
            self._send(target, push.pack())

    def end(self) -> int:
        """Send the chunks that were held back, and return the push's sequence number."""
        for chunk, push in self._held:
            self._push(chunk, push)
        self._held.clear()
        return self.sequence

    def use(self, vector: torch.Tensor) -> None:
        """Write new weights to another flat vector from now on, which holds the present ones."""
        self._weights.vector = vector

    def logged(self) -> Sequence[Any]:
        """Return nothing: a replay needs no more than the worker knows."""
        return ()

    def committed(self, sequence: int) -> None:
        """Note that the last push, if that has this number, is part of the servers' weights."""
        if self._compressor is not None and sequence == self.sequence:
            self._compressor.commit()

    def left_out(self) -> None:
        """Note that the last push was left out of the servers' weights: it changes nothing here."""
        if self._compressor is not None:
            self._compressor.begin()

    def lacks(self, key: Key | None) -> list[str]:
        """Return in words the chunks of a version that have not come, with their senders."""
        by_sender: dict[Peer, list[int]] = {}
        for chunk in () if key is None else self._weights.missing(key):
            by_sender.setdefault(self._targets[chunk][0], []).append(chunk)
        return [
            f"{chunks_in_words(chunks)} of {sender}" for sender, chunks in sorted(by_sender.items())
        ]

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return memory for a payload of weights, in the model's vector if possible; None if they are old."""
        return self._weights.destination(message, size)

    def receive(self, source: Peer, message: Message) -> Arrived:
        """Take a message with weights; return its effect.

        Raises:
            ProtocolError: the message is not WEIGHTS.
        """
        weights = self._weights.receive(message)
        if weights is None:
            return NOTHING_YET
        if source != self._own and weights.payload is not None:
            self.bytes_pulled += weights.payload.nbytes
        key = (weights.generation, weights.version)
        complete = key if self._weights.completed(key) else None
        return Arrived(complete, weights.skipped if self._answers(weights) else None)

    def state(self, step: int) -> dict[str, Tensors]:
        """Return the errors of compression so far, if gradients are compressed."""
        compressor = self._compressor
        return {} if compressor is None else {COMPRESSION: Tensors(compressor.state())}

    def load_state(self, what: str, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from the errors of compression, if gradients are compressed."""
        if what == COMPRESSION and self._compressor is not None:
            self._compressor.load_state(state)

    def _answers(self, weights: Weights) -> bool:
        """Return whether the last push was decided on before servers had these weights."""
        newer = weights.generation == self._generation and weights.version > self._version
        return newer and not weights.reload
