"""What a user keeps with a loop's state, and that state as bytes: plain values and tensors, nothing is pickled."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from steepest.core.optim.json_values import from_json, to_json
from steepest.errors import ConfigurationError
from steepest.loop.kept_values import FindClass, copied, form_of, is_small, restored

_LENGTH = (
    8  # bytes of the number of batches, and of that of the bytes of the JSON before the tensors
)


class Kept:
    """The objects and values that a user keeps with the job's state, as attributes, which may be set."""

    __slots__ = ("__dict__", "_large")

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._large: dict[str, Any] = {}  # objects whose state is no small one
        vars(self).update(objects)
        for name, value in objects.items():
            if hasattr(value, "state_dict") != hasattr(value, "load_state_dict"):
                raise ConfigurationError(
                    f"steepest.register({name}=...) was given a {type(value).__name__}, which has one of state_dict() "
                    "and load_state_dict(): give an object with both, or plain values"
                )
            if not hasattr(value, "state_dict"):
                form_of(value, name)

    def state(self, objects: bool = True) -> dict[str, Any]:
        """Return the states of all objects, and the values; without `objects` small ones alone, as copies.

        Raises:
            ConfigurationError: a value now contains something that cannot be kept.
        """
        if not objects:
            small = {name: self._copy_of(name, value) for name, value in vars(self).items()}
            return {name: copy for name, copy in small.items() if copy is not None}
        return {
            name: value.state_dict() if hasattr(value, "state_dict") else form_of(value, name)
            for name, value in vars(self).items()
        }

    def _copy_of(self, name: str, value: Any) -> Any:
        """Return a copy of the state of a small value; None of a large one."""
        if not hasattr(value, "state_dict"):
            return copied(form_of(value, name)) if is_small(value) else None
        if self._large.get(name) is value:
            return None  # asking for its state may take long
        state = value.state_dict()
        if is_small(state):
            return copied(state)
        self._large[name] = value
        return None

    def states(self) -> dict[str, Any]:
        """Return the part of the state that `state` leaves out without `objects`."""
        whole, small = self.state(), self.state(objects=False)
        return {name: state for name, state in whole.items() if name not in small}

    def load(self, state: Mapping[str, Any], find: FindClass) -> None:
        """Set what `state` returned, in place where possible; names that no longer exist are ignored.

        Args:
            state: by name.
            find: finds the classes of objects in containers.

        Raises:
            ConfigurationError: the script has no such class any more.
        """
        for name in vars(self).keys() & state.keys():
            value = vars(self)[name]
            if hasattr(value, "load_state_dict"):
                own = state[name]  # with what is in it the object may go on
                value.load_state_dict(copied(own) if is_small(own) else own)
            else:
                vars(self)[name] = restored(state[name], value, name, find)


def pack(state: Mapping[str, Any], batches: int = 0) -> torch.Tensor:
    """Return plain values and tensors, in dicts, lists and tuples, as uint8.

    See `steepest.core.tensors.dtypes.furthest`.

    Args:
        state: by name.
        batches: that the loop has taken.

    Raises:
        ConfigurationError: one is something else; it names the entry of `state`.

    Example:
        >>> unpack(pack({"best": 0.5, "ema": {"w": torch.ones(2)}}))
        {'best': 0.5, 'ema': {'w': tensor([1., 1.])}}
    """
    tensors: list[torch.Tensor] = []

    def number(value: Any) -> int | None:
        if isinstance(value, np.ndarray):
            value = torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(value, torch.Tensor):
            return None
        flat = value.detach().cpu().contiguous()
        if flat.numel() == 1:  # its strides may be any, of an expanded one
            flat = flat.clone(memory_format=torch.contiguous_format)
        tensors.append(flat)
        return len(tensors) - 1

    values = {}
    for name, value in state.items():
        try:
            values[name] = to_json(_plain(value), number)
        except TypeError as error:
            raise ConfigurationError(
                f"the state of {name!r} cannot be kept ({error}): let its state_dict() return numbers, text, tensors, "
                "and dicts, lists and tuples of these"
            ) from None
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    text = json.dumps([values, kinds]).encode()
    parts = [batches.to_bytes(_LENGTH, "little"), len(text).to_bytes(_LENGTH, "little"), text]
    flat = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts]
    return torch.cat([*flat, *(t.reshape(-1).view(torch.uint8) for t in tensors if t.numel())])


def unpack(packed: torch.Tensor) -> dict[str, Any]:
    """Return what `pack` was given; ValueError: `pack` returns no such thing."""
    raw = packed.contiguous()[_LENGTH:]
    at = _LENGTH + int.from_bytes(raw[:_LENGTH].numpy().tobytes(), "little")
    values, kinds = json.loads(raw[_LENGTH:at].numpy().tobytes())
    tensors = []
    for name, shape in kinds:
        dtype = getattr(torch, name)
        tensor = torch.empty(shape, dtype=dtype)
        end = at + tensor.numel() * tensor.element_size()
        if tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(raw[at:end])
        tensors.append(tensor)
        at = end
    return {name: from_json(value, tensors.__getitem__) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """Return a value with ordinary dicts in place of their subclasses."""
    if isinstance(value, dict) and type(value) in (dict, OrderedDict, defaultdict):
        return {key: _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    return value
