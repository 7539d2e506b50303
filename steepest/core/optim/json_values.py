"""Plain values as JSON and back, with types and every bit of numbers; nothing is pickled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

_BITS = 64  # from which an integer travels as a text
_NUMPY = {
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
}


def to_json(value: Any, other: Callable[[Any], int | None] = lambda value: None) -> Any:
    """Return a value in a form that `json` writes and reads again without a loss.

    Args:
        value: None, bool, int, float, str, list, tuple, dict, `collections.Counter` or a NumPy
            scalar; containers hold such values, and dicts have them as keys.
        other: returns the number by which `from_json` can identify a value that has no JSON; None
            for an unknown value.

    Raises:
        TypeError: it is, or holds, something else.

    Example:
        >>> to_json({"steps": (1, 2.5)})
        {'dict': [['steps', {'tuple': [1, 2.5]}]]}
        >>> from_json(to_json({"steps": (1, 2.5)}))
        {'steps': (1, 2.5)}
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if value.bit_length() < _BITS else {"int": str(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is list:
        return [to_json(each, other) for each in value]
    if kind is tuple:
        return {"tuple": [to_json(each, other) for each in value]}
    if kind in (dict, Counter):
        pairs = [[to_json(key), to_json(each, other)] for key, each in value.items()]
        return {kind.__name__: pairs}
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY:
        return {"numpy": [value.dtype.name, to_json(value.item())]}
    if (number := other(value)) is not None:
        return {"other": number}
    raise TypeError(f"{kind.__name__} has no JSON")


def _nothing(number: int) -> Any:
    """Refuse a reference to a value that has no JSON, by ValueError."""
    raise ValueError(f"value {number} is not there")


def from_json(text: Any, other: Callable[[int], Any] = _nothing) -> Any:
    """Return the value that `to_json` was given.

    Args:
        text: the result of `to_json`, possibly after a round trip through JSON.
        other: returns the value to which `to_json` gave a number; it raises ValueError if there is
            none.

    Raises:
        ValueError: `text` is not a result of `to_json`.
    """
    if isinstance(text, list):
        return [from_json(each, other) for each in text]
    if not isinstance(text, dict):
        return text
    try:
        ((kind, inner),) = text.items()
        if kind in ("float", "int"):
            return float(inner) if kind == "float" else int(inner)
        if kind == "tuple":
            return tuple(from_json(each, other) for each in inner)
        if kind == "other" and type(inner) is int:
            return other(inner)
        if kind in ("dict", "Counter"):
            pairs = {from_json(key): from_json(each, other) for key, each in inner}
            return pairs if kind == "dict" else Counter(pairs)
        name, number = inner
        if kind == "numpy" and name in _NUMPY:
            return np.dtype(name).type(from_json(number))
    except (TypeError, ValueError) as error:
        raise ValueError(f"this is no JSON of a value: {text!r:.200}") from error
    raise ValueError(f"this is no JSON of a value: {text!r:.200}")
