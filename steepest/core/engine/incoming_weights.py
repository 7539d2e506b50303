"""Weights as they arrive at a reader: into its flat vector, or left in shared memory."""

from __future__ import annotations

import torch

from steepest.core.messages.gradients import Weights
from steepest.core.messages.message import Kind, Message
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.half_precision import narrow_size
from steepest.core.tensors.layout import ParameterLayout
from steepest.core.tensors.memory import Memory, address_of, as_array, as_tensor
from steepest.errors import ProtocolError

#: Generation and version, which only grow.
Key = tuple[int, int]


def where_lent(message: Message, size: int) -> torch.Tensor:
    """Return the memory in which a message's payload is lent, or `size` new bytes to receive it."""
    return (
        as_tensor(message.payload)
        if message.payload is not None
        else torch.empty(size, dtype=torch.uint8)
    )


class ArrivingWeights:
    """A reader's flat vector of weights, to which chunks are written as they arrive, and the version of each.

    Args:
        reader: its name, for errors.
        vector: uint8, flat, of the layout's size; the attribute may be set to another one.
        wire_dtype: half precision in which float32 chunks may come; None if they come as they are.
        codec: the form in which changes of chunks may come; None for none.
    """

    def __init__(
        self,
        reader: str,
        layout: ParameterLayout,
        vector: torch.Tensor,
        wire_dtype: torch.dtype | None,
        codec: Codec | None = None,
    ) -> None:
        self.newest: Key = (-1, -1)  # generation and version of which any chunk has arrived
        self._reader = reader
        self._layout = layout
        self._wire_dtype, self._codec = wire_dtype, codec
        # by chunk, the size of a change in bytes; None if no changes come
        self._packed = [None if codec is None else codec.size(layout, c) for c in layout.chunks]
        self.vector = vector
        self._newest: list[Key] = [(-1, -1)] * len(layout.chunks)
        dense = [chunk for chunk in layout.chunks if not chunk.is_opaque]
        self._all = frozenset(chunk.index for chunk in dense)
        self._awaited: dict[Key, set[int]] = {}  # chunks still to come

    @property
    def vector(self) -> torch.Tensor:
        """The flat vector."""
        return self._vector

    @vector.setter
    def vector(self, vector: torch.Tensor) -> None:
        self._vector = vector
        layout = self._layout
        # Made once: a chunk's bytes, and their address.
        self._on_host = vector.device.type == "cpu"
        parts = [layout.chunk_view(vector, chunk.index) for chunk in layout.chunks]
        views = [as_array(part) for part in parts] if self._on_host else parts
        self._views = [(view, address_of(view)) for view in views]

    def chunk(self, index: int) -> Memory:
        """Return a chunk's bytes in the vector."""
        return self._views[index][0]

    def destination(self, message: Message, size: int) -> Memory | None:
        """Return memory of `size` bytes for an arriving WEIGHTS, in the vector if possible; None to drop an old chunk.

        Raises:
            ProtocolError: the chunk has another size.
        """
        if message.kind is not Kind.WEIGHTS:
            raise ProtocolError(f"{self._reader} takes no payload of {message.kind.name}")
        weights: Weights = message.body
        view, address = self._views[weights.chunk]
        is_new = (weights.generation, weights.version) > self._newest[weights.chunk]
        dtype = self._layout.chunks[weights.chunk].dtype
        if self._codec is not None and self._is_of_changes(weights.chunk, size):
            return where_lent(message, size) if is_new else None
        if self._wire_dtype and size == narrow_size(dtype, view.nbytes, self._wire_dtype):
            return where_lent(message, size) if is_new else None
        if view.nbytes != size:
            raise ProtocolError(f"chunk {weights.chunk} has {view.nbytes} bytes, {size} arrive")
        if message.payload is not None and address_of(message.payload) == address:
            return message.payload
        if not is_new:
            return None
        return view if self._on_host else where_lent(message, size)

    def receive(self, message: Message) -> Weights | None:
        """Write an arrived chunk to the vector; return its fields, or None if the vector has it or a newer one.

        Raises:
            ProtocolError: the message is not WEIGHTS.
        """
        if message.kind is not Kind.WEIGHTS:
            raise ProtocolError(f"{self._reader} does not take {message.kind.name}")
        weights: Weights = message.body
        payload = message.payload
        key = (weights.generation, weights.version)
        if payload is None or key <= self._newest[weights.chunk]:
            return None  # old, or a copy
        self._newest[weights.chunk] = key
        self.newest = max(self.newest, key)
        view, address = self._views[weights.chunk]
        if self._codec is not None and self._is_of_changes(weights.chunk, payload.nbytes):
            self._add_changes(weights.chunk, as_tensor(payload))
        elif payload.nbytes != view.nbytes:
            assert self._wire_dtype is not None
            narrow = as_tensor(payload).view(self._wire_dtype)
            as_tensor(view).view(torch.float32).copy_(narrow)
        elif address_of(payload) != address:
            as_tensor(view).copy_(as_tensor(payload))
        if key not in self._awaited:
            self._awaited[key] = set(self._all if weights.reload else self._sent_with(weights))
        self._awaited[key].discard(weights.chunk)
        return weights

    def _is_of_changes(self, chunk: int, size: int) -> bool:
        """Return whether a payload of `size` bytes holds changes of a chunk, one or several."""
        packed = self._packed[chunk]
        if packed is None or size >= self._views[chunk][0].nbytes:
            return False
        return size > 0 and size % packed == 0

    def _add_changes(self, index: int, payload: torch.Tensor) -> None:
        """Add changes, one after the other, to a chunk."""
        codec, size = self._codec, self._packed[index]
        assert codec is not None
        assert size is not None
        chunk, values = self._layout.chunks[index], as_tensor(self.chunk(index)).view(torch.float32)
        for at in range(0, payload.numel(), size):
            packed = payload[at : at + size]
            codec.add(self._layout, chunk, [(packed.clone() if at else packed, 1.0)], values)

    def _sent_with(self, weights: Weights) -> frozenset[int]:
        """Return the chunks that readers are sent of the version of a message."""
        if weights.fragments is None:
            return self._layout.changed_by(weights.version)
        return self._layout.of_fragments(weights.fragments)

    def missing(self, key: Key) -> list[int]:
        """Return the chunks of a version that have not come in it or a later one; any thread may call this."""
        changed = self._layout.changed_by(key[1]) if self.newest[1] >= 0 else self._all
        chunks = self._awaited.get(key, changed)
        return [chunk for chunk in chunks if self._newest[chunk] < key]

    def completed(self, key: Key) -> bool:
        """Return whether all chunks of a version are here; if so, it and earlier ones are not awaited any more."""
        if self._awaited.get(key, {0}):
            return False
        self._awaited = {later: chunks for later, chunks in self._awaited.items() if later > key}
        return True
