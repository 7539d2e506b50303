"""Flat memory, NumPy's or torch's, and sums of squares in it: a process without tensors does without torch."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
#: Contiguous one-dimensional uint8 memory: a NumPy array or a CPU tensor.
Memory = Any


def is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a torch tensor, without importing torch."""
    return (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor)


def as_array(memory: Memory) -> Bytes:
    """Return memory as a NumPy array of the same bytes, without a copy."""
    array: Bytes = memory if isinstance(memory, np.ndarray) else memory.numpy()
    return array


def as_tensor(memory: Memory) -> torch.Tensor:
    """Return memory as a tensor of the same bytes, without a copy; imports torch."""
    import torch

    return torch.from_numpy(memory) if isinstance(memory, np.ndarray) else memory


def fill(target: torch.Tensor, source: Bytes) -> None:
    """Write an array's bytes to a tensor of the same size on any device; the array may be read-only."""
    if target.is_cpu:
        target.numpy()[:] = source
    else:
        target.copy_(as_tensor(source if source.flags.writeable else source.copy()))


def address_of(memory: Memory) -> int:
    """Return the address of memory's first byte."""
    address: int
    if isinstance(memory, np.ndarray):
        address = memory.__array_interface__["data"][0]
    else:
        import torch

        address = torch._C.TensorBase.data_ptr(
            memory
        )  # a loop's own reading of addresses is watched
    return address


def clone(memory: Memory) -> Memory:
    """Return a copy, of the same kind."""
    return memory.copy() if isinstance(memory, np.ndarray) else memory.clone()


def copy_bytes(target: Memory, source: Memory) -> None:
    """Copy memory to other memory of the same size, with torch's threads if either is a tensor."""
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        target[:] = source
    else:
        as_tensor(target).copy_(as_tensor(source))


def sum_of_squares(vector: torch.Tensor) -> float:
    """Return the sum of squares of a flat vector; infinite or NaN only when an element is."""
    import torch

    if vector.dtype in (torch.float32, torch.float64):
        result = float(torch.dot(vector, vector))
    else:
        result = float(torch.linalg.vector_norm(vector, dtype=torch.float32)) ** 2
    if math.isfinite(result) or not bool(torch.isfinite(vector).all()):
        return result
    # Float32 overflowed.
    return min(float(torch.linalg.vector_norm(vector, dtype=torch.float64)), 1e154) ** 2
