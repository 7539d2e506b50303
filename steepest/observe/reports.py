"""Reports of the workers' loops, put together: means by samples, or by what batches weigh, over the workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from steepest.core.system import system

CALLS_OF_PLACE = 1 << 16  #: more than a loop has calls of `report` at one place
ASKS = "\0evaluate"  #: the name under which a call asks for an evaluation; its value is the step


class Reported(NamedTuple):
    """The values of one call of `report` on one worker."""

    # the number of the place in the loop, times CALLS_OF_PLACE, and that of the calls before at that place
    number: int
    weight: float  # of this worker's batches since it reported these names before
    values: dict[str, float]


class Reports:
    """The values of all calls of `report`: what workers report by one name at one place of the loop are one value.

    A name that is reported several times at a place has as many values there. Those of one call are in one row.

    With `Checkpoints` the calls are also in the file ``reports.jsonl`` beside them, a row for each: a program that
    continues from a checkpoint has those that were made before.

    Attributes:
        asked: the number and step of each evaluation that a loop has asked for, until it is begun.

    Example:
        >>> reports = Reports()
        >>> reports.add(0, [Reported(0, 3, {"loss": 1.0})], step=5)
        >>> reports.add(1, [Reported(0, 1, {"loss": 2.0})], step=5)
        >>> reports.rows()
        [{'loss': 1.25}]
        >>> reports.add(0, [Reported(1, 3, {"accuracy": 0.5}), Reported(2, 3, {"loss": 0.0})], step=5)
        >>> reports.add(1, [Reported(1, 1, {"loss": 4.0})], step=5)
        >>> reports.rows()
        [{'loss': 1.25}, {'accuracy': 0.5}, {'loss': 1.0}]
    """

    def __init__(self) -> None:
        # by number of the place, then by worker and number of the call
        self._calls: dict[int, dict[tuple[int, int], Reported]] = {}
        self._shown: dict[int, int] = {}  # by worker, the last call that a step's row tells of
        self._new: list[tuple[int, int, Reported]] = []  # not in the file: step, worker and call
        self._dropped = 0  # of these before, that are
        self.asked: list[tuple[int, int]] = []
        self._ever_asked: set[int] = set()

    def add(self, worker: int, reported: Iterable[Reported], step: int) -> None:
        """Add what one worker has reported; a call that was added before, perhaps of its predecessor, is replaced.

        Args:
            worker: its number.
            reported: its calls.
            step: the number of steps committed by then.
        """
        for each in reported:
            if ASKS in each.values:
                self._ask(each)
            # at the end of a `fit` workers are asked for all once more
            elif self._put(worker, each):
                self._new.append((step, worker, each))

    def _ask(self, each: Reported) -> None:
        """Note a call that asks for an evaluation, unless it was noted before."""
        if each.number not in self._ever_asked:
            self._ever_asked.add(each.number)
            self.asked.append((each.number, int(each.values[ASKS])))

    def _put(self, worker: int, each: Reported) -> bool:
        """Note a call of a worker; return whether it is new."""
        of_place = self._calls.setdefault(each.number // CALLS_OF_PLACE, {})
        is_new = of_place.get((worker, each.number)) != each
        of_place[worker, each.number] = each
        return is_new

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
        """Return the means by name, one row for each call; reports of a single worker have rows of their own."""
        of_places = [calls for _, calls in sorted(self._calls.items())]
        return [_means(row) for calls in of_places for row in _rows(calls)]

    def behind_the_last_step(self) -> dict[str, float]:
        """Return, by name, the last means that no step's row has."""
        means: dict[str, float] = {}
        for _, calls in sorted(self._calls.items()):
            left = {at: call for at, call in calls.items() if self._shown.get(at[0], -1) < at[1]}
            for row in _rows(left):
                means |= _means(row)
        return means

    def resume(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Continue with the rows of an earlier program's file, which no row of this program's history has."""
        for row in rows:
            worker, number = row["worker"], row["call"]
            values = {n: math.nan if v is None else float(v) for n, v in row["values"].items()}
            self._put(worker, Reported(number, row["weight"], values))
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
        values: dict[str, float] = {}
        for row in self.rows():
            values |= row
        return values


def _rows(calls: Mapping[tuple[int, int], Reported]) -> list[dict[str, list[tuple[float, float]]]]:
    """Return the weights and values by name of the calls at one place: the n-th of a name of all workers are together.

    Args:
        calls: by worker and number.
    """
    rows: list[dict[str, list[tuple[float, float]]]] = []
    row_of: dict[tuple[str, int], int] = {}  # of the n-th value of a name
    counts: dict[tuple[int, str], int] = {}  # of a worker's values by a name
    for (worker, _), call in sorted(calls.items()):
        nth = {name: counts.get((worker, name), 0) for name in call.values}
        counts |= {(worker, name): count + 1 for name, count in nth.items()}
        at = next((row_of[each] for each in nth.items() if each in row_of), len(rows))
        if at == len(rows) and nth:
            rows.append({})
        for name, value in call.values.items():
            row = rows[row_of.setdefault((name, nth[name]), at)]
            row.setdefault(name, []).append((call.weight, value))
    return rows


def _means(row: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return the weighted means of values, by name; plain means if all weights are 0."""
    means = {}
    for name, own in row.items():
        total = sum(weight for weight, _ in own)
        if total:
            means[name] = sum(weight * value for weight, value in own) / total
        else:
            means[name] = sum(value for _, value in own) / len(own)
    return means
