"""Optimizer state as messages: one tensor each, with what it is."""

from __future__ import annotations

import math
from typing import Any

import torch

from steepest.errors import ProtocolError
from steepest.messages.message import Message
from steepest.tensors.dtypes import as_bytes

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


def state_fields(about: dict[str, Any], value: torch.Tensor) -> dict[str, Any]:
    """Return the fields of a `StateTensor`, or `PutState`, that say what a record is, and its payload."""
    dtype, payload = (
        str(value.dtype).removeprefix("torch."),
        as_bytes(value) if value.numel() else None,
    )
    return {**about, "dtype": dtype, "shape": list(value.shape), "payload": payload}


def state_tensor(about: dict[str, Any], payload: torch.Tensor | None) -> torch.Tensor:
    """The tensor of a record."""
    dtype, shape = _form(about)
    size = 0 if payload is None else payload.numel()
    if math.prod(shape) * dtype.itemsize != size:
        raise ProtocolError(f"optimizer state of shape {shape} and dtype {dtype} in {size} bytes")
    if payload is None:
        return torch.empty(shape, dtype=dtype)
    return payload.view(dtype).view(shape)


def checked_state_size(message: Message, size: int) -> int:
    """The size of an arriving record, if it is what it says.

    Raises:
        ProtocolError: it is not.
    """
    dtype, shape = _form(message.values())
    if math.prod(shape) * dtype.itemsize != size:
        raise ProtocolError(f"optimizer state of shape {shape} and dtype {dtype} in {size} bytes")
    return size


def _form(about: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, shape = _DTYPES.get(about.get("dtype")), about.get("shape")  # type: ignore[arg-type]
    if dtype is None or not isinstance(shape, (list, tuple)) or len(shape) > _MOST_DIMENSIONS:
        raise ProtocolError(
            f"optimizer state of dtype {about.get('dtype')!r:.40} and shape {shape!r:.80}"
        )
    return dtype, tuple(shape)
