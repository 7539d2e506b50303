"""Tensors of any dtype: merged over replicas, compared and pickled.

Torch computes only with some of its dtypes (it has no maximum of uint16), and pickles others in a
form that cannot be unpickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch


class Tensors(dict[str, torch.Tensor]):
    """Tensors by name that are pickled as their bytes, whatever their dtypes."""

    def __reduce__(self) -> tuple[Any, ...]:
        parts = [
            (name, value.dtype, tuple(value.shape), as_bytes(value)) for name, value in self.items()
        ]
        return _restored, (parts,)


def _restored(parts: Iterable[tuple[str, torch.dtype, tuple[int, ...], torch.Tensor]]) -> Tensors:
    return Tensors((name, raw.view(dtype).view(shape)) for name, dtype, shape, raw in parts)


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as flat uint8, in the same memory if they lie in order."""
    flat = value.resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)  # a single element has any stride


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two CPU tensors of one shape and dtype have the same bits (NaN equals NaN)."""
    return torch.equal(as_bytes(a), as_bytes(b))


#: The name of the state of a user's loop among the values that a replica changes itself: bytes, of varying number, that
#: are not part of a module's state.
LOOP_STATE = "steepest/loop"


def furthest(states: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return, of several replicas' loop states, the one that has taken the most batches, as its first bytes show."""
    return max(states, key=lambda state: int.from_bytes(state[:8].numpy().tobytes(), "little"))


def merge_replicas(values: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return one tensor made of several replicas' values of it.

    Args:
        values: one tensor of each replica, on the CPU, of one shape and dtype.
        weights: the weight of each in the mean.

    Returns:
        The weighted mean of floating-point and complex numbers, computed in double precision; the
        maximum of integers; for bool whether any is true. Elements that are equal in all values
        keep their bits. The first value, if the weights are all zero or torch cannot convert the
        dtype (packed bits).
    """
    first, total = values[0], sum(weights)
    if first.is_complex():
        return torch.view_as_complex(
            merge_replicas([torch.view_as_real(value.resolve_conj()) for value in values], weights)
        )
    if len(values) == 1 or (first.is_floating_point() and total <= 0):
        return first.clone()
    try:
        if first.is_floating_point():
            mean = torch.zeros(first.shape, dtype=torch.float64)
            alike = torch.ones(first.shape, dtype=torch.bool)
            for value, weight in zip(values, weights, strict=True):
                mean += value.double() * (weight / total)
                alike &= value.double() == first.double()
            return torch.where(alike, first.double(), mean).to(first.dtype)
        greatest = np.stack([value.numpy() for value in values]).max(axis=0, keepdims=True)
        return torch.from_numpy(greatest).view(first.shape)
    except (NotImplementedError, TypeError):
        return first.clone()
