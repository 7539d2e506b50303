"""Sums of squares, which give norms, and show whether all elements are finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sum_of_squares(vector: Tensor) -> float:
    """Return the sum of squares of a flat vector; infinite or NaN only when an element is."""
    if vector.dtype in (torch.float32, torch.float64):
        result = float(torch.dot(vector, vector))
    else:
        result = float(torch.linalg.vector_norm(vector, dtype=torch.float32)) ** 2
    if math.isfinite(result) or not bool(torch.isfinite(vector).all()):
        return result
    # Float32 overflowed.
    return min(float(torch.linalg.vector_norm(vector, dtype=torch.float64)), 1e154) ** 2
