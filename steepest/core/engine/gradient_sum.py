"""The sum of the gradients of one worker's batches, formed chunk by chunk as they are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from steepest.core.engine.host_copies import HostCopies
from steepest.core.tensors.half_precision import sum_dtype
from steepest.core.tensors.layout import ParameterLayout
from steepest.errors import ModelError

#: Called with a complete chunk of the worker's gradient: chunk index, its bytes, unit weight,
#: summed weight of the worker's samples, and the entries for which no replica had a gradient.
ChunkReady = Callable[[int, torch.Tensor, float, float, frozenset[int]], object]

#: The bytes of a chunk of which there is no gradient.
NOTHING = torch.empty(0, dtype=torch.uint8)


class GradientSum:
    """A sum of the gradients of replicas and micro-batches (`count` in all), formed chunk by chunk.

    Args:
        total: the flat vector (uint8, of the layout's size) in which the sum is formed.
        chunk_ready: called with each chunk when the last batch has completed it.
        copies: of gradients that lie on a GPU, None to wait for each.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        total: torch.Tensor,
        count: int,
        chunk_ready: ChunkReady,
        copies: HostCopies | None = None,
    ) -> None:
        self._layout = layout
        self._sum = total
        self._batches_left = count
        self._chunk_ready = chunk_ready
        self._copies = copies
        if copies is not None:
            copies.drop()  # of a batch that raised
        self._unit = 0.0  # weight of the first batch with a weight, of those that ended
        self._weight = 0.0  # of the present batch
        self._total = 0.0  # weight of the batches that ended
        self._present: set[int] = set()
        # By chunk, sums of several batches in float32, since float16 or bfloat16 would be rounded at each batch. Then
        # means of all chunks are passed on, which overflow least and have one unit.
        self._wide: dict[int, torch.Tensor] = {}
        self._wide_dtypes = _wide_dtypes(layout) if count > 1 else {}

    def begin(self, gradients: torch.Tensor) -> None:
        """Begin the next batch, whose replica writes to `gradients`."""
        self._batches_left -= 1
        self._gradients = gradients
        self._missing = list(self._layout.chunk_elements)

    def begin_again(self) -> None:
        """Begin the only batch again: no gradient of it is ready any more."""
        if self._copies is not None:
            self._copies.drop()
        self._missing = list(self._layout.chunk_elements)
        self._present.clear()

    def end(self, weight: float) -> None:
        """End a batch of some weight; ModelError: `ready` was not called for every trainable parameter."""
        if self._copies is not None:
            self._copies.finish()
        for index in self._layout.trainable_chunks:
            if self._missing[index] > 0:
                names = ", ".join(
                    repr(self._layout.entries[s.entry].name)
                    for s in self._layout.chunks[index].slices
                )
                raise ModelError(
                    "compute_gradients returned before it had called ready for each of "
                    f"{names:.500}: call it once for "
                    "every trainable parameter"
                )
        self._unit = self._unit or weight
        self._total += weight

    def ready(self, entry: int, weight: float, present: bool, chunk: int | None = None) -> None:
        """Take an entry's gradient, or its part in a chunk, see `steepest.core.models.protocol.Ready`.

        A chunk is added when the last of its entries is here, and passed on if this is the last batch.
        """
        self._weight = weight
        if present and weight:
            self._present.add(entry)
        chunks = self._layout.chunks_of[entry]
        for index in chunks if chunk is None else (chunk,):
            if len(chunks) == 1:
                self._missing[index] -= self._layout.entries[entry].numel
            else:
                slices = self._layout.chunks[index].slices
                self._missing[index] -= sum(s.stop - s.start for s in slices if s.entry == entry)
            if self._missing[index] == 0:
                self._complete(index)

    def _complete(self, index: int) -> None:
        """Add the batch's gradient of a chunk to the sum, and pass that on after the last batch."""
        chunk = self._layout.chunks[index]
        wide = self._wide_dtypes.get(index)
        if self._gradients is self._sum and not self._unit:  # the first batch has written to it
            if self._batches_left == 0:
                self._pass_on(index, *self._about(index))
            elif wide is not None:
                own = self._layout.chunk_view(self._sum, index).view(chunk.dtype)
                self._wide[index] = own.to(wide)
            return
        total = self._layout.chunk_view(self._sum, index).view(chunk.dtype)
        own = self._layout.chunk_view(self._gradients, index).view(chunk.dtype)
        if self._unit:
            if self._weight:  # a batch without weight may hold NaN: a mean over nothing
                so_far = self._wide.get(index, total)
                so_far.add_(own.to(total.device), alpha=self._weight / self._unit)
        elif self._batches_left and wide is not None:
            self._wide[index] = own.to(total.device, wide)
        elif own.data_ptr() != total.data_ptr():
            if self._copies is not None and self._batches_left == 0:
                self._copies.start(total, own, partial(self._pass_on, index, *self._about(index)))
                self._copies.poll()
                return
            total.copy_(own)
        if self._batches_left == 0:
            if self._unit and self._wide_dtypes:
                weight = self._total + self._weight
                total.copy_(self._wide.pop(index, total).div_(weight / self._unit))
            self._pass_on(index, *self._about(index))

    def _about(self, index: int) -> tuple[float, float, frozenset[int]]:
        """Return unit, summed weight and entries without a gradient of a chunk that the last batch has completed."""
        slices = self._layout.chunks[index].slices
        absent = frozenset(s.entry for s in slices if s.entry not in self._present)
        total = self._total + self._weight
        return total if self._wide_dtypes else self._unit or self._weight, total, absent

    def _pass_on(self, index: int, unit: float, weight: float, absent: frozenset[int]) -> None:
        """Pass on the sum of a chunk."""
        total = self._layout.chunk_view(self._sum, index)
        self._chunk_ready(index, total if unit else NOTHING, unit, weight, absent)


def _wide_dtypes(layout: ParameterLayout) -> dict[int, torch.dtype]:
    """Return, by chunk, the dtype in which gradients are added up if it is not the chunk's own."""
    own = {index: layout.chunks[index].dtype for index in layout.trainable_chunks}
    return {
        index: sum_dtype(dtype) for index, dtype in own.items() if sum_dtype(dtype) is not dtype
    }
