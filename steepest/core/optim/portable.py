"""Values of an optimizer's state as tensors, in which they travel and are saved, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from steepest.core.optim.json_values import from_json, to_json

#: One tensor of optimizer state of one slice: the index of its chunk, its description, its values.
Record = tuple[int, dict[str, Any], torch.Tensor]
#: A value as tensors: by key, a tensor, and whether it stands for a plain value.
Packed = dict[str, tuple[torch.Tensor, bool]]

_BITS = 63  # of an integer that fits into a tensor
_INSIDE = ":"  # before the number of a tensor inside of a container
_DTYPES = frozenset(
    {
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.complex64, torch.complex128, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    }
)


def pack(key: str, value: Any) -> Packed:
    """Return a value of an optimizer's state as tensors.

    A tensor is itself. A bool, an int or a float is a tensor without dimensions that stands for it.
    Anything else, as `to_json` takes it, with tensors anywhere inside, is JSON in the bytes of a
    tensor; the tensors inside have the keys "KEY:0", "KEY:1" and so on.

    Args:
        key: under which the optimizer has the value.
        value: is not copied.

    Raises:
        TypeError: it is, or holds, a value that cannot be carried, which the error names.
    """
    if isinstance(value, torch.Tensor):
        return {key: (_checked(value), False)}
    if type(value) in (bool, float):
        dtype = torch.bool if type(value) is bool else torch.float64
        return {key: (torch.tensor(value, dtype=dtype), True)}
    if type(value) is int and value.bit_length() <= _BITS:
        return {key: (torch.tensor(value, dtype=torch.int64), True)}
    inside: list[torch.Tensor] = []

    def number(tensor: Any) -> int | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        inside.append(_checked(tensor))
        return len(inside) - 1

    text = json.dumps(to_json(value, number)).encode()
    packed = {key: (torch.frombuffer(bytearray(text), dtype=torch.uint8), True)}
    return packed | {f"{key}{_INSIDE}{i}": (each, False) for i, each in enumerate(inside)}


def _checked(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its history; TypeError: it cannot be carried."""
    if value.layout is not torch.strided or value.dtype not in _DTYPES:
        raise TypeError(f"a tensor of {value.layout} and {value.dtype} cannot be carried")
    return value.detach() if value.requires_grad else value


def pack_all(values: Mapping[Any, Any]) -> Packed:
    """Return values by key as tensors, see `pack`; TypeError names the value or key that cannot be carried."""
    packed: Packed = {}
    for key, value in values.items():
        if type(key) is not str or "/" in key:
            raise TypeError(f"the key {key!r:.80}, which is no text without a slash")
        try:
            parts = pack(key, value)
        except TypeError as error:
            raise TypeError(f"{key!r} of type {type(value).__name__} ({error})") from error
        if both := parts.keys() & packed.keys():
            raise TypeError(f"{key!r}, which has a part named {min(both)!r} as another key is")
        packed |= parts
    return packed


def is_text(value: torch.Tensor) -> bool:
    """Return whether a tensor that stands for another value holds JSON."""
    return value.ndim == 1 and value.dtype is torch.uint8


def check_packed(value: torch.Tensor) -> None:
    """Check a tensor that stands for a plain value; ValueError: `pack` makes no such tensor."""
    if is_text(value):
        from_json(json.loads(value.numpy().tobytes()), lambda number: None)
    elif value.numel() != 1:
        raise ValueError(f"a plain value in a tensor of shape {tuple(value.shape)}")


def unpack(packed: Mapping[str, tuple[torch.Tensor, bool]]) -> dict[str, Any]:
    """Return values by key, as before `pack`, with tensors not copied.

    Raises:
        ValueError: parts are missing or invalid.
    """
    values: dict[str, Any] = {}
    used: set[str] = set()
    for key, (tensor, plain) in packed.items():
        if not plain:
            continue
        check_packed(tensor)
        if not is_text(tensor):
            values[key] = tensor.item()
            continue

        def inside(number: int, key: str = key) -> torch.Tensor:
            name = f"{key}{_INSIDE}{number}"
            part, is_plain = packed.get(name, (None, True))
            if part is None or is_plain:
                raise ValueError(f"{name!r} is missing")
            used.add(name)
            return part

        values[key] = from_json(json.loads(tensor.numpy().tobytes()), inside)
    rest = {k: v for k, (v, plain) in packed.items() if not plain and k not in used}
    return values | rest
