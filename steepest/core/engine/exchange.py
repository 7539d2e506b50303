"""What a worker asks of the part that moves its gradients to servers and brings weights back: `Exchange`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from steepest.core.engine.gradient_sum import ChunkReady
from steepest.core.engine.incoming_weights import Key
from steepest.core.engine.sample_places import Place
from steepest.core.messages.message import Message, MessageKind, Peer
from steepest.core.models.protocol import Model
from steepest.core.tensors.dtypes import Tensors
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

    @property
    def bytes_pushed(self) -> int:
        """Bytes to other processes in this step."""

    @property
    def bytes_pulled(self) -> int:
        """Bytes from other processes, so far."""

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

    def end(self) -> int:
        """Return the push's sequence number, once the whole gradient has been sent."""

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

    @property
    def bytes_pushed(self) -> int:
        """Bytes to other processes in this step."""
        return self.inner.bytes_pushed

    @property
    def bytes_pulled(self) -> int:
        """Bytes from other processes, so far."""
        return self.inner.bytes_pulled

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

    def end(self) -> int:
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
