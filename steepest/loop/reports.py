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
        >>> reports.add([Reported(0, 3, {"loss": 1.0})])
        >>> reports.add([Reported(0, 1, {"loss": 2.0})])
        >>> reports.rows()
        [{'loss': 1.25}]
    """

    def __init__(self, before: Sequence[dict[str, float]] = ()) -> None:
        self._before = list(before)
        # by number of the call and name: the sum of values times weights, that of weights, and the values
        self._sums: dict[int, dict[str, tuple[float, float, list[float]]]] = {}

    def add(self, reported: Iterable[Reported]) -> None:
        """Add what one worker has reported."""
        for number, weight, values in reported:
            row = self._sums.setdefault(number, {})
            for name, value in values.items():
                total, count, plain = row.get(name, (0.0, 0.0, []))
                row[name] = (total + value * weight, count + weight, [*plain, value])

    def rows(self) -> list[dict[str, float]]:
        """Return the means by name, one row for each call."""
        rows = dict(enumerate(self._before))
        for number, row in self._sums.items():
            rows[number] = {
                name: total / count if count else sum(plain) / len(plain)
                for name, (total, count, plain) in row.items()
            }
        return [row for _, row in sorted(rows.items())]

    def last(self) -> dict[str, float]:
        """Return the last mean of each name."""
        found: dict[str, float] = {}
        for row in self.rows():
            found |= row
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
