"""Containers of a batch: tuples, lists and mappings, also of users' own types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from steepest.errors import ModelError


def changed_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a tuple, list or mapping, of the same type and with the same attributes, its parts changed.

    Args:
        batch: the container, which is not changed.
        change: called with each part, or with each value of a mapping.

    Raises:
        ModelError: a mapping can neither be written to nor be made from a dict.
    """
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        for key in batch:
            changed[key] = change(batch[key])
        return changed
    if isinstance(batch, Mapping):
        values = {key: change(batch[key]) for key in batch}
        try:
            return type(batch)(values)  # type: ignore[call-arg]
        except TypeError as error:
            raise ModelError(
                f"a batch is a {type(batch).__name__}, which cannot be written to, nor be made from a dict: return a "
                "dict from collate_fn, or give the class methods to(device) and pin_memory()"
            ) from error
    parts = [change(part) for part in batch]
    if isinstance(batch, list):
        rows = copy.copy(batch)
        rows[:] = parts
        return rows
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
