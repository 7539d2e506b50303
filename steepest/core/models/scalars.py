"""Numbers as users' code returns them: Python's, NumPy's, or tensors without dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


def as_number(value: Any) -> float | None:
    """Return a real number as a float, or None for anything else.

    Args:
        value: a bool, an int, a float, a NumPy scalar, or a tensor or NumPy array without
            dimensions, of any real dtype and on any device.

    Example:
        >>> as_number(torch.tensor(True)), as_number(np.float32(0.5)), as_number("0.5")
        (1.0, 0.5, None)
    """
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, _NUMBERS):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def describe(value: Any) -> str:
    """Return the type, and of arrays shape and dtype, of a value that is no number, for errors.

    Example:
        >>> describe(torch.zeros(3)), describe({"a": 1})
        ('a tensor of shape (3,) and dtype torch.float32', 'dict')
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    return type(value).__name__
