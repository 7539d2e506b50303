"""What a server asks of each chunk that it holds: `ChunkStore`, of a store of gradients and of one of a state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from steepest.core.messages.message import PushId
from steepest.core.optim.spec import Hyperparameters
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import Chunk


@dataclass(slots=True)
class StagedPush:
    """One worker's staged gradient of one chunk, or the sum of several workers': ``unit / total * payload``.

    The payload must not change before it is applied.
    """

    workers: frozenset[int]  # the contributors
    payload: torch.Tensor | None  # flat bytes in the form of `codec`; None without any gradient
    unit: float  # weight of one unit of the payload
    total: float  # weight of the batch's samples
    absent: frozenset[int]  # entries that have no gradient
    codec: Codec | None  # None for the chunk's own dtype


class GradientStore(ABC):
    """The pushes that are staged on a server: of one chunk, or of opaque chunks that are pushed together.

    `ServerChunk` takes those of the dense parameters of one chunk. What takes those of opaque chunks is of
    another class, which the builder of the roles passes in, see `steepest.core.engine.stores.Stores`. A server treats
    stores of all classes alike:

    1. A gradient arrives. `fits` says whether its size can be right; `staging_buffer` returns memory for
       it, unless it is lent; `codec_of` checks it. The server then puts a `StagedPush` into `staged`.
       The memory of a push that is not kept goes to `release`.
    2. If all members contribute to each version, `reduce` forms the mean as soon as the last push is
       staged, and `squares` returns its sum of squares; otherwise `check` returns that of each push. `culprits` is
       called only if a sum of squares is not finite.
    3. The coordinator commits: `note_time` if a store keeps the time, `reduce` unless it was called
       before, `clip`, `apply`; then `forget` for each push of the commit. A version without an update (a gradient
       had NaN) is `forget` alone.
    4. A new generation begins: `discard`. A push is dropped: `forget`.

    All methods are called on the thread of the server's router, one at a time; none may wait for anything.
    The same calls in the same order leave the same bits: copies of a chunk on two servers, replays and
    recovery rely on that. A method that raises `ProtocolError` has changed nothing.

    Args:
        chunk: of the layout, by which pushes are named: the first of several.

    Attributes:
        is_opaque: whether the chunk is.
        staged: the pushes that are neither committed nor dropped, by their names.
        raised: the exception that the user's code raised in the last `apply`; None if it did not raise.
    """

    def __init__(self, chunk: Chunk) -> None:
        self.raised: BaseException | None = None
        self.chunk, self.is_opaque = chunk, chunk.is_opaque
        self.staged: dict[PushId, StagedPush] = {}
        # All staging memory, by id; a connection that breaks within a payload drops its buffer.
        self._buffers: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._spare: dict[int, list[torch.Tensor]] = {}  # free staging memory, by size

    def staging_buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory of `nbytes` bytes for one push; it is free again after `release`."""
        if spare := self._spare.get(nbytes):
            return spare.pop()
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._buffers[id(buffer)] = buffer
        return buffer

    def release(self, payload: torch.Tensor | None) -> None:
        """Make the memory of a payload free for another push, if it is a staging buffer."""
        if payload is not None and self._buffers.get(id(payload)) is payload:
            self._spare.setdefault(payload.numel(), []).append(payload)

    def own(self, payload: torch.Tensor) -> torch.Tensor:
        """Return a payload in this server's own memory, on the host a staging buffer: itself or a copy."""
        if not payload.is_cpu:
            return payload.clone()
        if self._buffers.get(id(payload)) is payload:
            return payload
        buffer = self.staging_buffer(payload.numel())
        buffer.copy_(payload)
        return buffer

    def contributors(self) -> set[int]:
        """Return the workers whose gradients are staged."""
        return {worker for push in self.staged.values() for worker in push.workers}

    def forget(self, push: PushId) -> None:
        """Drop a staged push; its memory is free for another one."""
        self.release(self.staged.pop(push).payload)

    def discard(self) -> None:
        """Drop all staged pushes and the mean; their memory is free for other pushes."""
        for push in self.staged.values():
            self.release(push.payload)
        self.staged.clear()
        self.drop_mean()

    @abstractmethod
    def fits(self, size: int, codec: Codec | None) -> bool:
        """Return whether a gradient may have so many bytes, as it is or in the form of a codec."""

    @abstractmethod
    def codec_of(self, payload: torch.Tensor | None, codec: Codec | None) -> Codec | None:
        """Return the codec of a gradient's payload, None for the chunk's own dtype.

        Raises:
            ProtocolError: the payload does not fit the codec.
        """

    @abstractmethod
    def drop_mean(self) -> None:
        """Forget the mean that `reduce` formed."""

    @abstractmethod
    def check(self, push: PushId) -> float:
        """Return the sum of squares of a staged gradient, the mean over its samples.

        It is not finite if an element is not, and 0 if the store computes no squares.
        """

    @abstractmethod
    def reduce(self, chosen: Iterable[PushId]) -> None:
        """Form the weighted mean of staged pushes, added up in the given order."""

    @abstractmethod
    def squares(self) -> float:
        """Return the sum of the squares of the mean; not finite when an element is not."""

    @abstractmethod
    def clip(self, factor: float) -> None:
        """Multiply the mean by a factor."""

    @abstractmethod
    def culprits(self, chosen: Iterable[PushId]) -> list[tuple[int, str]]:
        """Return (worker, name of a parameter) of each NaN or infinity in some staged gradients, each once.

        The worker is -1 where each gradient is finite and only their sum is not.
        """

    @abstractmethod
    def apply(
        self, hyper: Sequence[Hyperparameters], rate: float, buffer: torch.Tensor | None = None
    ) -> None:
        """Take one optimizer step with the mean, and drop the mean.

        Args:
            hyper: hyperparameters that a schedule changed, by group of the recipe.
            rate: factor of the learning rates.
            buffer: memory of the chunk's size for the new weights, when the old ones must not
                change; None to change them in place.

        Raises:
            BaseException: what the user's optimizer raised, which is kept as `raised`; weights and
                state may be updated in part.
        """

    def note_time(self, seconds: int) -> None:  # noqa: B027 - most stores keep no time
        """Note the coordinator's time of the next commit, in whole seconds since the epoch."""


