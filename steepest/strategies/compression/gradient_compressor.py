"""Error feedback: the error of a compressed gradient is added to the sender's next one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch

from steepest.core.tensors.codec import Codec, Factors
from steepest.core.tensors.layout import Chunk, ParameterLayout, Slice
from steepest.core.tensors.memory import sum_of_squares
from steepest.core.tensors.shared_memory import allocate
from steepest.errors import CheckpointError

_ALIGNMENT = 64  # bytes


class GradientCompressor:
    """A sender's codec, with error feedback: the error of one gradient is added to the next.

    The error of a gradient counts once that gradient is committed, so that a repeated step sends the
    same bytes. Error feedback: Seide et al. 2014; Karimireddy et al. 2019 (arXiv:1901.09847) show
    why it converges.

    Args:
        layout: of the model.
        codec: the format.
        packed: by chunk, whether it is to be packed; others pass unchanged.
        own_pending: copies the unsent part of some memory, before that changes.
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
        self._spans: dict[int, slice] = {}  # by chunk, its bytes in `_buffer`
        end = 0
        for chunk in layout.chunks:
            size = codec.size(layout, chunk) if packed[chunk.index] else None
            if size is not None and chunk.trainable:
                self._spans[chunk.index] = slice(end, end + size)
                end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
        self._end = end
        self._buffer: torch.Tensor | None = None
        # By chunk: what was left out of the gradient of the worker's mean loss, float32.
        self._residuals: dict[int, torch.Tensor] = {}
        self._factors: dict[int, Factors] = {}
        self._spare: dict[int, torch.Tensor] = {}
        # The same of the last gradient, until it is committed.
        self._uncommitted: dict[int, tuple[torch.Tensor, Factors]] = {}

    def begin(self) -> None:
        """Begin a gradient; the error of the last one is dropped unless it was committed."""
        for chunk, (residual, _) in self._uncommitted.items():
            self._spare[chunk] = residual
        self._uncommitted.clear()

    def commit(self) -> None:
        """Keep what the last gradient left out: it is part of the weights now."""
        for chunk, (residual, factors) in self._uncommitted.items():
            if chunk in self._residuals:
                self._spare[chunk] = self._residuals[chunk]
            self._residuals[chunk], self._factors[chunk] = residual, factors
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
        span = self._spans.get(index)
        if span is None:
            return payload
        if self._buffer is None:
            self._buffer = allocate(self._end)
        chunk, out = self._layout.chunks[index], self._buffer[span]
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
        gradient, residual = payload.view(torch.float32), self._residuals.get(index)
        if residual is None:
            values.copy_(gradient)
        else:
            torch.add(gradient, residual, alpha=total / unit, out=values)
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
            values[piece] = 0.0 if residual is None else residual[piece]
        self._uncommitted[index] = (values, factors)
        return out

    def _span_of(self, chunk: Chunk, piece: Slice) -> slice:
        """Return the elements of a chunk that are a slice's."""
        begin = (self._layout.entries[piece.entry].offset - chunk.start) // 4 + piece.start
        return slice(begin, begin + piece.stop - piece.start)

    def _absent(self, chunk: Chunk, absent: frozenset[int]) -> Iterator[slice]:
        """Yield the elements of a chunk that have no gradient."""
        for piece in chunk.slices:
            if piece.entry in absent:
                yield self._span_of(chunk, piece)

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of what was left out so far, by "left/PARAMETER" and "factor/PARAMETER".

        The former are flat float32 tensors of the parameter's size, the latter (rank, columns).
        """
        residuals: dict[str, torch.Tensor] = {}
        for index, residual in self._residuals.items():
            chunk = self._layout.chunks[index]
            for piece in chunk.slices:
                entry = self._layout.entries[piece.entry]
                whole = residuals.setdefault(f"left/{entry.name}", torch.zeros(entry.numel))
                whole[piece.start : piece.stop] = residual[self._span_of(chunk, piece)]
            for number, factor in self._factors[index].items():
                residuals[f"factor/{self._layout.entries[number].name}"] = factor.clone()
        return residuals

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from what `state` returned, of whatever chunks; empty to begin with nothing left out."""
        self._residuals.clear()
        self._factors.clear()
        self.begin()
        for index in self._spans if state else ():
            chunk = self._layout.chunks[index]
            residual, factors = torch.zeros(chunk.nbytes // 4), self._factors.setdefault(index, {})
            for piece in chunk.slices:
                entry = self._layout.entries[piece.entry]
                whole = state.get(f"left/{entry.name}")
                if whole is not None:
                    residual[self._span_of(chunk, piece)] = whole[piece.start : piece.stop]
                if (factor := state.get(f"factor/{entry.name}")) is not None:
                    factors[piece.entry] = factor.clone()
            self._residuals[index] = residual


def check_residuals(layout: ParameterLayout, states: Iterable[Mapping[str, torch.Tensor]]) -> None:
    """Check that what `GradientCompressor.state` returned is of this model; CheckpointError says in what not."""
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
