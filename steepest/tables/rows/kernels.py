"""How loops over ids and rows become machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError

try:
    import numba
except ImportError as error:
    raise ConfigurationError(
        "embedding tables need numba, which is not installed: pip install 'steepest[embedding]'"
    ) from error

P = ParamSpec("P")
R = TypeVar("R")
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function when it is first called; keep its machine code on disk where possible.

    Numba keeps it in `__pycache__` beside the source, or in the user's cache directory where that
    cannot be written. Where neither can, every process compiles for itself.

    Results are the same bits on every machine: no reassociation, no fused multiply-add.
    """
    try:
        compiled = numba.njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # numba found no directory that it can write
        compiled = numba.njit(function, nogil=True, error_model="numpy")
    return compiled  # type: ignore[no-any-return]


def inlined(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a small function into the kernels that call it.

    Numba does not notice when a function of another file changes. So kernels call only functions of
    their own file, and those of `hashing`; after a change there, touch the files that use them.
    """
    return numba.njit(function, nogil=True, error_model="numpy")  # type: ignore[no-any-return]


def read_only(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a contiguous, read-only view of an array, or a copy where that is needed.

    A kernel is compiled anew for each combination of types, of which being writable is a part: with
    this every caller's array is of the same type.
    """
    found: npt.NDArray[Any] = np.ascontiguousarray(array, dtype)
    if found.flags.writeable:
        found = found.view()
        found.flags.writeable = False
    return found
