"""JAX in a process of this library: on the CPU, on memory that it shares with torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.dlpack

from steepest.errors import ConfigurationError

try:
    import jax
except ImportError as error:
    raise ConfigurationError(
        "models of JAX need JAX, Flax and optax, which are not installed: "
        "pip install 'steepest[jax]'"
    ) from error


@contextlib.contextmanager
def on_cpu(x64: bool) -> Iterator[None]:
    """Compute on the CPU in this context, with types of 64 bits if `x64`, whatever `jax_enable_x64` says."""
    with jax.enable_x64(x64), jax.default_device(jax.devices("cpu")[0]):
        yield


def to_numpy(tensor: torch.Tensor) -> Any:
    """Return a CPU tensor as an array in the same memory, as compiled functions of JAX take it.

    XLA computes on it where it lies if it begins at a multiple of 64 bytes, as parameters do, and on
    a copy otherwise: whoever writes to it waits for computations with it.
    """
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has it from JAX
        return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


def to_torch(array: Any) -> torch.Tensor:
    """Return a JAX array on the CPU as a tensor in the same memory, which is not to be written to."""
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """Return torch's dtype of a NumPy or JAX dtype's name, or None where torch has none."""
    kind = getattr(torch, str(dtype), None)
    return kind if isinstance(kind, torch.dtype) else None


def path_name(path: Any, separator: str = "/") -> str:
    """Return a leaf's path in a pytree as a name.

    Example:
        >>> path_name(jax.tree_util.tree_flatten_with_path({"dense": [1]})[0][0][0])
        'dense/0'
    """
    return str(jax.tree_util.keystr(path, simple=True, separator=separator))
