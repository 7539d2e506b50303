"""What users give, checked: counts, seconds, ranges, choices."""

from __future__ import annotations

import sys
from numbers import Integral

from steepest.errors import ConfigurationError

_LONGEST_SECONDS = 1e9  # thirty years; the system refuses to wait much longer


def require_count(name: str, value: object, least: int = 1) -> int:
    """An integer (NumPy's too) of at least `least`.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigurationError(f"{name}={value!r}: give an integer of at least {least}")
    return int(value)


def require_seconds(name: str, value: object) -> float:
    """A positive number that can be waited for.

    Raises:
        ConfigurationError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _LONGEST_SECONDS:
        raise ConfigurationError(
            f"{name}={value!r:.40}: give a positive number of seconds, at most {_LONGEST_SECONDS:g}"
        )
    return float(value)


def require_range(name: str, value: object) -> tuple[int, int]:
    """Bounds: (min, max), or one number for both.

    Raises:
        ConfigurationError: they are not counts from 1 on, or the wrong way round.
    """
    if not isinstance(value, tuple):
        return require_count(name, value), require_count(name, value)
    if len(value) != 2 or require_count(name, value[0]) > require_count(name, value[1]):
        raise ConfigurationError(f"{name}={value!r}: give a number, or (min, max)")
    return value[0], value[1]


def require_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """One of a few values.

    Raises:
        ConfigurationError: it is not.
    """
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise ConfigurationError(f"{name}={value!r}: give one of {', '.join(map(repr, allowed))}")


def is_finite_number(value: object) -> bool:
    """Whether it is finite; an int may be too large for a float."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
