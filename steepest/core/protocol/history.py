"""Counters of what was committed and, if it is kept, the log of commits. Pure."""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

#: The most bytes of JSON of log entries in one answer. A single larger entry is sent all the same:
#: it fits into a message, as a commit's hyperparameters are limited (see `Schedule.at`) and each of
#: its pushes is some numbers.
LOG_PAGE = 1 << 20
#: A worker is a straggler when it computes this many times as long as the median of the others.
SLOW = 2.0


class CommitHistory:
    """The commits of one job.

    Args:
        keep_log: whether to keep each commit, for a replay.

    Attributes:
        committed: number of versions.
        skipped: number of versions that changed nothing.
        dropped: number of pushes that will never be committed.
        staleness: number of committed pushes by their staleness, in versions.
        paces: by worker, the seconds that it computes for one share of samples, as a running mean.
    """

    def __init__(self, keep_log: bool = False) -> None:
        self.committed = self.skipped = self.dropped = 0
        self.staleness: Counter[int] = Counter()
        self.paces: dict[int, float] = {}
        self._ascending: list[float] = []  # the paces
        self._slow_since: dict[int, int] = {}
        self._log: list[list[Any]] | None = [] if keep_log else None

    def add(self, entry: list[Any], staleness: Iterable[int], *, skipped: bool) -> None:
        """Count a commit, and keep its entry if the log is kept.

        Args:
            entry: see `steepest.core.engine.commit_log.Commit.from_entry`.
            staleness: of each of its pushes, in versions.
            skipped: whether the version changes nothing.
        """
        self.committed += 1
        self.skipped += skipped
        self.staleness.update(staleness)
        if self._log is not None:
            self._log.append(entry)

    def add_timings(
        self, worker: int, timings: Mapping[str, float], step: int, shares: int = 1
    ) -> None:
        """Update a worker's pace, and whether it is a straggler.

        Args:
            timings: seconds by part of its push; without "compute" nothing changes.
            step: of the push.
            shares: number of shares that the push is computed from.
        """
        if (seconds := timings.get("compute")) is not None:
            seconds /= shares
            before = self.paces.get(worker)
            if before is not None:
                del self._ascending[bisect_left(self._ascending, before)]
            pace = seconds + 0.8 * ((seconds if before is None else before) - seconds)
            self._compare(worker, pace, step)
            self.paces[worker] = pace
            insort(self._ascending, pace)

    def _compare(self, worker: int, pace: float, step: int) -> None:
        """Compare a worker's pace with the others'; if it is a straggler, note the first such step."""
        others = self._ascending
        if others and pace > SLOW * others[len(others) // 2]:
            self._slow_since.setdefault(worker, step)
        else:
            self._slow_since.pop(worker, None)

    def count_dropped(self, pushes: int) -> None:
        """Add a number of pushes that will never be committed."""
        self.dropped += pushes

    def counts(self) -> dict[str, Any]:
        """Return "committed", "skipped", "dropped" and "staleness" as `load_state` takes them."""
        counts = {"committed": self.committed, "skipped": self.skipped, "dropped": self.dropped}
        return {**counts, "staleness": sorted(self.staleness.items())}

    def load_state(self, counts: dict[str, Any]) -> None:
        """Replace the counters by those that `counts` or `counters` of another history returned."""
        self.committed = counts["committed"]
        self.skipped = counts["skipped"]
        self.dropped = counts["dropped"]
        self.staleness = Counter(dict(counts["staleness"]))

    @property
    def keeps_log(self) -> bool:
        """Whether each commit is kept."""
        return self._log is not None

    def forget_log(self) -> None:
        """Empty the log: weights were installed that earlier commits do not explain."""
        if self._log is not None:
            self._log.clear()

    def counters(self) -> dict[str, Any]:
        """Return `counts`, and the workers' speed.

        "paces" has (worker, seconds), "slow" has (straggler, the step since which it is slow).
        """
        paces, slow = sorted(self.paces.items()), sorted(self._slow_since.items())
        return {**self.counts(), "paces": paces, "slow": slow}

    def page(self, first: int) -> dict[str, Any]:
        """Return a page of the log.

        Args:
            first: index of the page's first entry.

        Returns:
            "log", the entries, and "length" of the whole log; if none is kept, only "log", which is None.
        """
        if self._log is None:
            return {"log": None}
        page: list[list[Any]] = []
        size = 0
        for index in range(first, len(self._log)):
            size += len(json.dumps(self._log[index]))
            if page and size > LOG_PAGE:
                break
            page.append(self._log[index])
        return {"log": page, "length": len(self._log)}
