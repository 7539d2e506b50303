"""Steps of a user's loop under torch's `GradScaler`, which sees the gradients of one worker alone.

It leaves a step out where it has found infinity or NaN, of its own process. Here such a worker takes the step with
the others, says so, and the update is left out for all of them, as in one process; then all scalers lower their
scale.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from steepest.loop.loop_steps import LoopSteps


_SCALER: Any = torch.amp.GradScaler
_OWN: Any = _SCALER._maybe_opt_step  # steps unless something was found
_LOOKS: Any = _SCALER._unscale_grads_  # divides gradients, and returns what was found, by device


#: Returns the steps of the loop in which the calling thread is; None outside of any.
Here = Callable[[], "LoopSteps | None"]

_watching: list[Here] = []  # an element for each user's function that runs in this process


@contextlib.contextmanager
def watched(here: Here) -> Iterator[None]:
    """Have loops in this context step together under scalers."""
    _watching.append(here)
    _SCALER._maybe_opt_step, _SCALER._unscale_grads_ = _step, _look
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            _SCALER._maybe_opt_step, _SCALER._unscale_grads_ = _OWN, _LOOKS


@functools.wraps(_OWN)
def _step(
    scaler: Any, optimizer: torch.optim.Optimizer, state: Any, *arguments: Any, **named: Any
) -> Any:
    steps = _watching[0]() if _watching else None
    if steps is None or not steps.are_for_all(optimizer):
        return _OWN(scaler, optimizer, state, *arguments, **named)
    flags = state["found_inf_per_device"].values()
    returned, left_out = steps.scaled_step(
        functools.partial(optimizer.step, *arguments, **named),
        overflowed=any(flag.item() for flag in flags),
    )
    if left_out:
        for flag in flags:
            flag.fill_(1.0)  # by which `update` knows
    return returned


@functools.wraps(_LOOKS)
def _look(
    scaler: Any,
    optimizer: torch.optim.Optimizer,
    inverse: torch.Tensor,
    nothing: torch.Tensor,
    *arguments: Any,
    **named: Any,
) -> Any:
    looked = _LOOKS(scaler, optimizer, inverse, nothing, *arguments, **named)
    steps = _watching[0]() if _watching else None
    if not looked and steps is not None and steps.are_for_all(optimizer):
        return {
            nothing.device: nothing
        }  # other workers have gradients, and torch refuses to step without any
    return looked
