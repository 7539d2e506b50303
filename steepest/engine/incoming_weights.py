"""Weights as they arrive: into a flat vector, or where they lie in memory that several processes share."""

from __future__ import annotations

import torch

from steepest.errors import ProtocolError
from steepest.messages.gradients import Weights
from steepest.messages.message import Kind, Message
from steepest.tensors.half_precision import narrow_size
from steepest.tensors.layout import ParameterLayout
from steepest.tensors.memory import address_of, as_tensor

Key = tuple[int, int]  # generation and version, which only grow


def where_lent(message: Message, size: int) -> torch.Tensor:
    """Return the memory that a message's payload is lent in, or new memory for a payload that has to be received."""
    return (
        as_tensor(message.payload)
        if message.payload is not None
        else torch.empty(size, dtype=torch.uint8)
    )


class ArrivingWeights:
    """A reader's view of the weights, and which version of each chunk it holds.

    Args:
        reader: for errors.
        vector: uint8, flat: where chunks are written as they arrive.
        wire_dtype: in which float32 chunks may come; None for as they are.
    """

    def __init__(
        self,
        reader: str,
        layout: ParameterLayout,
        vector: torch.Tensor,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.vector = vector
        self.newest: Key = (-1, -1)  # of which anything has come
        self._reader = reader
        self._layout = layout
        self._wire_dtype = wire_dtype
        self._newest: list[Key] = [(-1, -1)] * len(layout.chunks)
        self._all = frozenset(range(len(layout.chunks)))
        self._trainable = frozenset(chunk.index for chunk in layout.chunks if chunk.trainable)
        self._awaited: dict[Key, set[int]] = {}  # chunks still to come

    def destination(self, message: Message, size: int) -> torch.Tensor | None:
        """Where an arriving chunk goes: into the vector; not anywhere when it lies there already, or is old."""
        if message.kind is not Kind.WEIGHTS or not 0 <= message.chunk < len(self._layout.chunks):
            raise ProtocolError(f"{self._reader} takes no payload of {message.kind.name}")
        view = self._layout.chunk_view(self.vector, message.chunk)
        is_new = (message.generation, message.version) > self._newest[message.chunk]
        if size == narrow_size(
            self._layout.chunks[message.chunk].dtype, view.numel(), self._wire_dtype
        ):
            if not is_new:
                return None
            return where_lent(message, size)
        if view.numel() != size:
            raise ProtocolError(f"chunk {message.chunk} has {view.numel()} bytes, {size} arrive")
        if message.payload is not None and address_of(message.payload) == view.data_ptr():
            return as_tensor(message.payload)
        return view if is_new else None

    def receive(self, message: Message) -> Weights | None:
        """Take a chunk that has arrived; return it if it is newer than the one before, otherwise None.

        Raises:
            ProtocolError: the message has no weights.
        """
        if message.kind is not Kind.WEIGHTS:
            raise ProtocolError(f"{self._reader} does not take {message.kind.name}")
        weights = Weights.unpack(message)
        payload = weights.payload
        key = (weights.generation, weights.version)
        if payload is None or key <= self._newest[weights.chunk]:
            return None  # old, or a copy
        self._newest[weights.chunk] = key
        self.newest = max(self.newest, key)
        view = self._layout.chunk_view(self.vector, weights.chunk)
        if payload.numel() != view.numel():
            assert self._wire_dtype is not None
            view.view(torch.float32).copy_(payload.view(self._wire_dtype))
        elif payload.data_ptr() != view.data_ptr():
            view.copy_(payload)
        if key not in self._awaited:
            self._awaited[key] = set(self._all if weights.reload else self._trainable)
        self._awaited[key].discard(weights.chunk)
        return weights

    def has(self, entry: int | None, key: Key) -> bool:
        """Whether all of a trainable parameter (of all, with None) is there at that version, or a later one."""
        chunks = self._trainable if entry is None else self._layout.chunks_of[entry]
        return all(self._newest[chunk] >= key for chunk in chunks)

    def completed(self, key: Key) -> bool:
        """Whether all chunks of that version are there; then it and those before it are forgotten."""
        if self._awaited.get(key, {0}):
            return False
        self._awaited = {later: left for later, left in self._awaited.items() if later > key}
        return True
