"""Reports of the workers' loops, put together: means by samples, or by what batches weigh, over the workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from steepest.core.system import system


class Reported(NamedTuple):
    """The values of one call of `report` on one worker."""

    number: int  # of the worker's calls before
    weight: float  # of this worker's batches since its call before
    values: dict[str, float]


class Reports:
    """The values of all calls of `report`: the n-th calls of all workers are one row.

    With `Checkpoints` the calls are also in the file ``reports.jsonl`` beside them, a row for each: a program that
    continues from a checkpoint has those that were made before.

    Example:
        >>> reports = Reports()
        >>> reports.add(0, [Reported(0, 3, {"loss": 1.0})], step=5)
        >>> reports.add(1, [Reported(0, 1, {"loss": 2.0})], step=5)
        >>> reports.rows()
        [{'loss': 1.25}]
    """

    def __init__(self) -> None:
        # by number of the call and worker
        self._calls: dict[int, dict[int, Reported]] = {}
        self._shown: dict[int, int] = {}  # by worker, the last call that a step's row tells of
        self._new: list[tuple[int, int, Reported]] = []  # not in the file: step, worker and call
        self._dropped = 0  # of these before, that are

    def add(self, worker: int, reported: Iterable[Reported], step: int) -> None:
        """Add what one worker has reported; a call that was added before, perhaps of its predecessor, is replaced.

        Args:
            worker: its number.
            reported: its calls.
            step: the number of steps committed by then.
        """
        for each in reported:
            of_all = self._calls.setdefault(each.number, {})
            if (
                of_all.get(worker) != each
            ):  # at the end of a `fit` workers are asked for all once more
                of_all[worker] = each
                self._new.append((step, worker, each))

    def add_noted(
        self,
        notes: Iterable[tuple[int, int, float, dict[str, float]]],
        step: int,
        shown: bool = True,
    ) -> None:
        """Add what workers have reported with the pushes of a step.

        Args:
            notes: worker, number, weight and values of each call.
            step: its number.
            shown: whether the step has a row in the history, which tells of them.
        """
        for worker, number, weight, values in notes:
            self.add(worker, [Reported(number, weight, values)], step)
            if shown:
                self._shown[worker] = number

    def rows(self) -> list[dict[str, float]]:
        """Return the means by name, one row for each call."""
        return [
            _means([each for _, each in sorted(calls.items())])
            for _, calls in sorted(self._calls.items())
        ]

    def behind_the_last_step(self) -> dict[str, float]:
        """Return the last means of what no step's row tells of, by name."""
        found: dict[str, float] = {}
        for number, calls in sorted(self._calls.items()):
            left = [
                each
                for worker, each in sorted(calls.items())
                if self._shown.get(worker, -1) < number
            ]
            found |= _means(left)
        return found

    def resume(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue with the rows of the file, of a program before; no row of the history of this one tells of them."""
        for row in rows:
            worker, number = row["worker"], row["call"]
            values = {n: math.nan if v is None else float(v) for n, v in row["values"].items()}
            self._calls.setdefault(number, {})[worker] = Reported(number, row["weight"], values)
            self._shown[worker] = max(self._shown.get(worker, -1), number)

    def unwritten(self) -> tuple[list[dict[str, Any]], int]:
        """Return the rows that are not in the file, and the number to give to `wrote`."""
        now = round(system().time(), 3)
        rows = [
            {
                "kind": "report",
                "time": now,
                "step": step,
                "worker": worker,
                "call": each.number,
                "weight": each.weight,
                "values": each.values,
            }
            for step, worker, each in self._new
        ]
        return rows, self._dropped + len(rows)

    def wrote(self, number: int) -> None:
        """Note that the rows that `unwritten` returned with this number are in the file."""
        del self._new[: max(number - self._dropped, 0)]
        self._dropped = max(self._dropped, number)

    def last(self) -> dict[str, float]:
        """Return the last mean of each name."""
        found: dict[str, float] = {}
        for row in self.rows():
            found |= row
        return found


def _means(calls: Sequence[Reported]) -> dict[str, float]:
    """Return the means by weight of values by name; plain ones where nothing weighs anything."""
    found = {}
    for name in dict.fromkeys(name for each in calls for name in each.values):
        own = [(each.weight, each.values[name]) for each in calls if name in each.values]
        total = sum(weight for weight, _ in own)
        if total:
            found[name] = sum(weight * value for weight, value in own) / total
        else:
            found[name] = sum(value for _, value in own) / len(own)
    return found
