"""Comparison of a loop's losses in batches of several sizes: warns of one that is no mean over its samples.

Workers' gradients are averaged by samples. That is one process's gradient if each worker's loss is the mean over
its samples, times a number that all batches have in common, and terms that do not depend on samples.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType
from typing import NamedTuple

import torch

from steepest.core.models.loss_graph import LossReduction, ReductionKind, reductions, weighted
from steepest.core.models.losses import OURS

DO_SUM = "give steepest.prepare(..., reduction='sum'), or take the mean"
_DO_MEAN = "divide by what the batch has on this worker, such as len(x)"

_ADDS_UP = (
    "the loss has {} with the same factor, {:g}, in a batch of {} samples and in one of {}: it adds up samples and is "
    "taken for their mean, so that its gradient is not that of one process: "
    + _DO_MEAN
    + ", or "
    + DO_SUM
)
_EACH = (
    "backward() was called for each of the {1} samples of a batch, and for each of the {2} of another one, with losses "
    "that have the same factor, {0:g}: where they are to be the mean of the batch, " + _DO_MEAN
)
_DIVIDED = (
    "backward() was called for each of the {1} samples of a batch, with losses divided by {0:g}: where they are to be "
    "the mean of the batch, " + _DO_MEAN
)
_WEIGHS = (
    "the loss is a mean over other numbers than samples ({}): over {:g} of {} samples, and over {:g} of {}, while "
    "workers' gradients are averaged by samples: say what a batch weighs, by steepest.weight() before backward(), such "
    "as the number of tokens that are not ignored, or the sum of class weights"
)
_COMPARES = (
    "the loss compares the samples of its batch with each other ({}): each worker compares its own alone, {} of a "
    "batch and {} of another one; compute it of steepest.gather(outputs), which passes the gradient on"
)
_FUNCTION = (
    "the loss has {} of a number of all samples in its batch, of {} and of {} samples: the mean of what workers find "
    "is not that of the whole batch; apply it to each sample, or compute the loss of steepest.gather(outputs)"
)

_ONCE = (
    "the loss has a term ({}) that is the same in a batch of {} samples and in one of {}: with reduction='sum' the "
    "gradients of all workers are added up, and with them this term, once for each worker; multiply it by the batch's "
    "share of the samples, len(x) / steepest.gather(len(x)).sum(), or leave it to the optimizer's weight_decay"
)
_AVERAGES = (
    "the loss has a mean ({}, times {:g}) in a batch of {} samples and in one of {}, while reduction='sum' adds up the "
    "gradients of all workers: leave reduction out, or take the sum"
)

_ROUNDING = 1e-4  # of numbers that are compared, and of batches' sizes
_FEW = 3  # samples of a batch from which on as many backward passes are one for each
_MOST = 64  # reductions of a batch that are looked at


class _Key(NamedTuple):
    """The identity of a reduction: the line that calls backward(), and the operation."""

    lines: tuple[tuple[CodeType, int], ...]  # of the user's functions, from the innermost one
    inside: str
    name: str


class _Look(NamedTuple):
    """The losses of a batch, as they were seen."""

    samples: int
    passes: int  # backward passes
    found: Mapping[_Key, Sequence[LossReduction]]


class LossLooks:
    """Looks at the losses of a worker's first epoch: of batches 1, 2, 4, 8 and so on, and of new sizes.

    Attributes:
        is_looking: whether losses of the present batch are looked at.
    """

    def __init__(self) -> None:
        self.is_looking = False
        self._epoch: int | None = None  # the first one
        self._batches = 0
        self._sizes: set[int] = set()
        self._looks: list[_Look] = []
        self._present: dict[_Key, list[LossReduction]] = {}
        self._passes = self._seen = 0

    def begin(self, epoch: int, samples: int) -> None:
        """Begin with a batch that has a number of samples on this worker."""
        if self._epoch is None:
            self._epoch = epoch
        self._batches += 1
        often = self._batches & (self._batches - 1) == 0 or samples not in self._sizes
        self.is_looking = often and samples > 0 and epoch == self._epoch
        if self.is_looking:
            self._sizes.add(samples)
            self._present, self._passes, self._seen = defaultdict(list), 0, 0

    def see(self, loss: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Look at a loss before its backward pass; `gradient`: the one of several numbers with which that begins."""
        self._passes += 1
        if self._seen >= _MOST:
            return
        of_parts = None if gradient is None else weighted(loss, gradient)
        lines = _users_lines()
        for each in reductions(loss) if gradient is None else filter(None, [of_parts]):
            self._seen += 1
            self._present[_Key(lines, each.inside, each.name)].append(each)

    def end(self, samples: int, *, sums: bool) -> str | None:
        """End with a batch, or with a step of it; return in words what is wrong with its losses, or None.

        Args:
            samples: of which the losses are to be the mean, or the sum; 0 where they may be something else.
            sums: whether they are to be that.
        """
        now = _Look(samples, self._passes, self._present)
        is_whole = 0 < self._seen < _MOST
        self._present, self._passes, self._seen = defaultdict(list), 0, 0
        if not (is_whole and samples):
            return None
        self._looks = [*self._looks[-3:], now]
        if not sums and (wrong := _divided(now)):
            return wrong
        compared = _compared_sums if sums else _compared
        for before in self._looks[:-1]:
            for key in before.found.keys() & now.found.keys():
                if wrong := compared(before, now, key):
                    return wrong
        return None


