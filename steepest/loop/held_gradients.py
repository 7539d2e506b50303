"""Gradients that a loop keeps from one batch to the next, for a later step of one of its optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class _Mark(NamedTuple):
    """A gradient at some time: which tensor, and how often it had been written to."""

    tensor: weakref.ReferenceType[torch.Tensor]
    version: int


@dataclass
class _OfOptimizer:
    """The gradients of one optimizer.

    Attributes:
        optimizer: the optimizer.
        left: those that its last step has left.
        at_batch: those that were there when the batch began, for a later step.
        anew: those that were computed with the weights of later steps.
        drops: whether its last step was made of other tensors than were there when the batch began; None where
            that is not known yet.
    """

    optimizer: torch.optim.Optimizer
    left: Mapping[int, _Mark] = field(default_factory=dict)
    at_batch: Mapping[int, _Mark] = field(default_factory=dict)
    anew: Mapping[int, _Mark] = field(default_factory=dict)
    drops: bool | None = None

    def held(self) -> dict[int, _Mark]:
        """Return the gradients; none if they are those of the last step, or zero."""
        marks = _marks(self.optimizer)
        touched = [p for p, mark in marks.items() if mark != self.left.get(p)]
        return marks if any(_is_any(marks[p].tensor()) for p in touched) else {}

    def step(self) -> bool:
        """Note that the optimizer has stepped; return whether it did with gradients computed anew."""
        now = _marks(self.optimizer)
        if self.at_batch:
            self.drops = not _shared(self.at_batch, now)
        computed_anew = _shared(self.anew, now)
        self.left, self.at_batch, self.anew = now, {}, {}
        return computed_anew


class HeldGradients:
    """Tells gradients that are added up over batches from such as only lie there until they are dropped.

    Those that a step has left, unchanged since, are not added to. What lies in an optimizer's parameters at the
    beginning of a batch, as a discriminator's does behind the backward pass of a generator's loss, is taken for a
    part of the optimizer's next step unless its last one was made of other tensors than it had found there.

    Args:
        optimizers: of the loop.
        holds_rows: returns whether there are gradients of embedding tables' rows, for the first optimizer's next
            step; None without tables.

    Attributes:
        awaited: the optimizers, by number, to whose next step gradients of earlier batches belong, as far as is
            known.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        holds_rows: Callable[[], bool] | None = None,
    ) -> None:
        self.awaited: set[int] = set()
        self._holds_rows = holds_rows
        self._every = [_OfOptimizer(each) for each in optimizers]

    def begin_batch(self) -> bool:
        """Note that a batch begins; return whether an optimizer has a part of a later step."""
        for each in self._every:
            each.at_batch = each.held()
        rows = self._of_rows()
        self.awaited = {
            i
            for i, each in enumerate(self._every)
            if not each.drops and (each.at_batch or i == rows)
        }
        return bool(self.awaited)

    @property
    def is_sure(self) -> bool:
        """Whether one of those optimizers has added gradients up before."""
        return any(self._every[index].drops is False for index in self.awaited)

    @property
    def adds_up(self) -> bool:
        """Whether an optimizer is known to step with gradients of several batches."""
        return any(each.drops is False for each in self._every)

    def note_computed_anew(self) -> None:
        """Note that the present gradients were computed with the weights of later steps."""
        for each in self._every:
            each.anew = _marks(each.optimizer)

    def step(self, index: int) -> bool:
        """Note that an optimizer has stepped, by number; return whether it did with gradients computed anew."""
        self.awaited.discard(index)
        return self._every[index].step()

    @property
    def holds(self) -> bool:
        """Whether an optimizer has a part of a later step now."""
        rows = self._of_rows()
        return any(
            not each.drops and (i == rows or each.held()) for i, each in enumerate(self._every)
        )

    def _of_rows(self) -> int | None:
        """Return the index of the optimizer whose next step takes gradients of rows; None if there are none."""
        return 0 if self._holds_rows is not None and self._holds_rows() else None


def _shared(before: Mapping[int, _Mark], now: Mapping[int, _Mark]) -> bool:
    """Return whether a parameter has the same gradient as before, of whatever version."""
    return any(p in now and mark.tensor() is now[p].tensor() for p, mark in before.items())


def _marks(optimizer: torch.optim.Optimizer) -> dict[int, _Mark]:
    """Return the gradients of an optimizer's parameters, by the identities of these."""
    return {
        id(parameter): _Mark(weakref.ref(parameter.grad), parameter.grad._version)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }


def _is_any(gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is not zero; zeros are what `zero_grad(set_to_none=False)` leaves."""
    if gradient is None:
        return False
    if gradient.is_sparse:
        return gradient._nnz() > 0
    return bool(gradient.any())
