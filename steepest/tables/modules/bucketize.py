"""Numbers as ids: the bucket in which each lies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from steepest.errors import ConfigurationError


class Bucketize(torch.nn.Module):
    """Buckets of numbers, as ids for an embedding table.

    The boundaries are not part of the module's state: the program sets them.

    Args:
        boundaries: finite numbers in ascending order. A number is in bucket n if n boundaries are at most as large.

    Attributes:
        num_embeddings: the number of buckets, one for NaN included, which is the last.

    Raises:
        ConfigurationError: there are no boundaries, or they are not finite or do not ascend.

    Example:
        >>> ages = Bucketize([18, 65])
        >>> ages(torch.tensor([17.5, 18.0, 90.0, float("nan")])), ages.num_embeddings
        (tensor([0, 1, 2, 3]), 4)
    """

    boundaries: torch.Tensor

    def __init__(self, boundaries: Sequence[float]) -> None:
        super().__init__()
        bounds = torch.as_tensor(boundaries, dtype=torch.float64)
        ascends = bounds.dim() == 1 and bool((bounds.diff() > 0).all())
        if not (ascends and len(bounds) and math.isfinite(float(bounds.abs().max()))):
            raise ConfigurationError(
                f"boundaries={boundaries!r:.80}: give one or more finite numbers in ascending order"
            )
        self.num_embeddings = len(bounds) + 2
        self.register_buffer("boundaries", bounds, persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bucket of each number: int64 of the same shape."""
        buckets = torch.bucketize(values.double(), self.boundaries, right=True)
        return buckets.masked_fill(values.isnan(), self.num_embeddings - 1)