def _users_lines() -> tuple[tuple[CodeType, int], ...]:
    """Return where the user's functions are, from the innermost one."""
    lines, frame = [], sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(OURS):
            lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(lines)


def _divided(look: _Look) -> str | None:
    """Return what is wrong with losses of single samples that are divided by another number than the batch has."""
    passes = look.passes
    if passes != look.samples or passes < _FEW or len(look.found) != 1:
        return None
    (every,) = look.found.values()
    factor = every[0].factor
    if len(every) != passes or factor == 1 or not _are_same(each.factor for each in every):
        return None
    return None if _is_near(factor * passes, 1) else _DIVIDED.format(1 / factor, passes)


def _compared(before: _Look, now: _Look, key: _Key) -> str | None:
    """Return what is wrong with the reductions of a key, as two batches show it."""
    old, new = before.found[key], now.found[key]
    sizes = before.samples, now.samples
    if sizes[0] != sizes[1] and (len(old), len(new)) == sizes:
        return _of_each(old, new, in_passes=(before.passes, now.passes) == sizes)
    if len(old) != len(new) or (len(new) > 1 and _make_a_mean(old, new, *sizes)):
        return None
    for one, other in zip(old, new, strict=True):
        if wrong := _wrong(one, other, *sizes):
            return wrong
    return None


def _of_each(
    old: Sequence[LossReduction], new: Sequence[LossReduction], *, in_passes: bool
) -> str | None:
    """Return what is wrong with losses of single samples; `in_passes`: each has a backward pass."""
    factor, other = (sum(each.of_mean for each in every) / len(every) for every in (old, new))
    if not _is_near(factor, other) or new[0].inside:
        return None
    if in_passes:
        return _EACH.format(factor, len(old), len(new))
    return _ADDS_UP.format(f"a {new[0].name} of each sample", factor, len(old), len(new))


def _make_a_mean(
    old: Sequence[LossReduction], new: Sequence[LossReduction], before: int, now: int
) -> bool:
    """Return whether means of parts of a batch make its mean together: of `before`, and of `now` samples."""
    counted = [sum(each.counted for each in every) for every in (old, new)]
    factors = [sum(each.of_mean for each in every) for every in (old, new)]
    is_linear = not any(each.inside or each.kind is ReductionKind.OTHER for each in new)
    return is_linear and _is_near(*factors) and _is_near(counted[0] * now, counted[1] * before)


def _wrong(old: LossReduction, new: LossReduction, before: int, now: int) -> str | None:
    """Return what is wrong with a reduction, of batches of `before` and `now` samples."""
    differ = not _is_near(before, now)
    follows = _is_near(old.size * now, new.size * before)  # has as many numbers for each sample
    if old.size == new.size and differ:
        return None  # of no samples
    if differ and follows and (new.inside or new.kind is ReductionKind.OTHER):
        return _FUNCTION.format(new.inside or new.name, before, now)
    if new.inside or new.kind is ReductionKind.OTHER:
        return None
    if new.kind is ReductionKind.SUM:
        if differ and follows and new.factor and _is_near(old.factor, new.factor):
            return _ADDS_UP.format(f"a {new.name}", new.factor, before, now)
        others = not _is_near(old.divided * now, new.divided * before)
        if others and old.multiplied == new.multiplied and old.divided != new.divided:
            return _WEIGHS.format(new.name, old.divided, before, new.divided, now)
        return None
    if _is_near(old.counted * now, new.counted * before):
        return None if follows else _COMPARES.format(new.name, before, now)
    if old.counted == new.counted:
        return None
    return _WEIGHS.format(new.name, old.counted, before, new.counted, now)


def _compared_sums(before: _Look, now: _Look, key: _Key) -> str | None:
    """Return what is wrong with the reductions of a key where losses are to be sums, as two batches show it."""
    old, new = before.found[key], now.found[key]
    if _is_near(before.samples, now.samples) or len(old) != len(new):
        return None
    for one, other in zip(old, new, strict=True):
        if not one.of_mean or not _is_near(one.of_mean, other.of_mean):
            continue
        if one.size == other.size:
            return _ONCE.format(other.name, before.samples, now.samples)
        if not other.inside and _is_near(one.size * now.samples, other.size * before.samples):
            return _AVERAGES.format(other.name, other.of_mean, before.samples, now.samples)
    return None


def _are_same(numbers: Iterable[float]) -> bool:
    return len(set(numbers)) == 1


def _is_near(one: float, other: float) -> bool:
    """Return whether two numbers are the same but for roundings."""
    return abs(one - other) <= _ROUNDING * max(abs(one), abs(other))
