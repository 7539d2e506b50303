"""Names of parameters and buffers, without the parts that `torch.compile` adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")
_COMPILED = "_orig_mod"  # the attribute of a compiled module that holds the plain one


def plain(name: str) -> str:
    """Return a name as it is in the module that was not compiled.

    Example:
        >>> plain("_orig_mod.body._orig_mod.weight")
        'body.weight'
    """
    return name if _COMPILED not in name else ".".join(p for p in name.split(".") if p != _COMPILED)


def plainly(named: Iterable[tuple[str, T]] | Mapping[str, T]) -> dict[str, T]:
    """Return named values by their plain names."""
    pairs = named.items() if isinstance(named, Mapping) else named
    return {plain(name): value for name, value in pairs}
