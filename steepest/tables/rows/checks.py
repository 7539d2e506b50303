"""Checks of what tables are asked: table numbers, ids, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, read_only


def require_ids(name: str, ids: Any) -> Int64s:
    """Return ids, integers of any width from 0 to 2^63 - 1 and any shape, as contiguous, read-only int64.

    ConfigurationError, with the argument's name: they are no integers, or one is out of range.
    """
    array = np.asarray(ids)
    if array.size == 0 and array.dtype == np.float64:  # an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{name} are of {array.dtype}: give integers from 0 to 2^63 - 1 (hash texts first)"
        )
    is_wider = array.dtype.kind == "u" and array.dtype.itemsize == 8
    if array.size and (int(array.min()) < 0 or (is_wider and int(array.max()) > 2**63 - 1)):
        wrong = int(array.min()) if int(array.min()) < 0 else int(array.max())
        raise ConfigurationError(
            f"{name} hold {wrong}: give integers from 0 to 2^63 - 1; a hash is made one by & (2**63 - 1)"
        )
    return read_only(array, np.int64)


def require_keys(
    tables: npt.ArrayLike, ids: npt.ArrayLike, names: Sequence[str]
) -> tuple[Int32s, Int64s]:
    """Return table numbers (n,) and ids (n,) as arrays that kernels take; ConfigurationError: one is out of range."""
    checked = require_ids("ids", ids)
    numbers = np.asarray(tables)
    if checked.ndim != 1 or numbers.shape != checked.shape:
        raise ConfigurationError(
            f"tables of shape {numbers.shape} and ids of shape {checked.shape}: give two arrays of one "
            "dimension and the same length"
        )
    wrong = numbers.dtype.kind not in "iu" and numbers.size
    if wrong or (numbers.size and not 0 <= numbers.min() <= numbers.max() < len(names)):
        raise ConfigurationError(
            f"tables hold {numbers.min()} to {numbers.max()} of {numbers.dtype}: give the numbers 0 to "
            f"{len(names) - 1} of {', '.join(map(repr, names))}"
        )
    return read_only(numbers, np.int32), checked


def require_gradients(gradients: npt.ArrayLike, count: int, dim: int, dtype: str) -> Floats:
    """Return gradients as an array that kernels take; ConfigurationError: not (count, dim), or of another dtype."""
    array = np.asarray(gradients)
    if array.shape != (count, dim):
        raise ConfigurationError(
            f"gradients of shape {array.shape} for {count} ids of tables of dimension {dim}: give "
            f"({count}, {dim})"
        )
    if array.dtype != dtype:
        raise ConfigurationError(f"gradients are of {array.dtype}: the tables are of {dtype}")
    return read_only(array, dtype)


def require_out(out: Floats, shape: tuple[int, int], dtype: str) -> Floats:
    """Return an array to which kernels can write.

    Raises:
        ConfigurationError: another shape, dtype, not contiguous or read-only.
    """
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        raise ConfigurationError(
            f"out is of {out.dtype} and shape {out.shape}: give a contiguous, writable array of "
            f"{dtype} and shape {shape}"
        )
    return out


def require_sightings(sightings: npt.ArrayLike | None, count: int) -> Int32s:
    """Return how often each of `count` ids was seen, once by default; ConfigurationError: others than counts from 1."""
    if sightings is None:
        return read_only(np.ones(count, np.int32), np.int32)
    counts = require_ids("sightings", sightings)
    if counts.shape != (count,) or (count and not 1 <= counts.min() <= counts.max() < 2**31):
        raise ConfigurationError(
            f"sightings of shape {counts.shape} for {count} ids: give an integer from 1 to 2^31 - 1 for each"
        )
    return read_only(counts, np.int32)


def repeated(key: np.int64, name: str) -> ConfigurationError:
    """Return the error of a push that has an id of a table twice."""
    return ConfigurationError(
        f"id {key} of table {name!r} is in a push twice: add up the gradients of an id"
    )
