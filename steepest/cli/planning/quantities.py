"""Bandwidths, times and lists of numbers as people write them."""

from __future__ import annotations

import math
import re

from steepest.errors import ConfigurationError

_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BITS = {
    f"{prefix}{unit}": factor / 8
    for prefix, factor in _FACTORS.items()
    for unit in ("bit", "bit/s", "bps")
}
_BYTES = {f"{prefix}b/s": factor for prefix, factor in _FACTORS.items()}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def bandwidth_of(value: str | float) -> float:
    """Return a bandwidth in bytes a second.

    Args:
        value: a number of bits a second, or text such as "25Gbit", "100 Mbit/s" or "3.1GB/s": prefixes k, M, G and
            T are powers of 1000, "bit" and "bps" are bits, "B/s" bytes.

    Raises:
        ConfigurationError: it is neither, or not above 0.

    Example:
        >>> bandwidth_of("25Gbit"), bandwidth_of(8e9), bandwidth_of("1.5 MB/s")
        (3125000000.0, 1000000000.0, 1500000.0)
    """
    if isinstance(value, str):
        units = _BITS | _BYTES
        return _amount("bandwidth", value, units, "25Gbit, 100Mbit or 3GB/s", case=True)
    return _above_zero("bandwidth", value) / 8


def seconds_of(value: str | float) -> float:
    """Return a time in seconds.

    Args:
        value: a number of seconds, or text such as "50us", "0.1 ms" or "2s".

    Raises:
        ConfigurationError: it is neither, or negative.

    Example:
        >>> seconds_of("500ms"), seconds_of(0)
        (0.5, 0.0)
    """
    if isinstance(value, str):
        return _amount("latency", value, _SECONDS, "50us, 0.1ms or 1s", zero=True)
    return _above_zero("latency", value, zero=True)


def bytes_of(value: str | float) -> float:
    """Return a number of bytes.

    Args:
        value: the number, or text such as "16GB" or "500 MB": prefixes k, M, G and T are powers of 1000.

    Raises:
        ConfigurationError: it is neither, or not above 0.

    Example:
        >>> bytes_of("16GB"), bytes_of(2e9)
        (16000000000.0, 2000000000.0)
    """
    if isinstance(value, str):
        units = {f"{prefix}b": factor for prefix, factor in _FACTORS.items()} | _FACTORS
        return _amount("memory", value, units, "16GB or 500MB")
    return _above_zero("memory", value)


def numbers_of(name: str, text: str) -> list[int]:
    """Return the counts in a text such as "1,2,4", ascending and each once.

    Raises:
        ConfigurationError: it has none.
    """
    try:
        numbers = sorted({int(each) for each in text.split(",") if each.strip()})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ConfigurationError(
            f"{name} {text}: give numbers from 1 on with commas between them, such as 1,2,4,8"
        )
    return numbers


def size_in_words(nbytes: float) -> str:
    """Return bytes with a unit.

    Example:
        >>> size_in_words(2_500_000), size_in_words(16e9)
        ('2.5 MB', '16 GB')
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes / 1e3:.3g} kB"


def _above_zero(name: str, value: float, *, zero: bool = False) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        what = "of at least 0" if zero else "above 0"
        raise ConfigurationError(
            f"{name}={value!r:.40}: give a finite number {what}, or text with a unit"
        )
    return float(value)


def _amount(
    name: str,
    text: str,
    units: dict[str, float],
    examples: str,
    *,
    zero: bool = False,
    case: bool = False,
) -> float:
    """Return a number with a unit in the unit's measure."""
    match = _AMOUNT.fullmatch(text)
    unit = match[2] if match else ""
    # "b/s" would be bits to some and bytes to others
    known = unit.lower() if not (case and unit.endswith("b/s")) else "?"
    if match is None or known not in units:
        reason = (
            f"the unit {unit!r} is not known" if match and unit else "it has no number with a unit"
        )
        raise ConfigurationError(f"{name} {text!r:.40}: {reason}; give one such as {examples}")
    return _above_zero(name, float(match[1]), zero=zero) * units[known]
