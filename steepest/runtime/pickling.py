"""Pickles of users' objects: functions by value keep the names of their files, which tracebacks show."""

from __future__ import annotations

import types
from collections import ChainMap
from typing import Any

import cloudpickle

#: It gives all files the name `_ALIKE`, so that pickles do not differ by their files' names.
_SHARED: Any = cloudpickle.Pickler.dispatch_table
_ALIKE = "<dynamic-code>"


def _reduced_code(code: types.CodeType) -> tuple[Any, ...]:
    make, arguments = _SHARED[types.CodeType](code)
    return make, tuple(code.co_filename if each == _ALIKE else each for each in arguments)


class UserPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions by value where they cannot be imported."""

    dispatch_table = ChainMap({types.CodeType: _reduced_code}, _SHARED)
