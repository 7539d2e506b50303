"""Checks of arguments: counts, numbers, seconds, ranges, choices, classes."""

from __future__ import annotations

import inspect
import math
import sys
from numbers import Integral, Real

from steepest.errors import ConfigurationError

_LONGEST_SECONDS = 1e9  # thirty years; the system refuses to wait much longer


def require_count(name: str, value: object, least: int = 1) -> int:
    """Return an integer (NumPy's too) of at least `least` as an int.

    Raises:
        ConfigurationError: `value` is no such integer; the message begins with `name`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ConfigurationError(f"{name}={value!r}: give an integer of at least {least}")
    return int(value)


def _finite(value: object) -> float:
    """Return a number as a float; NaN for what is none, or is infinite, such as an int too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    return float(value) if abs(value) <= sys.float_info.max else math.nan  # type: ignore[operator]


def require_number(
    name: str, value: object, low: float = 0.0, high: float = math.inf, *, but: float | None = None
) -> float:
    """Return a finite number from `low` to `high`, and other than `but`.

    Raises:
        ConfigurationError: `value` is no such number; the message begins with `name`.
    """
    number = _finite(value)
    if not low <= number <= high or number == but:
        allowed = f" of at least {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
        allowed = "" if low == -math.inf and high == math.inf else allowed
        allowed += "" if but is None else f", but not {but:g}"
        raise ConfigurationError(f"{name}={value!r:.40}: give a finite number{allowed}")
    return number


def require_positive(name: str, value: object) -> float:
    """Return a finite number above 0.

    Raises:
        ConfigurationError: `value` is no such number; the message begins with `name`.
    """
    number = _finite(value)
    if not number > 0:
        raise ConfigurationError(f"{name}={value!r:.40}: give a positive number")
    return number


def require_seconds(name: str, value: object) -> float:
    """Return a positive number of seconds, short enough for the system to wait for, as a float.

    Raises:
        ConfigurationError: `value` is no such number.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= _LONGEST_SECONDS
    ):
        raise ConfigurationError(
            f"{name}={value!r:.40}: give a positive number of seconds, at most {_LONGEST_SECONDS:g}"
        )
    return float(value)


def require_range(name: str, value: object) -> tuple[int, int]:
    """Return the bounds of a count, (min, max); a single count is both.

    Raises:
        ConfigurationError: a bound is no count from 1 on, or the minimum is above the maximum.
    """
    if not isinstance(value, tuple):
        return require_count(name, value), require_count(name, value)
    if len(value) != 2 or require_count(name, value[0]) > require_count(name, value[1]):
        raise ConfigurationError(f"{name}={value!r}: give a number, or (min, max)")
    return value[0], value[1]


def require_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check that a value is one of those allowed.

    Args:
        name: of the argument, for the error.
        value: compared by identity, texts by equality.
        allowed: the allowed values.

    Raises:
        ConfigurationError: it is not.
    """
    if not any(
        value is choice or (isinstance(value, str) and value == choice) for choice in allowed
    ):
        raise ConfigurationError(f"{name}={value!r}: give one of {', '.join(map(repr, allowed))}")


def require_instance(name: str, value: object, kind: type) -> None:
    """Check that a value is an instance of one of steepest's public classes.

    Raises:
        ConfigurationError: it is not.
    """
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name}={value!r:.80}: give a steepest.{kind.__name__}(...)")


def require_model_creator(model_creator: object) -> None:
    """Check that a model creator can be called with the indices of a worker and of a device.

    Raises:
        ConfigurationError: it cannot.
    """
    wanted = "give a function of (worker_index, device_index) that returns a model"
    _require_called_with("model_creator", model_creator, (0, 0), wanted)


def require_function(function: object) -> None:
    """Check that a function that trains can be called without arguments.

    Raises:
        ConfigurationError: it cannot.
    """
    wanted = "give a function without arguments that trains, such as functools.partial(train, 0.1)"
    _require_called_with("function", function, (), wanted)


def require_evaluation(function: object, arguments: tuple[object, ...]) -> None:
    """Check that a function that evaluates can be called with its arguments.

    Raises:
        ConfigurationError: it cannot.
    """
    wanted = "give a function that returns numbers by name, and its arguments behind it"
    _require_called_with("function", function, arguments, wanted)


def _require_called_with(
    name: str, function: object, arguments: tuple[object, ...], wanted: str
) -> None:
    """Check that a function can be called with such arguments; ConfigurationError: it cannot, and what is wanted."""
    if hasattr(function, "named_parameters"):  # modules are called with their input
        raise ConfigurationError(
            f"{name} is a module itself ({type(function).__name__}), which each worker is to make anew: {wanted}"
        )
    if not callable(function):
        raise ConfigurationError(f"{name}={function!r:.200}: {wanted}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables that are written in C have no signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(
            f"{name}={function!r:.200} takes {signature}, {error}: {wanted}"
        ) from None


def require_batch_size(batch_size: object) -> None:
    """Check the batch size of an evaluation: None, or a positive integer.

    Raises:
        ConfigurationError: it is something else, such as targets that were given beside the inputs.
    """
    if batch_size is None:
        return
    if hasattr(batch_size, "__len__") and not isinstance(batch_size, str):
        raise ConfigurationError(
            f"evaluate() was given a {type(batch_size).__name__} as batch_size: give inputs and "
            "targets as one tuple, evaluate((x, y))"
        )
    require_count("batch_size", batch_size)
