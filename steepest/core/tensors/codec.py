"""The formats in which chunks of gradients travel: subclasses of `Codec`."""

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
    """The form in which a worker pushes a float32 chunk of its gradient, and how pushes are added up.

    To write your own codec, derive from this class. Its methods are called on the thread of the
    worker's or the server's router, with one chunk at a time, and must give the same bits for the
    same arguments, because replays and copies of a chunk depend on that. It has no state of its own;
    a worker keeps from one gradient to the next only what `pack` leaves in `values`.

    Attributes:
        lossy: whether what `pack` leaves in `values` is added to the sender's next gradient. It is
            part of checkpoints.
        everywhere: whether pushes have this form inside a host and with one worker too, because it
            is part of the method; other codecs only save bytes between hosts.
        elements: the dtype of a payload that consists of the chunk's elements, rounded, which servers
            add directly, without `add` and `finish`; None for every other form.

    Reference: Seide et al. 2014, 1-Bit Stochastic Gradient Descent (error feedback).
    """

    lossy: bool = False
    everywhere: bool = False
    elements: torch.dtype | None = None

    def size(self, layout: ParameterLayout, chunk: Chunk) -> int | None:
        """Return a chunk's size in bytes in this format; None if it travels unchanged."""
        raise NotImplementedError

    def pack(
        self, layout: ParameterLayout, chunk: Chunk, values: Tensor, out: Tensor, factors: Factors
    ) -> bool:
        """Write a chunk in this format, and return whether it can be written so.

        Args:
            layout: of the model.
            chunk: of that layout, with n elements.
            values: (n,) float32, finite: the gradient, plus with a lossy format the error of the
                previous one. Afterwards a lossy format has left the error of this one in it.
            out: flat uint8, of the format's size, overwritten.
            factors: tensors by the number of an entry, kept from the same sender's previous gradient;
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
        """Turn the sum of an update's pushes, (n,) float32, into its gradient, in place; by default do nothing."""
