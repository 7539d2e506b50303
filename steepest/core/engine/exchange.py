"""A worker's exchange with servers: what a worker asks of it, how others attach to it, and that of dense models."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.in_words import chunks_in_words
from steepest.core.engine.incoming_weights import ArrivingWeights, Key
from steepest.core.engine.sample_places import Place
from steepest.core.engine.topology import Topology
from steepest.core.messages.gradients import Push, Weights
from steepest.core.messages.message import Kind, Message, MessageKind, Peer, Send, server_peer
from steepest.core.models.protocol import Model
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.layout import ParameterLayout
from steepest.core.tensors.memory import Memory

#: Receives messages until a condition holds, in the middle of the model's code; raises if it cannot come to hold any
#: more. The text names what is awaited, for the error "... was not sent".
WaitUntil = Callable[[Callable[[], bool], str], None]


class Companion:
    """What an exchange does while replicas compute: by default nothing, which is enough for dense models.

    `Replicas` calls it on the router's thread, in each step: `begin_share`; for each batch `take`, `begin_batch`, the
    model's passes, `end_batch`; then `end_share`, and `look_ahead` when the report is sent. After an error the
    remaining calls of a share are left out.
    """

    #: whether it takes batches before their turn, so that replicas do not
    takes_ahead = False

    def attach(
        self,
        models: Sequence[Model],
        load: Callable[[Place], Any],
        places: Callable[[int], list[Place]],
    ) -> None:
        """Begin to accompany some replicas.

        Args:
            models: of the replicas.
            load: seeds all generators as for the batch of a place, and returns it; to be called in the order of places.
            places: returns the places of a share's batches, in the order in which they are computed.
        """

    def forget(self) -> None:
        """Forget batches that were taken beforehand: others follow."""

    def begin_share(self, places: Sequence[Place], ready: ChunkReady) -> None:
        """Begin the gradient of a share; `ready` takes chunks that can be pushed already."""

    def take(self, place: Place, load: Callable[[Place], Any]) -> Any:
        """Return the batch of a place, as `load` does."""
        return load(place)

    def begin_batch(self, place: Place) -> None:
        """Begin the passes over a batch."""

    def end_batch(self, weight: float) -> None:
        """Note that a batch is computed, and what it weighs."""

    def end_share(self, ready: ChunkReady, updates: int = 1) -> None:
        """End the gradient of a share; `ready` takes its chunks that no model writes.

        Args:
            ready: as in `begin_share`.
            updates: number of updates that the worker has made of its own weights meanwhile, each a mean of batches.
        """

    def look_ahead(self, number: int) -> None:
        """Prepare the share after the one whose gradient was pushed, if there is anything to prepare."""

    def squares(self) -> float:
        """Return the sum of the squares of its mean gradient over the batches since `scale`."""
        return 0.0

    def scale(self, factor: float) -> None:
        """Multiply its gradients of the batches since the last call by a factor."""

    def rehearsal(self, model: Model) -> AbstractContextManager[None]:
        """Return a block in which a gradient of a model is computed and dropped."""
        return contextlib.nullcontext()


class Sent(NamedTuple):
    """What an exchange has sent and received for one gradient."""

    sequence: int  # of the push
    bytes_pushed: int  # to other processes
    bytes_pulled: int  # from other processes since the gradient before


class Arrived(NamedTuple):
    """The effect of a message that an exchange received."""

    complete: Key | None  # the generation and version of which all weights are here now
    # whether the last push was left out of the servers' weights; None while that is not known
    skipped: bool | None


#: The effect of most messages.
NOTHING_YET = Arrived(None, None)


class Exchange(Protocol):
    """A worker's end of what its strategy and its model exchange with servers; `PushPull` is that of dense models.

    **What it promises.** A gradient leaves chunk by chunk, as it is computed; the resulting weights arrive in
    the replicas' flat vector. A push is named by the worker's life and `sequence`, and may be sent again after
    `begin` with the same version; it has the same bytes then. It never blocks, and computes nothing in other threads,
    unless `Extension.around` has put it there. State that it carries from one gradient to the next changes only with
    `committed`: a step that is repeated or left out leaves no trace. Messages may come late, twice,
    or from a generation that is over; it drops these, and raises ProtocolError for what no correct process sends.

    **When it is called.** All calls are made on the thread of the process' router, except `lacks`, which
    any thread may call. First `begin_life`. Then, in any order:

    - in each step `begin`, and `ready` for each trainable chunk as the backward pass completes it, in the middle of
      the model's code; then `logged`, unless the gradient is pushed once more, and `end`, whose values go into the
      REPORT. After an error there is no `end`.
      If a dense model may have to compute a gradient anew, `hold_back` after `begin`; then `take_back` may be
      called before `end`, and `ready` for each chunk again.
    - `destination` before a payload is read and `receive` when it is here, for all messages that the worker does
      not handle itself. Those of `kinds` also come in the middle of a step, when the worker waits for weights, or the
      exchange itself for what its model needs (`WaitUntil`); others only between two steps.
    - `committed` or `left_out` when the last push was decided on, once or more; `committed(0)` if there was none.
    - `begin_generation` when the members have changed: earlier requests to them are void.
    - `stand_at` before a user's function between two steps, which may use the models.
    - `state` between two steps, when a copy of the worker's own state is taken, and `load_state` before its first
      step, or when another state is installed.

    **How others attach.** An implementation for more than dense models wraps another one (`ExchangeAround`),
    and passes on the calls that do not concern it; an `Extension` puts it there. Replicas call its `companion`
    around their batches.
    """

    @property
    def companion(self) -> Companion:
        """The part that replicas call around their batches."""

    @property
    def kinds(self) -> frozenset[MessageKind]:
        """The kinds of messages that are taken in the middle of a step."""

    @property
    def ready(self) -> Callable[[int, torch.Tensor, float, float, frozenset[int]], bool]:
        """A function that pushes a complete chunk, see `ChunkReady`, and returns whether further ones are to come.

        The chunk's bytes must not change until the resulting weights are here.
        """

    @property
    def sequence(self) -> int:
        """Number of the last push, from 1."""

    def begin_life(self, incarnation: int, wait_until: WaitUntil) -> None:
        """Begin a life of the worker; `incarnation` is the number of its earlier lives."""

    def begin_generation(self) -> None:
        """Forget requests to the members of the previous generation."""

    def stand_at(self, generation: int, version: int) -> None:
        """Note the weights with which models compute while no step is taken."""

    def begin(self, generation: int, version: int, incarnation: int, *, is_last: bool) -> None:
        """Begin a push of a gradient that is computed from a version's weights.

        Args:
            generation, version: of the weights.
            incarnation: number of the worker's life.
            is_last: whether no step is granted after this one.
        """

    def hold_back(self) -> None:
        """Send no server the whole gradient before `end`: it may be taken back until then."""

    def take_back(self) -> None:
        """Have servers drop the pushed chunks of the gradient as soon as it is pushed anew."""

    def end(self) -> Sent:
        """Return what has travelled, once the whole gradient has been sent."""

    def use(self, vector: torch.Tensor) -> None:
        """Write new weights to another flat vector from now on; it holds the present ones."""

    def logged(self) -> Sequence[Any]:
        """Return what else a replay needs to know of the present gradient, as plain values for `LoggedPush.more`.

        An exchange that returns values registers with its messages which `more` a REPORT may have.
        """

    def committed(self, sequence: int) -> None:
        """Note that the push of this number, if it is the last one, is part of the servers' weights."""

    def left_out(self) -> None:
        """Note that the last push was left out of the servers' weights: it changes nothing here."""

    def lacks(self, key: Key | None) -> list[str]:
        """Return in words what has not come: weights of a version, with their senders, and whatever else is awaited.

        Any thread may call this. None leaves out the weights.
        """

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return memory for a payload, see `Role.destination`."""

    def receive(self, source: Peer, message: Message) -> Arrived:
        """Take a message; return its effect. ProtocolError: no correct process sends it."""

    def state(self, step: int) -> dict[str, Tensors]:
        """Return copies of the tensors that no server holds, after `step` committed steps, by part."""

    def load_state(self, what: str, state: Mapping[str, torch.Tensor]) -> None:
        """Set one part (`what`) of what `state` returned, if it is one of this exchange; an empty state clears it."""


class ExchangeAround:
    """An exchange that passes everything on to another one: the base class of exchanges that wrap another.

    `ready`, called for each chunk, is that of the other exchange: no call is added.
    """

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.companion: Companion = inner.companion
        self.kinds: frozenset[MessageKind] = inner.kinds
        self.ready = inner.ready

    @property
    def sequence(self) -> int:
        """Number of the last push, from 1."""
        return self.inner.sequence

    def begin_life(self, incarnation: int, wait_until: WaitUntil) -> None:
        """See `Exchange`."""
        self.inner.begin_life(incarnation, wait_until)

    def begin_generation(self) -> None:
        """See `Exchange`."""
        self.inner.begin_generation()

    def stand_at(self, generation: int, version: int) -> None:
        """See `Exchange`."""
        self.inner.stand_at(generation, version)

    def begin(self, generation: int, version: int, incarnation: int, *, is_last: bool) -> None:
        """See `Exchange`."""
        self.inner.begin(generation, version, incarnation, is_last=is_last)

    def hold_back(self) -> None:
        """See `Exchange`."""
        self.inner.hold_back()

    def take_back(self) -> None:
        """See `Exchange`."""
        self.inner.take_back()

    def end(self) -> Sent:
        """See `Exchange`."""
        return self.inner.end()

    def use(self, vector: torch.Tensor) -> None:
        """See `Exchange`."""
        self.inner.use(vector)

    def logged(self) -> Sequence[Any]:
        """See `Exchange`."""
        return self.inner.logged()

    def committed(self, sequence: int) -> None:
        """See `Exchange`."""
        self.inner.committed(sequence)

    def left_out(self) -> None:
        """See `Exchange`."""
        self.inner.left_out()

    def lacks(self, key: Key | None) -> list[str]:
        """See `Exchange`."""
        return self.inner.lacks(key)

    def destination(self, message: Message, size: int) -> Memory | None:
        """See `Exchange`."""
        return self.inner.destination(message, size)

    def receive(self, source: Peer, message: Message) -> Arrived:
        """See `Exchange`."""
        return self.inner.receive(source, message)

    def state(self, step: int) -> dict[str, Tensors]:
        """See `Exchange`."""
        return self.inner.state(step)

    def load_state(self, what: str, state: Mapping[str, torch.Tensor]) -> None:
        """See `Exchange`."""
        self.inner.load_state(what, state)


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
        self._bytes_pushed = 0  # to other processes in this step
        self._bytes_pulled = 0  # of weights from other processes, since the step before
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
        # chunks that are held back, see `hold_back`
        self._held: list[tuple[Push, torch.Tensor | None]] = []
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
        self._bytes_pushed, self._unpushed = 0, self._count
        if self._compressor is not None:
            self._compressor.begin()
        self._lacking = None
        self._held.clear()

    def hold_back(self) -> None:
        """Hold the last chunk for each server back until `end`, so that the push that has begun may be taken back."""
        self._lacking = dict(self._each)

    def take_back(self) -> None:
        """Begin the push anew: its first chunk replaces all chunks that were pushed; see `Push`."""
        pushed = self._bytes_pushed
        self.begin(self._generation, self._version, self._incarnation, is_last=False)
        self.hold_back()
        self._bytes_pushed = pushed

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
        push = Push(*step, chunk, unit, total, sorted(absent) if absent else ())
        if self._lacking is not None and self._is_last(chunk, self._lacking):
            self._held.append((push, pushed))
        else:
            self._push(push, pushed)
        return self._unpushed > 0

    def _is_last(self, chunk: int, lacking: dict[int, int]) -> bool:
        """Count a chunk for its servers; return whether one of them would have the whole gradient with it."""
        has_passed = False
        for server in self._holders[chunk]:
            lacking[server] -= 1
            has_passed = has_passed or lacking[server] == 0
        return has_passed

    def _push(self, push: Push, payload: torch.Tensor | None) -> None:
        """Send a chunk to each of its servers."""
        for target in self._targets[push.chunk]:
            if payload is not None and target != self._own:
                self._bytes_pushed += payload.numel()
            self._send(target, push.pack(payload))

    def end(self) -> Sent:
        """Send the chunks that were held back, and return what has travelled."""
        for held in self._held:
            self._push(*held)
        self._held.clear()
        pulled, self._bytes_pulled = self._bytes_pulled, 0
        return Sent(self.sequence, self._bytes_pushed, pulled)

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
        if source != self._own:
            self._bytes_pulled += message.payload.nbytes
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
