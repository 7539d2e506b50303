"""A warning to a user's loop that steps an optimizer which was not given to `prepare`."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from steepest.loop.losses import line_of_user

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop

_MAKE: Any = Optimizer.__init__
#: Optimizers that loops have made before their epochs.
_made: weakref.WeakKeyDictionary[Optimizer, UserLoop] = weakref.WeakKeyDictionary()

#: Returns the loop in which the calling thread is; None outside of any.
Here = Callable[[], "UserLoop | None"]

_watching: list[Here] = []  # an element for each user's function that runs in this process


@contextlib.contextmanager
def watched(here: Here) -> Iterator[None]:
    """Warn loops of such optimizers, of those that they make in this context."""
    _watching.append(here)
    setattr(Optimizer, "__init__", _make)  # noqa: B010 - which mypy takes for a method
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            setattr(Optimizer, "__init__", _MAKE)  # noqa: B010


def watch(loop: UserLoop) -> None:
    """Warn a loop that comes to its epochs of steps of optimizers that it has made so far."""
    known = {id(each) for each in (*loop.prepared.optimizers, *loop.prepared.given)}
    for each, own in list(_made.items()):
        if own is loop:
            del _made[each]
            if id(each) not in known:
                _watch(loop, each)


def _watch(loop: UserLoop, optimizer: Optimizer) -> None:
    def look(optimizer: Optimizer, *_: Any) -> None:
        if _told(loop, optimizer):
            hook.remove()

    hook = optimizer.register_step_pre_hook(look)


@functools.wraps(_MAKE)
def _make(optimizer: Optimizer, *arguments: Any, **named: Any) -> None:
    _MAKE(optimizer, *arguments, **named)
    # a slice, since another thread's function may end meanwhile
    loop = next((here() for here in _watching[:1]), None)
    if loop is not None and loop.has_entered:
        _watch(loop, optimizer)
    elif loop is not None:
        _made[optimizer] = loop


def _told(loop: UserLoop, optimizer: Optimizer) -> bool:
    """Have worker 0's loop warned where several workers train a parameter each by itself; return whether it was."""
    # what is trained behind the epochs, such as a temperature, may be one worker's
    ended = loop.batches.wanted is None or loop.batches.epoch >= loop.batches.wanted
    if ended or loop.job.rank or loop.job.size == 1:
        return False
    shared = {id(p) for group in loop.prepared.groups for p in group["params"]}
    own = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in shared]
    if own:
        warnings.warn(
            f"{type(optimizer).__name__}.step() of an optimizer that was not given to steepest.prepare(): each worker "
            f"trains its {len(own)} parameters by itself, on its own samples: give it, and the module that has them, "
            "to steepest.prepare() too",
            stacklevel=line_of_user(),
        )
    return bool(own)
