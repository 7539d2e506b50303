"""Gradients that a user's loop changes between the backward pass and the step: each worker changes its own alone.

A factor that stays the same is the same before and after the mean over the workers is formed. What depends on the
gradient itself, such as clipping by hand, is not: the loop is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from steepest.loop.losses import line_of_user

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop

_ROUNDINGS = 1e-5  # by which a factor may differ from element to element


class LocalEdits:
    """Finds out whether a loop changes its gradients by more than a constant factor.

    Whether it changes them is known at each step by their versions. If so it is looked at in further steps, in
    which their values are kept: after 1, 2, 4, 8 and so on of those in which they have changed.

    Attributes:
        keeps: whether the present step has to call `keep`.
        is_found: whether the loop changes its gradients by more than a constant factor.
    """

    def __init__(self) -> None:
        self.keeps = False
        self.is_found = False
        self._is_settled = False
        self._kept: dict[int, torch.Tensor] = {}
        self._changed = 0  # steps in which gradients have changed
        self._factor: float | None = None  # of the last step that was looked at; None before

    def keep(self, index: int, gradient: torch.Tensor | None) -> None:
        """Keep the values of an entry's gradient as a backward pass has left it."""
        if gradient is not None and not gradient.is_sparse:
            self._kept[index] = gradient.detach().clone()

    def end_step(self, gradients: Mapping[int, torch.Tensor | None] | None) -> None:
        """Note that a step is taken.

        Args:
            gradients: those of the step, by entry; None if they are as backward passes have left them.
        """
        kept, self._kept, self.keeps = self._kept, {}, False
        if gradients is None or self._is_settled:
            return
        if kept:
            self._look(kept, gradients)
        self._changed += 1
        self.keeps = not self._is_settled and self._changed & (self._changed - 1) == 0

    def _look(
        self, kept: Mapping[int, torch.Tensor], gradients: Mapping[int, torch.Tensor | None]
    ) -> None:
        before, self._factor = self._factor, None
        factors = [
            _factor(was, now)
            for index, was in kept.items()
            if (now := gradients.get(index)) is not None
        ]
        known = [factor for factor in factors if factor is not None]
        most = max(map(abs, known), default=0.0)
        if len(known) < len(factors) or (known and max(known) - min(known) > _ROUNDINGS * most):
            self.is_found = True
            self._is_settled = True
        elif known and known[0] != 1.0:
            self._factor = known[0]
            if before is not None:
                self.is_found = abs(before - known[0]) > _ROUNDINGS * abs(before)
                self._is_settled = True
        else:
            self._factor = before


def _factor(was: torch.Tensor, now: torch.Tensor) -> float | None:
    """Return the factor between two tensors; None if it is not the same for all elements."""
    if was.shape != now.shape or was.dtype != now.dtype:
        return None
    if torch.equal(was, now):
        return 1.0
    old, new = was.double(), now.detach().double()
    square = (old * old).sum()
    factor = (old * new).sum() / square if square else torch.zeros(())
    if not bool(((new - factor * old).abs() <= _ROUNDINGS * new.abs().max()).all()):
        return None
    return float(factor)


class EditWarnings:
    """Warns a loop once if it changes gradients: each worker has those of its own samples alone.

    Args:
        loop: that changes them.

    Attributes:
        are_made: whether the loop changes gradients between its backward passes and its steps, see `LocalEdits`.
        are_told: whether the loop was warned of that, or of clipping by torch's functions.
        epoch: the last one in which hooks of parameters were looked for; -1 before.
    """

    def __init__(self, loop: UserLoop) -> None:
        self._loop = loop
        self.are_made = False
        self.are_told = False
        self.epoch = -1

    def look(self) -> None:
        """Look, at a step, for what changes gradients: the loop, and in an epoch's first step hooks of parameters.

        What divides gradients by what it has said that they weigh is no change.
        """
        loop = self._loop
        if self.are_made and loop.weights.sum.counts_said:
            self._tell(
                "the loop changes gradients of several batches that have said what they weigh, by which each backward "
                "pass counts already (let each loss be the mean over its batch's weight)"
            )
        elif self.are_made and loop.weights.own is None:
            self._tell("the loop changes its gradients between backward() and step()")
        if self.epoch == loop.batches.epoch:
            return
        self.epoch = loop.batches.epoch
        for each in (parameter for trained in loop.prepared.trained() for parameter in trained):
            if each._backward_hooks:
                (name,), _ = loop.prepared.model.names_of([each])
                self._tell(f"parameter {name!r} has a hook of its gradient (register_hook)")
                return

    def _tell(self, what: str) -> None:
        loop = self._loop
        if self.are_told or not loop.steps.averages or loop.prepared.closures:
            return
        self.are_told = True
        if loop.job.rank:  # the others' loops do the same
            return
        warnings.warn(
            f"{what}, where each worker has the gradient of its own samples alone. A "
            "factor, a mask, or a multiple of the weights gives what one process gives; what depends on the gradient, "
            "such as clipping, does not: steepest.clip_grad_norm_(model.parameters(), max_norm) clips the mean of all",
            stacklevel=line_of_user(),
        )
