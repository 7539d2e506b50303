"""Curves of bounded size: of many steps the mean, the least and the greatest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_MOST = 1e100  # of a number that a page shows


@dataclass
class _Bucket:
    """Some steps that follow each other."""

    index: int  # its first step is this many widths after the first one
    step: int = 0  # the last
    time: float = 0.0
    steps: int = 0
    # by name: number of values, sum, least, greatest
    values: dict[str, list[float]] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)

    def add(
        self, step: int, time: float, values: Mapping[str, float], sums: Mapping[str, float]
    ) -> None:
        """Add a later step, in place, since a run has many."""
        self.step, self.time, self.steps = step, time, self.steps + 1
        for name, value in values.items():
            if not math.isfinite(value):
                continue
            own = self.values.get(name)
            if own is None:
                self.values[name] = [1, value, value, value]
                continue
            own[0] += 1
            own[1] += value
            if value < own[2]:
                own[2] = value
            if value > own[3]:
                own[3] = value
        for name, total in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total

    def merge(self, other: _Bucket) -> None:
        """Add later steps."""
        self.step, self.time, self.steps = other.step, other.time, self.steps + other.steps
        for name, (count, total, least, most) in other.values.items():
            own = self.values.setdefault(name, [0, 0.0, math.inf, -math.inf])
            own[:] = own[0] + count, own[1] + total, min(own[2], least), max(own[3], most)
        for name, total in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + total


class Curves:
    """Numbers of steps in buckets of equal width, which doubles when there are too many.

    Args:
        limit: the greatest number of buckets.

    Attributes:
        revision: changes when complete buckets have changed.
        width: the steps of a bucket.
    """

    def __init__(self, limit: int = 800) -> None:
        self.revision = 0
        self.width = 1
        self._limit = limit
        self._buckets: list[_Bucket] = []

    def __len__(self) -> int:
        return len(self._buckets)

    @property
    def step(self) -> int:
        """The last step; 0 where there is none."""
        return self._buckets[-1].step if self._buckets else 0

    def add(
        self,
        step: int,
        time: float,
        values: Mapping[str, float],
        sums: Mapping[str, float],
    ) -> None:
        """Add a step: `values` have a mean in each bucket, `sums` a sum. Later than all steps so far."""
        index = (step - 1) // self.width
        is_new = not self._buckets or self._buckets[-1].index != index
        if is_new:
            self._buckets.append(_Bucket(index))
        self._buckets[-1].add(step, time, values, sums)
        while len(self._buckets) > self._limit:
            self._double()

    def add_to_last(self, time: float, values: Mapping[str, float]) -> None:
        """Add values that came behind the last step; a bucket of that step alone has them instead of its own."""
        if not self._buckets:
            return
        bucket = self._buckets[-1]
        if bucket.steps == 1:
            for name in values:
                bucket.values.pop(name, None)
        bucket.add(bucket.step, time, values, {})
        bucket.steps -= 1  # it was no step

    def _double(self) -> None:
        self.width, self.revision = 2 * self.width, self.revision + 1
        before, self._buckets = self._buckets, []
        for bucket in before:
            bucket.index //= 2
            if self._buckets and self._buckets[-1].index == bucket.index:
                self._buckets[-1].merge(bucket)
            else:
                self._buckets.append(bucket)

    def clear(self) -> None:
        """Forget all steps."""
        self.width, self.revision = 1, self.revision + 1
        self._buckets.clear()

    def as_json(self, since: int = 0) -> dict[str, Any]:
        """Return the buckets from a number on, as columns; null where a bucket has no such number.

        Returns:
            "revision", "from", "width", "step" and "time" (of each bucket's last step), "values" by
            name: [means, least, greatest], where a bucket has one step only the means; "sums" by
            name, and "steps" of each bucket.
        """
        chosen = self._buckets[since:]
        names = sorted({name for bucket in chosen for name in bucket.values})
        values = {name: self._columns(chosen, name) for name in names}
        totals = sorted({name for bucket in chosen for name in bucket.sums})
        return {
            "revision": self.revision,
            "from": since,
            "width": self.width,
            "step": [bucket.step for bucket in chosen],
            "time": [round(bucket.time, 1) for bucket in chosen],
            "steps": [bucket.steps for bucket in chosen],
            "values": values,
            "sums": {n: [short(b.sums.get(n)) for b in chosen] for n in totals},
        }

    def _columns(self, chosen: list[_Bucket], name: str) -> list[list[float | None]]:
        sums = [bucket.values.get(name) for bucket in chosen]
        means = [None if each is None else short(each[1] / each[0]) for each in sums]
        if self.width == 1:
            return [means]
        bounds = [[None if each is None else short(each[at]) for each in sums] for at in (2, 3)]
        return [means, *bounds]


def plain(value: Any) -> float | None:
    """Return a number unchanged if JSON, and sums of many like it, can hold it; else None.

    Raises:
        ValueError: it is no number.

    Example:
        >>> plain(3), plain(math.nan), plain(10**400)
        (3, None, None)
    """
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        raise ValueError(f"{value!r:.40} is no number")
    return value if -_MOST < value < _MOST else None


def short(value: float | None) -> float | None:
    """Return a number with six digits; None for NaN and infinities, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
