"""Gradients of rows that are pushed while the next step computes, one step after their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from steepest.core.engine.gradient_sum import NOTHING, ChunkReady
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.memory import sum_of_squares
from steepest.errors import CheckpointError, ConfigurationError
from steepest.tables.job.row_collector import RowCollector
from steepest.tables.rows.dealing import Dealing
from steepest.tables.rows.gradients import WITH_LIVES, RowGradients, added
from steepest.tables.rows.spread import Spread

#: The gradient of each group of tables, in units of some weight; None where there is none.
Gradients = Sequence[RowGradients | None]


class _DelayedGradient(NamedTuple):
    """A gradient of rows that has not been pushed, by group of tables."""

    gradients: Gradients
    unit: float  # weight of one unit of the gradients
    total: float  # weight of the worker's samples


class DelayedRows:
    """The gradients of rows of one worker, each of which may be pushed with the next step's.

    If gradients are delayed, each is pushed as the next step begins, so that its bytes travel while
    that step computes. The last step that is granted pushes its own as well, so that nothing is kept
    between calls of a user. Where an update is left out because of NaN or infinity, its step's rows
    are left out with it, and those of the step before are pushed again with the next step. What is
    kept when a worker's process gets another role is given to the new one as `state`; what is kept
    when the process dies is lost.
    """

    def __init__(self, rows: RowCollector) -> None:
        # whether gradients are delayed; otherwise each step pushes its own, with what is kept
        self.delays = False
        self.is_last = True  # whether no step is granted after the present one
        self._rows = rows
        self._kept: _DelayedGradient | None = None  # of the step before the present one
        self._next: _DelayedGradient | None = None  # of the present one
        # what was kept in the step before: servers may turn out not to have that step
        self._before: _DelayedGradient | None = None
        self._version = -1  # of the present step
        self._sent = False  # whether `_kept` is part of its push

    @property
    def _pushes_own(self) -> bool:
        """Whether the present step pushes its own gradient."""
        return self.is_last or not self.delays

    def begin(self, version: int) -> None:
        """Begin a step from a version, which may be the same again."""
        if version != self._version:
            self._before = self._kept
            if self._sent:
                self._kept, self._next = self._next, None
            self._version, self._sent = version, False

    def left_out(self) -> None:
        """Note that the update made of the present step was left out, unless that is known.

        Its own gradients are dropped. Those of the step before are kept for the next step, unless it is they
        that are not finite.
        """
        if not self._sent:
            return
        self._next, self._sent = None, False
        if self._kept is not None and not _is_finite(self._kept):
            self._kept = None

    def state(self, version: int) -> Tensors:
        """Return the gradient that no update has, once a version is committed.

        Args:
            version: the last that is committed. It is the present step's, the next one, or the one
                before: weights may come from a server that dies before another one knows of them.

        Returns:
            For each group of tables with gradients its number, with them as flat bytes, and "+lives" behind the
            number where these have the lives of rows; and "weights":
            (2,) float64, that of one unit, and that of the samples. Empty if there is no gradient.
        """
        kept = self._next if self._sent and self._version < version else self._kept
        kept = self._before if self._version > version else kept
        return Tensors() if kept is None else _packed(kept)

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Keep a gradient as `state` returned it, in place of what is kept; none if it is empty."""
        self._kept = _unpacked(self._rows.dealing, state) if state else None
        self._next = self._before = None
        self._sent, self._version = False, -1

    def begin_share(self, ready: ChunkReady) -> None:
        """Push the gradient of the step before, unless this step pushes its own too.

        Not called when a gradient is pushed again.
        """
        self._next = None
        if not self._pushes_own:
            self._push(self._kept, ready)

    def end_share(self, gradients: Gradients, unit: float, total: float, ready: ChunkReady) -> None:
        """Keep the gradient of the present step, or push it with that of the step before.

        `unit` and `total`: see `_DelayedGradient`.
        """
        own = _DelayedGradient(gradients, unit, total)
        if self._pushes_own:
            self._push(self._with_kept(own), ready)
        else:
            self._next = own

    def _with_kept(self, own: _DelayedGradient) -> _DelayedGradient:
        """Return the sum of a gradient and the one before, each the mean over its own samples.

        A push has one weight of samples. If the weights differ, the earlier mean is scaled to the present one.
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

    def _push(self, kept: _DelayedGradient | None, ready: ChunkReady) -> None:
        packed = {} if kept is None else self._rows.packed(kept.gradients)
        unit, total = (0.0, 0.0) if kept is None else (kept.unit, kept.total)
        for chunk in self._rows.pushed:
            ready(chunk, packed.get(chunk, NOTHING), unit, total, frozenset())
        self._sent = True


def _packed(kept: _DelayedGradient) -> Tensors:
    """Return a gradient as a state."""
    if not kept.total:
        return Tensors()
    weights = torch.tensor([kept.unit, kept.total], dtype=torch.float64)
    tensors = {"weights": weights}
    for number, part in enumerate(kept.gradients):
        if part is not None:
            lives = part.lives is not None
            name = f"{number}{WITH_LIVES if lives else ''}"
            tensors[name] = torch.from_numpy(part.pack(lives=lives))
    return Tensors(tensors)


def _unpacked(dealing: Dealing, state: Mapping[str, torch.Tensor]) -> _DelayedGradient:
    """Return the gradient of a state that is not empty; CheckpointError: it is no gradient of such tables."""
    gradients: list[RowGradients | None] = [None] * len(dealing.groups)
    try:
        unit, total = state["weights"].tolist()
        if not (unit > 0 and total > 0 and math.isfinite(unit + total)):
            raise ConfigurationError(f"their weights are {unit} and {total}")
        for name in state.keys() - {"weights"}:
            number, lives = name.removesuffix(WITH_LIVES), name.endswith(WITH_LIVES)
            group = dealing.groups[int(number)]
            packed = state[name].clone().numpy()  # at a multiple of its numbers' size
            form = group[0].dim, group[0].form.dtype
            rows = RowGradients.unpack(packed, *form, lives=lives)
            rows.require(
                [table.name for table in group], np.ones(1, np.bool_), Spread.evenly(len(group), 1)
            )
            gradients[int(number)] = rows
    except (ConfigurationError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the gradients of rows that a worker had not pushed make no sense: {error}"
        ) from error
    return _DelayedGradient(gradients, unit, total)


def divided(
    dealing: Dealing, states: Sequence[Mapping[str, torch.Tensor]], workers: int
) -> list[Tensors]:
    """Divide gradients that some workers have not pushed among a number of workers.

    All push the same weight of samples, so that the mean over their pushes is that over `states`,
    also where they push it together with gradients of their own.

    Args:
        dealing: of tables into chunks.
        states: each as `DelayedRows.state` returned it.
        workers: their number.

    Returns:
        By worker, as `DelayedRows.load_state` takes it.

    Raises:
        CheckpointError: a state is no gradient of such tables.
    """
    delayed = [_unpacked(dealing, state) for state in states if state]
    total = math.fsum(kept.total for kept in delayed) / workers
    return [
        _added(delayed[worker::workers], total, len(dealing.groups)) for worker in range(workers)
    ]


def _added(delayed: Sequence[_DelayedGradient], total: float, groups: int) -> Tensors:
    """Return the sum of some gradients, with a new weight of the samples, as a state."""
    unit = delayed[0].unit if delayed else 1.0
    together: list[RowGradients | None] = []
    for group in range(groups):
        parts = [(kept.gradients[group], kept.unit / unit) for kept in delayed]
        scaled = [part.times(factor) for part, factor in parts if part is not None]
        together.append(added(scaled) if scaled else None)
    return _packed(_DelayedGradient(together, unit, total))


def _is_finite(kept: _DelayedGradient) -> bool:
    """Return whether gradients pass the check that servers make of their mean."""
    factor = kept.unit / kept.total if kept.total else 1.0
    parts = [part.times(factor).gradients for part in kept.gradients if part is not None]
    return math.isfinite(sum(sum_of_squares(torch.from_numpy(p.reshape(-1))) for p in parts))
