"""What a gradient's chunk travels as, where that is not the chunk itself; formats derive from `Codec`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from steepest.core.tensors.layout import Chunk, ParameterLayout

#: One chunk's matrices with which the next gradient's power iteration begins, by entry.
Factors = dict[int, Tensor]
#: Payloads, each with the factor by which it is multiplied.
Packed = Sequence[tuple[Tensor, float]]


class Codec:
    """What a worker pushes for a float32 chunk of its gradient, and how pushes are added up.

    A codec of one's own derives from it. Its methods are called on the thread of the worker's or
    the server's router, with one chunk at a time, and must give the same bits for the same
    arguments: that is what replays and copies of a chunk need. It has no state of its own; what a
    worker keeps from one gradient to the next is what `pack` leaves in `values`.

    Attributes:
        lossy: whether what `pack` leaves in `values` is added to the sender's next gradient. It is
            part of checkpoints.
        everywhere: whether pushes have this form inside a host and with one worker too, because it
            is part of the method; other codecs only save bytes between hosts.
        elements: the dtype of a payload that is nothing but the chunk's elements, rounded, which servers
            add as they are, without `add` and `finish`; None for every other form.

    Reference: Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback).
    """

    lossy: bool = False
    everywhere: bool = False
    elements: torch.dtype | None = None

    def size(self, layout: ParameterLayout, chunk: Chunk) -> int | None:
        """Return a chunk's size in bytes in this format; None where it travels as it is."""
        raise NotImplementedError

    def pack(
        self, layout: ParameterLayout, chunk: Chunk, values: Tensor, out: Tensor, factors: Factors
    ) -> bool:
        """Write a chunk in this format, and return whether it can be written so.

        Args:
            layout: of the model.
            chunk: of that layout, with n elements.
            values: (n,) float32, finite: the gradient, and of a lossy format what the one before
                left. Of a lossy format it holds what is left for the next one afterwards.
            out: flat uint8, of the format's size, overwritten.
            factors: tensors by the number of an entry, kept from the same sender's gradient before;
                changed.
        """
        raise NotImplementedError

    def check(self, layout: ParameterLayout, chunk: Chunk, payload: Tensor) -> None:
        """Check that a payload of the right size can be added: any can, by default.

        Raises:
            ProtocolError: it cannot.
        """

    def add(self, layout: ParameterLayout, chunk: Chunk, packed: Packed, out: Tensor) -> None:
        """Add payloads that were checked, each multiplied by a factor, to a chunk.

        Args:
            layout: of the model.
            chunk: of that layout, with n elements.
            packed: (payload, factor) pairs of all pushes of an update, in the order of their
                workers; the factors are each push's share of all samples' weight.
            out: (n,) float32, added to.
        """
        raise NotImplementedError

    def finish(self, layout: ParameterLayout, chunk: Chunk, out: Tensor) -> None:
        """Turn the sum of an update's pushes, (n,) float32, into its gradient, in place: by default it is."""
