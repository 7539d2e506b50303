"""Gradients of rows that are pushed while the next step computes, one step after their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from steepest.compression.codecs import sum_of_squares
from steepest.engine.chunk_ready import NOTHING, ChunkReady
from steepest.engine.row_collector import RowCollector
from steepest.tables.gradients import RowGradients, added

#: The gradient of each group of tables, in units of some weight; None where there is none.
Gradients = Sequence[RowGradients | None]


class _Kept(NamedTuple):
    """A gradient of rows that has not been pushed.

    Attributes:
        gradients: by group of tables.
        unit: weight of one unit of it.
        total: weight of the worker's samples.
    """

    gradients: Gradients
    unit: float
    total: float


class DelayedRows:
    """The gradients of rows of one worker, each of which is pushed with the next step's.

    It is pushed as that step begins, so that its bytes travel while the step computes. The last
    step that is granted pushes its own as well, so that nothing is kept between calls of a user.
    Where an update is left out because of NaN or infinity, its step's rows are left out with it, and
    those of the step before are pushed again with the next step. What is kept when its worker dies,
    or gets another role, is lost.

    Args:
        rows: packs what is pushed.

    Attributes:
        is_last: whether no step is granted after the present one.
    """

    def __init__(self, rows: RowCollector) -> None:
        self.is_last = True
        self._rows = rows
        self._kept: _Kept | None = None  # of the step before the present one
        self._next: _Kept | None = None  # of the present one
        self._version = -1  # of the present step
        self._sent = False  # whether `_kept` is part of its push

    def begin(self, version: int) -> None:
        """Begin a step from a version, which may be the same again."""
        if version != self._version:
            if self._sent:
                self._kept, self._next = self._next, None
            self._version, self._sent = version, False

    def left_out(self) -> None:
        """Note that the update made of the present step was left out, unless that is known.

        Its own gradients are dropped. Those of the step before are kept for the next step, unless it
        is they that are not finite.
        """
        if not self._sent:
            return
        self._next, self._sent = None, False
        if self._kept is not None and not _is_finite(self._kept):
            self._kept = None

    def forget(self) -> None:
        """Forget what has not been pushed: the state that it belongs to is given up."""
        self._kept = self._next = None
        self._sent = False

    def begin_share(self, ready: ChunkReady) -> None:
        """Push the gradient of the step before, unless this step pushes its own too.

        Called where the step's gradient is computed, rather than pushed again as it is.
        """
        self._next = None
        if not self.is_last:
            self._push(self._kept, ready)

    def end_share(self, gradients: Gradients, unit: float, total: float, ready: ChunkReady) -> None:
        """Keep the gradient of the present step; or push it, with that of the step before.

        Args:
            gradients: by group of tables, in units of `unit`.
            unit: weight of one unit of it.
            total: weight of the worker's samples.
            ready: see `ChunkReady`.
        """
        own = _Kept(gradients, unit, total)
        if self.is_last:
            self._push(self._with_kept(own), ready)
        else:
            self._next = own

    def _with_kept(self, own: _Kept) -> _Kept:
        """Return a gradient together with the one before, each as the mean that it is.

        Where workers have samples of other weights than in the step before, one push cannot have both
        of their means: then the gradients before count by the weights of the present ones.
        """
        before = self._kept
        if before is None:
            return own
        if not own.unit:  # there were no samples, and nothing is to be kept
            return before
        same = (before.unit, before.total) == (own.unit, own.total)
        factor = 1.0 if same else before.unit / before.total * (own.total / own.unit)
        together = []
        for old, new in zip(before.gradients, own.gradients, strict=True):
            parts = [old.times(factor)] if old is not None else []
            parts += [new] if new is not None else []
            together.append(added(parts) if parts else None)
        return own._replace(gradients=together)

    def _push(self, kept: _Kept | None, ready: ChunkReady) -> None:
        packed = {} if kept is None else self._rows.packed(kept.gradients)
        unit, total = (0.0, 0.0) if kept is None else (kept.unit, kept.total)
        for chunk in self._rows.dealing.chunks:
            ready(chunk, packed.get(chunk, NOTHING), unit, total, frozenset())
        self._sent = True


def _is_finite(kept: _Kept) -> bool:
    """Return whether gradients pass the check that servers make of their mean."""
    factor = kept.unit / kept.total if kept.total else 1.0
    parts = [part.times(factor).gradients for part in kept.gradients if part is not None]
    return math.isfinite(sum(sum_of_squares(torch.from_numpy(p.reshape(-1))) for p in parts))
