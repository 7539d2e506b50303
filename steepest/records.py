"""Optimizer state as messages: one tensor each, with what it is."""

from __future__ import annotations

import math
from typing import Any

import torch

from steepest.comm.message import Kind, Message
from steepest.dtypes import as_bytes
from steepest.errors import ProtocolError


def state_message(sequence: int, chunk: int, about: dict[str, Any], value: torch.Tensor) -> Message:
    """One record of optimizer state as a message."""
    meta = {**about, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    payload = as_bytes(value) if value.numel() else None
    return Message(Kind.STATE, sequence=sequence, chunk=chunk, meta=meta, payload=payload)


def state_tensor(about: dict[str, Any], payload: torch.Tensor | None) -> torch.Tensor:
    """The tensor of a STATE message."""
    dtype = getattr(torch, str(about["dtype"]), None)
    if not isinstance(dtype, torch.dtype):
        raise ProtocolError(f"optimizer state of unknown dtype {about['dtype']!r}")
    if payload is None:
        return torch.empty(about["shape"], dtype=dtype)
    return payload.view(dtype).view(tuple(about["shape"]))


def checked_state_size(message: Message, size: int) -> int:
    """The size of an arriving record, if it is what it says.

    Raises:
        ProtocolError: it is not.
    """
    about = message.values()
    dtype = getattr(torch, str(about.get("dtype")), None)
    shape = about.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list):
        raise ProtocolError("optimizer state without dtype or shape")
    if math.prod(int(n) for n in shape) * dtype.itemsize != size:
        raise ProtocolError(f"optimizer state of shape {shape} and dtype {dtype} in {size} bytes")
    return size
