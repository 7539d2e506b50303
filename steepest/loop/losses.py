"""The losses whose backward pass a user's loop runs, for the job's history; one that is a sum is told from a mean."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from steepest.core.models.losses import OURS, PERHAPS, SUMMED, factor_of, summed_by
from steepest.errors import ConfigurationError

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


_torchs_backward: Any = torch.autograd.backward  # `Tensor.backward` calls it, too
_DO = "give steepest.prepare(..., reduction='sum'), or take the mean"
_ROUNDING = 1e-3  # of a number by which losses are divided
_FEW = 3  # samples of a batch from which on as many backward passes are one for each
_OUTSIDE = -1  # of any backward pass


class Losses:
    """The losses of a loop.

    Args:
        loop: whose they are.

    Attributes:
        found: those of the last step, or of the step in progress.
        are_parts: whether losses may be of single samples: until a step has shown what they are.
        scale: by which backward passes are multiplied, see `steepest.loop.sum_weights`; None: the loop has yet to say.
    """

    def __init__(self, loop: UserLoop) -> None:
        self.found: list[torch.Tensor] = []
        self.scale: float | None = 1.0
        self._loop = loop
        self._has_looked = False
        self.are_parts = True
        # by what number all losses since the last step were multiplied last; 0 if by none, or by several
        self._factor = 0.0

    def add(self, loss: torch.Tensor) -> None:
        """Take the loss of a backward pass; ConfigurationError: it adds up samples, and is to be their mean.

        Where that is not sure, worker 0 warns.
        """
        if not self._has_looked and (samples := self._loop.averaged) > 1:
            self._has_looked = True
            if (found := summed_by(loss, samples)) is not None:
                name, is_certain = found
                if is_certain:
                    raise ConfigurationError(SUMMED.format(name, _DO))
                if not self._loop.rank:
                    warnings.warn(SUMMED.format(name, _DO) + PERHAPS, stacklevel=line_of_user())
        if self.are_parts and loss.grad_fn is not None:
            factor = factor_of(loss.grad_fn, loss.grad_fn.name())
            self._factor = factor if not self.found or factor == self._factor else 0.0
        counted = loss.detach()
        self.found.append(counted if self.scale in (1.0, None) else counted * self.scale)

    def check_each(self) -> None:
        """Warn, at a step, of losses of single samples that are divided by another number than the batch has here."""
        samples = self._loop.averaged
        if not samples:
            return
        self.are_parts = False
        of_each = len(self.found) == samples == self._loop.samples and samples >= _FEW
        if self._factor and of_each and abs(1 / self._factor - samples) > _ROUNDING * samples:
            warnings.warn(
                f"worker {self._loop.rank}: backward() was called for each of the {samples} samples of a batch, with "
                f"losses divided by {1 / self._factor:g}: where they are to be the mean of the batch, divide by what "
                "it has on this worker, such as len(x)",
                stacklevel=line_of_user(),
            )


def line_of_user() -> int:
    """Return the stack level, as of `warnings.warn` in the calling function, of the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        level, frame = level + 1, frame.f_back
    return level


#: Returns the losses of the loop in which the calling thread is; None outside of any.
Here = Callable[[], "Losses | None"]

_watching: list[Here] = []  # an element for each user's function that runs in this process


@contextlib.contextmanager
def watched(here: Here) -> Iterator[None]:
    """Have the losses of loops see those whose backward pass runs, while any function runs."""
    _watching.append(here)
    if len(_watching) == 1:
        torch.autograd.backward = _backward
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            torch.autograd.backward = _torchs_backward


@functools.wraps(_torchs_backward)
def _backward(tensors: Any, grad_tensors: Any = None, *arguments: Any, **named: Any) -> Any:
    losses = _watching[0]() if _watching else None
    if losses is not None and torch._C._current_graph_task_id() == _OUTSIDE:
        for loss in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if loss.dim() == 0:
                losses.add(loss)
            elif loss.numel() > 1 and grad_tensors is None:
                raise ConfigurationError(
                    f"backward() was called on a loss of shape {tuple(loss.shape)}: give one number, the mean of the "
                    "batch, such as by loss.mean() or without reduction='none'"
                )
        if losses.scale is None:
            raise ConfigurationError(
                "backward() without steepest.weight() in a batch whose gradients are added to those of batches that "
                "had it: call it in each batch of the sum, before backward(), or in none"
            )
        if losses.scale != 1.0:
            grad_tensors = _scaled(tensors, grad_tensors, losses.scale)
    return _torchs_backward(tensors, grad_tensors, *arguments, **named)


def _scaled(tensors: Any, grad_tensors: Any, scale: float) -> Any:
    """Return the gradients with which a backward pass begins, multiplied."""
    outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given: list[torch.Tensor | None]
    if grad_tensors is None:
        given = [None] * len(outputs)
    else:
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
    return [
        (torch.ones_like(output) if gradient is None else gradient) * scale
        for output, gradient in zip(outputs, given, strict=True)
    ]
