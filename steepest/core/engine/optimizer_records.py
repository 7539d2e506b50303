"""Optimizer state as messages: one tensor each, with its name, dtype and shape."""

from __future__ import annotations

import math
from typing import Any

import torch

from steepest.core.messages.snapshots import PutState, StateTensor
from steepest.core.tensors.dtypes import as_bytes
from steepest.errors import ProtocolError

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.complex128,
        ),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
_MOST_DIMENSIONS = 64


def state_fields(
    description: dict[str, Any], value: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Return the fields of a record (see `ServerChunk.state`) for a `StateTensor` or `PutState`, and its payload.

    The payload lies in the tensor's memory, which is lent if it can be; None for a tensor without elements.
    """
    dtype = str(value.dtype).removeprefix("torch.")
    fields = {**description, "dtype": dtype, "shape": list(value.shape)}
    return fields, as_bytes(value) if value.numel() else None


def state_tensor(description: dict[str, Any], payload: torch.Tensor | None) -> torch.Tensor:
    """Return a record's tensor of its "dtype" and "shape": a view of its payload.

    Raises:
        ProtocolError: the payload has another size.
    """
    dtype, shape = _form(description)
    size = 0 if payload is None else payload.numel()
    if math.prod(shape) * dtype.itemsize != size:
        raise ProtocolError(f"optimizer state of shape {shape} and dtype {dtype} in {size} bytes")
    if payload is None:
        return torch.empty(shape, dtype=dtype)
    return payload.view(dtype).view(shape)


def checked_state_size(record: StateTensor | PutState, size: int) -> int:
    """Return the size in bytes of an arriving record's payload; ProtocolError: not its dtype's and shape's."""
    dtype, shape = _form(record.about)
    if math.prod(shape) * dtype.itemsize != size:
        raise ProtocolError(f"optimizer state of shape {shape} and dtype {dtype} in {size} bytes")
    return size


def _form(description: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a record; ProtocolError: its description has none, or invalid ones."""
    dtype, shape = _DTYPES.get(description.get("dtype")), description.get("shape")  # type: ignore[arg-type]
    if dtype is None or not isinstance(shape, (list, tuple)) or len(shape) > _MOST_DIMENSIONS:
        raise ProtocolError(
            f"optimizer state of dtype {description.get('dtype')!r:.40} and shape {shape!r:.80}"
        )
    return dtype, tuple(shape)