class HeldChunk(ABC):
    """What a server holds of one chunk between two commits.

    State is read: `state` between two commits. State is installed: `check_state` for each record as it arrives,
    `try_state` when all have, `clear_state`, `load_state` for each, `end_state`. The job's statistics are read:
    `counts`, at any time. The weights move to other memory, which holds their values already: `move`.

    An opaque chunk has no bytes in the flat vector. Its `weights` are empty and never sent: it answers messages of its
    own, see `steepest.core.engine.stores.StoreService`. Threads, bits and errors are as of `GradientStore`.

    Args:
        chunk: of the layout.
        weights: its bytes, flat uint8; empty for an opaque chunk.

    Attributes:
        is_opaque: whether the chunk is.
    """

    def __init__(self, chunk: Chunk, weights: torch.Tensor) -> None:
        self.chunk, self.is_opaque = chunk, chunk.is_opaque
        self.weights = weights

    @abstractmethod
    def move(self, buffer: torch.Tensor) -> None:
        """Have the weights lie in other memory, which holds their values already."""

    def counts(self) -> dict[str, dict[str, int]]:
        """Return what the store counts, by name, for the statistics of a job: nothing by default."""
        return {}

    def change_to_send(self) -> torch.Tensor | None:
        """Return what workers are sent instead of the weights, or None, see `ServerChunk`; called for each version."""
        return None

    @property
    def sent(self) -> torch.Tensor | None:
        """The weights as workers of other hosts have them; None if they have the same."""
        return None

    def weights_set(self) -> None:  # noqa: B027 - most stores have nothing to note
        """Note that other weights were installed, which all workers will be sent."""

    @abstractmethod
    def state(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Return the state beside the weights: (description, tensor) of each part.

        The description has "name" (of the parameter), "key", "start", "stop" (the elements
        of a parameter) and "plain" (whether the tensor stands for a value that is none).
        """

    def take_from(self, other: HeldChunk) -> bool:
        """Take the state of a chunk of an ended server in this process without a copy.

        Return whether that was possible; if not, nothing has changed.
        """
        return False

    @abstractmethod
    def load_state(self, description: dict[str, Any], value: torch.Tensor) -> None:
        """Keep one record of the state, as `state` returned it; it takes effect with `end_state`.

        Args:
            description: of the record.
            value: its tensor, which becomes the chunk's without a copy.

        Raises:
            ProtocolError: the record does not belong to this chunk.
        """

    @abstractmethod
    def end_state(self) -> None:
        """Set the state from the records that were loaded; ProtocolError: they do not fit together."""

    @abstractmethod
    def check_state(self, description: dict[str, Any], value: torch.Tensor) -> Any:
        """Check that a record of `state` belongs to this chunk; ProtocolError otherwise."""

    @abstractmethod
    def try_state(self, records: Sequence[tuple[dict[str, Any], torch.Tensor]]) -> None:
        """Check, on a copy of the chunk, that a step can be taken from some of its records; ProtocolError otherwise."""

    @abstractmethod
    def clear_state(self) -> None:
        """Drop the state: the next step is taken as the first one."""


class ChunkStore(GradientStore, HeldChunk):
    """One chunk on its server: what it holds, and the pushes that are staged; `ServerChunk` is one."""

    def __init__(self, chunk: Chunk, weights: torch.Tensor) -> None:
        GradientStore.__init__(self, chunk)
        HeldChunk.__init__(self, chunk, weights)
