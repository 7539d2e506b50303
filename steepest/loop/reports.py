"""Reports of the workers' loops, put together: means by samples over the workers."""

from __future__ import annotations

from collections.abc import Iterable

from steepest.loop.prepared import Reported


class Reports:
    """The values of all calls of `report`: the n-th calls of all workers are one row.

    Example:
        >>> reports = Reports()
        >>> reports.add([Reported(0, 3, {"loss": 1.0})])
        >>> reports.add([Reported(0, 1, {"loss": 2.0})])
        >>> reports.rows()
        [{'loss': 1.25}]
    """

    def __init__(self) -> None:
        # by number of the call and name: the sum of values times samples, that of samples, and the values
        self._sums: dict[int, dict[str, tuple[float, int, list[float]]]] = {}

    def add(self, reported: Iterable[Reported]) -> None:
        """Add what one worker has reported."""
        for number, samples, values in reported:
            row = self._sums.setdefault(number, {})
            for name, value in values.items():
                total, count, plain = row.get(name, (0.0, 0, []))
                row[name] = (total + value * samples, count + samples, [*plain, value])

    def rows(self) -> list[dict[str, float]]:
        """Return the means by name, one row for each call."""
        return [
            {
                name: total / count if count else sum(plain) / len(plain)
                for name, (total, count, plain) in row.items()
            }
            for _, row in sorted(self._sums.items())
        ]

    def last(self) -> dict[str, float]:
        """Return the last mean of each name."""
        found: dict[str, float] = {}
        for row in self.rows():
            found |= row
        return found
