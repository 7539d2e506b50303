"""A warning to a user's loop that clips gradients by torch's functions, which see those of one worker alone."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad

from steepest.loop.losses import line_of_user

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


_CLIPPED_BY_NORM: Any = clip_grad._clip_grads_with_norm_  # which `clip_grad_norm_` calls
_CLIPPED_BY_VALUE: Any = clip_grad.clip_grad_value_


#: Returns the loop in which the calling thread is; None outside of any.
Here = Callable[[], "UserLoop | None"]

_watching: list[Here] = []  # an element for each user's function that runs in this process


@contextlib.contextmanager
def watched(here: Here) -> Iterator[None]:
    """Warn loops that clip by torch's functions, in this context."""
    _watching.append(here)
    if len(_watching) == 1:
        _install(_by_norm, _by_value)
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            _install(_CLIPPED_BY_NORM, _CLIPPED_BY_VALUE)


def _install(by_norm: Any, by_value: Any) -> None:
    """Replace torch's functions, also for scripts that imported `clip_grad_norm_` before."""
    for module, name, function in (
        (clip_grad, "_clip_grads_with_norm_", by_norm),
        (torch.nn.utils, "clip_grads_with_norm_", by_norm),
        (clip_grad, "clip_grad_value_", by_value),
        (torch.nn.utils, "clip_grad_value_", by_value),
    ):
        setattr(module, name, function)


@functools.wraps(_CLIPPED_BY_NORM)
def _by_norm(*arguments: Any, **named: Any) -> Any:
    _tell("clip_grad_norm_", "the norm of the whole batch's gradient is another")
    return _CLIPPED_BY_NORM(*arguments, **named)


@functools.wraps(_CLIPPED_BY_VALUE)
def _by_value(*arguments: Any, **named: Any) -> Any:
    _tell("clip_grad_value_", "the mean of clipped gradients is not the clipped mean")
    return _CLIPPED_BY_VALUE(*arguments, **named)


def _tell(name: str, why: str) -> None:
    """Have worker 0's loop, if the calling thread is in it, warned once."""
    loop = _watching[0]() if _watching else None
    if loop is None or loop.steps.edits.are_told or not loop.steps.averages:
        return
    loop.steps.edits.are_told = True
    if loop.job.rank:
        return
    warnings.warn(
        f"torch.nn.utils.{name}() sees the gradient of one worker alone, of {loop.job.size}: {why}. "
        "steepest.clip_grad_norm_(model.parameters(), max_norm) clips the mean gradient of all workers, as torch does "
        "in one process",
        stacklevel=line_of_user(),
    )
