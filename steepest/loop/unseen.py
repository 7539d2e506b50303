"""Reads of tensors that let a user's function write to them without a new version."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: Attributes and methods of tensors that give memory, or write to it, without a new version of the tensor.
_OF_TENSORS = (
    *("data", "numpy", "__array__", "__dlpack__", "untyped_storage", "data_ptr"),
    *("apply_", "map_"),
)
_OF_TORCH = ("_amp_foreach_non_finite_check_and_unscale_",)  # GradScaler.unscale_
_OWN: dict[
    tuple[Any, str], Any
] = {}  # by owner and name: torch's own, which others stand for while functions run
_local = threading.local()
_running: list[None] = []  # an element for each function that is watched


class Unseen:
    """Whether a user's function has made such a read.

    Attributes:
        watches: whether it is noted.
        happened: whether it has been read while it was noted.
        look: called with each tensor of which it is read, before that; None for nothing.
    """

    look: Callable[[Any], None] | None = None

    def __init__(self) -> None:
        self.watches = False
        self.happened = False


@contextlib.contextmanager
def noted(unseen: Unseen) -> Iterator[None]:
    """Note such reads of the calling thread in this context."""
    _local.unseen = unseen
    _running.append(None)
    if len(_running) == 1:
        _install()
    try:
        yield
    finally:
        _local.unseen = None
        _running.pop()
        if not _running:
            _uninstall()


def _install() -> None:
    for owner, names in ((torch.Tensor, _OF_TENSORS), (torch, _OF_TORCH)):
        for name in names:
            own = getattr(owner, name)
            _OWN[owner, name] = vars(owner).get(name)  # None where it is inherited
            watched = _noting(own) if callable(own) else property(_noting(own.__get__), own.__set__)
            setattr(owner, name, watched)


def _uninstall() -> None:
    for (owner, name), own in _OWN.items():
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    _OWN.clear()


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that notes its call."""

    @functools.wraps(function)
    def noting(*arguments: Any, **named: Any) -> Any:
        unseen: Unseen | None = getattr(_local, "unseen", None)
        if unseen is not None:
            unseen.happened |= unseen.watches
            if unseen.look is not None and arguments:
                unseen.look(arguments[0])
        return function(*arguments, **named)

    return noting
