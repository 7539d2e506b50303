"""Reports of the workers' loops, put together: means by samples, or by what batches weigh, over the workers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from steepest.errors import CheckpointError
from steepest.loop.prepared import Reported
from steepest.storage.files import storage_of
from steepest.storage.places import place_of

_FILE = "reports.json"


class Reports:
    """The values of all calls of `report`: the n-th calls of all workers are one row.

    Args:
        before: rows of a run that this one continues; calls of the same numbers replace them.

    Example:
        >>> reports = Reports()
        >>> reports.add(0, [Reported(0, 3, {"loss": 1.0})])
        >>> reports.add(1, [Reported(0, 1, {"loss": 2.0})])
        >>> reports.rows()
        [{'loss': 1.25}]
    """

    def __init__(self, before: Sequence[dict[str, float]] = ()) -> None:
        self._before = list(before)
        # by number of the call and worker
        self._calls: dict[int, dict[int, Reported]] = {}
        self._shown: dict[int, int] = {}  # by worker, the last call that a step's row tells of

    def add(self, worker: int, reported: Iterable[Reported]) -> None:
        """Add what one worker has reported; a call that was added before, perhaps of its predecessor, is replaced."""
        for each in reported:
            self._calls.setdefault(each.number, {})[worker] = each

    def add_noted(
        self, notes: Iterable[tuple[int, int, float, dict[str, float]]], shown: bool = True
    ) -> None:
        """Add what workers have reported with the pushes of a step.

        Args:
            notes: worker, number, weight and values of each call.
            shown: whether the step has a row in the history, which tells of them.
        """
        for worker, number, weight, values in notes:
            self.add(worker, [Reported(number, weight, values)])
            if shown:
                self._shown[worker] = number

    def rows(self) -> list[dict[str, float]]:
        """Return the means by name, one row for each call."""
        rows = dict(enumerate(self._before))
        for number, calls in self._calls.items():
            rows[number] = _means([each for _, each in sorted(calls.items())])
        return [row for _, row in sorted(rows.items())]

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


def read_reports(folder: str | Path) -> list[dict[str, float]]:
    """Return the rows that `write_reports` has written beside checkpoints; none where there are none.

    Raises:
        CheckpointError: they cannot be read.
    """
    file = place_of(folder) / _FILE
    storage = storage_of(file)
    try:
        if not storage.exists(file):
            return []
        rows = json.loads(storage.read(file))
        return [
            {name: math.nan if value is None else float(value) for name, value in row.items()}
            for row in rows
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; remove it to go on without") from error


def write_reports(folder: str | Path, rows: Sequence[dict[str, float]]) -> None:
    """Write rows beside the checkpoints of a run that has come to its end; CheckpointError: they cannot be written."""
    file = place_of(folder) / _FILE
    plain = [{n: v if math.isfinite(v) else None for n, v in row.items()} for row in rows]
    text = memoryview(json.dumps(plain).encode())
    try:
        storage_of(file).replace(file, lambda: iter([text]))
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error}") from error
