"""The losses on which a user's loop calls backward(), for the job's history and for warnings."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from steepest.core.models.loss_graph import PERHAPS, SUMMED, summed_by
from steepest.core.models.losses import OURS
from steepest.errors import ConfigurationError
from steepest.loop.loss_looks import DO_SUM, LossLooks

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


_torchs_backward: Any = torch.autograd.backward  # `Tensor.backward` calls it, too
_torchs_grad: Any = torch.autograd.grad
_OUTSIDE = -1  # of any backward pass
_BY_HAND = (
    "torch.autograd.grad() in a batch whose gradients are added to those of batches that are split otherwise: only "
    "those of backward() are multiplied by the share of each worker; call that, or step after each batch"
)


class Losses:
    """The losses of a loop.

    Args:
        loop: whose they are.

    Attributes:
        found: those of the last step, or of the step in progress.
        looks: those at the losses of some batches.
        scale: by which backward passes are multiplied, see `steepest.loop.sum_weights`; None: the loop has yet to
            say.
    """

    def __init__(self, loop: UserLoop) -> None:
        self.found: list[torch.Tensor] = []
        self.scale: float | None = 1.0
        self._loop = loop
        self._has_looked = False
        self._has_warned = False
        self.looks = LossLooks()

    def add(self, loss: torch.Tensor) -> None:
        """Take the loss of a backward pass; ConfigurationError: it adds up samples, and is to be their mean.

        Where that is not sure, worker 0 warns.
        """
        if not self._has_looked and (samples := self._loop.weights.averaged) > 1:
            self._has_looked = True
            if not self._loop.prepared.sums:
                self._look_for_sums(loss, samples)
        if self.looks.is_looking:
            self.looks.see(loss)
        counted = loss.detach()
        self.found.append(counted if self.scale in (1.0, None) else counted * self.scale)

    def _look_for_sums(self, loss: torch.Tensor, samples: int) -> None:
        if (summed := summed_by(loss, samples)) is None:
            return
        name, is_certain = summed
        if is_certain:
            raise ConfigurationError(SUMMED.format(name, DO_SUM))
        self._has_warned = True
        if not self._loop.job.rank:
            warnings.warn(SUMMED.format(name, DO_SUM) + PERHAPS, stacklevel=line_of_user())

    def add_parts(self, parts: torch.Tensor, gradient: torch.Tensor) -> None:
        """Take the losses of a backward pass that begins with a gradient for each of them."""
        if self.looks.is_looking:
            self.looks.see(parts, gradient)

    def add_by_hand(self, loss: torch.Tensor) -> None:
        """Take a loss of which the loop asks for the gradients of trained parameters, by `torch.autograd.grad`.

        Warn if these are to be added to gradients of other batches: they are not multiplied by the batch's share.
        """
        if self.looks.is_looking and loss.dim() == 0:
            self.looks.see(loss)
        if self.scale not in (1.0, None) and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"worker {self._loop.job.rank}: {_BY_HAND}", stacklevel=line_of_user())

    def end_part(self) -> None:
        """Note that a step is to be taken, or the next batch begins; warn if the losses since are not a mean."""
        loop = self._loop
        is_gathered = loop.gatherer.has_gathered  # of the samples of all workers, perhaps
        wrong = self.looks.end(0 if is_gathered else loop.weights.averaged, sums=loop.prepared.sums)
        if wrong and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"worker {self._loop.job.rank}: {wrong}", stacklevel=line_of_user())


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
    """Show the loops' losses each backward pass in this context."""
    _watching.append(here)
    if len(_watching) == 1:
        torch.autograd.backward, torch.autograd.grad = _backward, _grad
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            torch.autograd.backward, torch.autograd.grad = _torchs_backward, _torchs_grad


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
            elif isinstance(grad_tensors, torch.Tensor) and grad_tensors.shape == loss.shape:
                losses.add_parts(loss, grad_tensors)
        if losses.scale is None:
            raise ConfigurationError(
                "backward() without steepest.weight() in a batch whose gradients are added to those of batches that "
                "had it: call it in each batch of the sum, before backward(), or in none"
            )
        if losses.scale != 1.0:
            grad_tensors = _scaled(tensors, grad_tensors, losses.scale)
    return _torchs_backward(tensors, grad_tensors, *arguments, **named)


@functools.wraps(_torchs_grad)
def _grad(outputs: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
    losses = _watching[0]() if _watching else None
    is_for_update = isinstance(outputs, torch.Tensor) and not named.get("create_graph")
    if losses is not None and is_for_update and torch._C._current_graph_task_id() == _OUTSIDE:
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        if any(isinstance(each, torch.nn.Parameter) for each in inputs):
            losses.add_by_hand(outputs)
    return _torchs_grad(outputs, inputs, *arguments, **named)


def _scaled(tensors: Any, grad_tensors: Any, scale: float) -> Any:
    """Return the gradients with which a backward pass begins, multiplied."""
    outputs = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    gradients: list[torch.Tensor | None]
    if grad_tensors is None:
        gradients = [None] * len(outputs)
    else:
        gradients = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors)
    return [
        (torch.ones_like(output) if gradient is None else gradient) * scale
        for output, gradient in zip(outputs, gradients, strict=True)
    ]
