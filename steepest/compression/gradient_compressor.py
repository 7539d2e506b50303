"""Error feedback: what a compressed gradient leaves out is added to the sender's next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch

from steepest.compression.codecs import Codec, Factors, sum_of_squares
from steepest.errors import CheckpointError
from steepest.tensors.layout import Chunk, ParameterLayout
from steepest.tensors.shared_memory import allocate

_ALIGNMENT = 64  # bytes


class GradientCompressor:
    """One sender's gradients, packed, with error feedback: what one leaves out is added to the next.

    What is left out of a gradient counts once that gradient is committed, so that a step that is
    repeated sends the same bytes. Error feedback: Seide et al. 2014; Karimireddy et al. 2019
    (arXiv:1901.09847) show why it converges.

    Args:
        layout: of the model.
        codec: the format.
        packed: by chunk, whether it is to be packed; others pass as they are.
        own_pending: copies what has not been sent yet of some memory, before that changes.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        codec: Codec,
        packed: Sequence[bool],
        own_pending: Callable[[torch.Tensor], None] = lambda memory: None,
    ) -> None:
        self._layout = layout
        self._codec = codec
        self._own_pending = own_pending
        self._places: dict[int, slice] = {}  # of each chunk in `_buffer`
        end = 0
        for chunk in layout.chunks:
            size = codec.size(layout, chunk) if packed[chunk.index] else None
            if size is not None and chunk.trainable:
                self._places[chunk.index] = slice(end, end + size)
                end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
        self._end = end
        self._buffer: torch.Tensor | None = None
        # By chunk: what was left out of the gradient of the worker's mean loss, float32.
        self._left: dict[int, torch.Tensor] = {}
        self._factors: dict[int, Factors] = {}
        self._spare: dict[int, torch.Tensor] = {}
        # The same of the last gradient, until it is committed.
        self._uncommitted: dict[int, tuple[torch.Tensor, Factors]] = {}

    def begin(self) -> None:
        """Begin a gradient; what the one before left out is dropped if that was not committed."""
        for chunk, (left, _) in self._uncommitted.items():
            self._spare[chunk] = left
        self._uncommitted.clear()

    def commit(self) -> None:
        """Keep what the last gradient left out: it is part of the weights now."""
        for chunk, (left, factors) in self._uncommitted.items():
            if chunk in self._left:
                self._spare[chunk] = self._left[chunk]
            self._left[chunk], self._factors[chunk] = left, factors
        self._uncommitted.clear()

    def pack(
        self, index: int, payload: torch.Tensor, unit: float, total: float, absent: frozenset[int]
    ) -> torch.Tensor:
        """Return one chunk as it travels; unchanged if it is not to be packed, or not finite.

        Args:
            index: of the chunk.
            payload: flat bytes; the gradient of the worker's mean loss is ``unit / total *
                payload``.
            unit: weight of one unit of the payload.
            total: weight of the worker's samples.
            absent: entries that have no gradient.

        Returns:
            Flat bytes, which the next gradient overwrites.
        """
        place = self._places.get(index)
        if place is None:
            return payload
        if self._buffer is None:
            self._buffer = allocate(self._end)
        chunk, out = self._layout.chunks[index], self._buffer[place]
        self._own_pending(out)
        if not self._codec.lossy:
            return (
                out
                if self._codec.pack(self._layout, chunk, payload.view(torch.float32), out, {})
                else payload
            )
        values = self._spare.pop(index, None)
        if values is None:
            values = torch.empty(chunk.nbytes // 4, dtype=torch.float32)
        gradient, left = payload.view(torch.float32), self._left.get(index)
        if left is None:
            values.copy_(gradient)
        else:
            torch.add(gradient, left, alpha=total / unit, out=values)
        if not math.isfinite(sum_of_squares(values)):
            self._spare[index] = values
            return payload
        for piece in self._absent(chunk, absent):
            values[piece] = 0.0
        factors = dict(self._factors.get(index, {}))
        self._codec.pack(self._layout, chunk, values, out, factors)
        if unit != total:
            values.mul_(unit / total)
        for piece in self._absent(chunk, absent):
            values[piece] = 0.0 if left is None else left[piece]
        self._uncommitted[index] = (values, factors)
        return out

    def _absent(self, chunk: Chunk, absent: frozenset[int]) -> Iterator[slice]:
        for piece in chunk.slices:
            if piece.entry in absent:
                begin = (self._layout.entries[piece.entry].offset - chunk.start) // 4 + piece.start
                yield slice(begin, begin + piece.stop - piece.start)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of what was left out so far: "left/PARAMETER", flat, and "factor/PARAMETER"."""
        found: dict[str, torch.Tensor] = {}
        for index, left in self._left.items():
            chunk = self._layout.chunks[index]
            for piece in chunk.slices:
                entry = self._layout.entries[piece.entry]
                whole = found.setdefault(f"left/{entry.name}", torch.zeros(entry.numel))
                begin = (entry.offset - chunk.start) // 4 + piece.start
                whole[piece.start : piece.stop] = left[begin : begin + piece.stop - piece.start]
            for number, factor in self._factors[index].items():
                found[f"factor/{self._layout.entries[number].name}"] = factor.clone()
        return found

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned, whatever the chunks were.

        From nothing, if it is empty.
        """
        self._left.clear()
        self._factors.clear()
        self.begin()
        for index in self._places if state else ():
            chunk = self._layout.chunks[index]
            left, factors = torch.zeros(chunk.nbytes // 4), self._factors.setdefault(index, {})
            for piece in chunk.slices:
                entry = self._layout.entries[piece.entry]
                whole = state.get(f"left/{entry.name}")
                begin = (entry.offset - chunk.start) // 4 + piece.start
                if whole is not None:
                    left[begin : begin + piece.stop - piece.start] = whole[piece.start : piece.stop]
                if (factor := state.get(f"factor/{entry.name}")) is not None:
                    factors[piece.entry] = factor.clone()
            self._left[index] = left


def check_residuals(layout: ParameterLayout, states: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """Check that what `GradientCompressor.state` returned is of this model.

    Raises:
        CheckpointError: it is not; says in what.
    """
    for key, value in chain.from_iterable(state.items() for state in states):
        kind, _, name = key.partition("/")
        entry = layout.entries[layout.index[name]] if name in layout.index else None
        if (
            kind not in ("left", "factor")
            or entry is None
            or (kind == "left" and value.shape != (entry.numel,))
        ):
            raise CheckpointError(
                f"what compression left out has {key!r} of shape {tuple(value.shape)}, the model "
                "not"
            )
