"""Gradients that a loop keeps from one batch to the next, for a later step of one of its optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class _Mark(NamedTuple):
    """A gradient as it was found: which tensor, and how often it had been written to."""

    tensor: weakref.ReferenceType[torch.Tensor]
    version: int


class HeldGradients:
    """Tells gradients that are added up over batches from such as only lie there until they are dropped.

    Those that a step has left, unchanged since, are not added to. What lies in an optimizer's parameters at the
    beginning of a batch, as a discriminator's does behind the backward pass of a generator's loss, is taken for a part
    of the optimizer's next step unless its last one was made of other tensors than it had found there.

    Args:
        optimizers: of the loop.
        holds_rows: returns whether there are gradients of embedding tables' rows, for the first optimizer's next
            step; None without tables.

    Attributes:
        awaited: the optimizers, by number, to whose next step gradients of earlier batches belong, as far as is known.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        holds_rows: Callable[[], bool] | None = None,
    ) -> None:
        self.awaited: set[int] = set()
        self._holds_rows = holds_rows
        self._optimizers = optimizers
        self._left: list[dict[int, _Mark]] = [{} for _ in optimizers]  # by the last step
        self._found: list[dict[int, _Mark]] = [{} for _ in optimizers]  # when the batch began
        self._drops: list[bool | None] = [None for _ in optimizers]  # None: not known yet
        self._anew: list[dict[int, _Mark]] = [{} for _ in optimizers]  # see `note_computed_anew`

    def begin_batch(self) -> bool:
        """Note that a batch begins; return whether an optimizer has a part of a later step."""
        self._found = [self._held(index) for index in range(len(self._optimizers))]
        rows = None if self._holds_rows is None else self._of_rows()
        self.awaited = {
            i for i, drops in enumerate(self._drops) if not drops and (self._found[i] or i == rows)
        }
        return bool(self.awaited)

    @property
    def is_sure(self) -> bool:
        """Whether one of those optimizers has added gradients up before."""
        return any(self._drops[index] is False for index in self.awaited)

    @property
    def adds_up(self) -> bool:
        """Whether an optimizer is known to step with gradients of several batches."""
        return False in self._drops

    def note_computed_anew(self) -> None:
        """Note that present gradients were computed by weights that later steps have made."""
        self._anew = [_marks(each) for each in self._optimizers]

    def step(self, index: int) -> bool:
        """Note that an optimizer has stepped, by number; return whether it did with gradients computed anew."""
        now, found = _marks(self._optimizers[index]), self._found[index]
        anew, self._anew[index] = self._anew[index], {}
        if found:
            kept = [p for p, mark in found.items() if p in now and mark.tensor() is now[p].tensor()]
            self._drops[index] = not kept
        self._left[index], self._found[index] = now, {}
        self.awaited.discard(index)
        if not anew:
            return False
        return any(p in now and mark.tensor() is now[p].tensor() for p, mark in anew.items())

    @property
    def holds(self) -> bool:
        """Whether an optimizer has a part of a later step now."""
        rows = None if self._holds_rows is None else self._of_rows()
        return any(
            not drops and (i == rows or self._held(i)) for i, drops in enumerate(self._drops)
        )

    def _of_rows(self) -> int | None:
        """Return the number of the optimizer to whose next step gradients of rows belong; None if there are none."""
        assert self._holds_rows is not None
        return 0 if self._holds_rows() else None

    def _held(self, index: int) -> dict[int, _Mark]:
        """Return an optimizer's gradients; none if they are those of its last step, or zero."""
        marks = _marks(self._optimizers[index])
        touched = [p for p, mark in marks.items() if mark != self._left[index].get(p)]
        return marks if any(_is_any(marks[p].tensor()) for p in touched) else {}


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
