"""What was committed: counters and, if it is kept, the log. Pure; part of the coordinator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

#: Bytes of JSON that entries of the log have in one answer; one entry is always taken, which has
#: less than a message may have: a commit's hyperparameters are limited (see `Schedule.at`), and
#: each of its pushes is some numbers.
LOG_PAGE = 1 << 20
#: A worker is a straggler when it computes so many times as long as the median of the others.
SLOW = 2.0


class History:
    """The commits of one job.

    Args:
        keep_log: whether to keep each of them, for a replay.

    Attributes:
        committed, skipped, dropped: updates, those of them that changed nothing, and pushes that
            became none.
        staleness: of the pushes that were committed: how many had which.
        paces: seconds of computing that a push of each worker takes, a running mean.
    """

    def __init__(self, keep_log: bool = False) -> None:
        self.committed = self.skipped = self.dropped = 0
        self.staleness: Counter[int] = Counter()
        self.paces: dict[int, float] = {}
        self._slow_since: dict[int, int] = {}
        self._log: list[list[Any]] | None = [] if keep_log else None

    def add(self, entry: list[Any], staleness: Iterable[int], *, skipped: bool) -> None:
        """One more commit; for its entry see `steepest.engine.commit_log.Commit.from_entry`."""
        self.committed += 1
        self.skipped += skipped
        self.staleness.update(staleness)
        if self._log is not None:
            self._log.append(entry)

    def time(self, worker: int, timings: Mapping[str, float], step: int) -> None:
        """Take note how long a worker computed for its push of a step, if its timings (in seconds) tell."""
        if (seconds := timings.get("compute")) is not None:
            self.paces[worker] = seconds + 0.8 * (self.paces.get(worker, seconds) - seconds)
            self._compare(worker, step)

    def _compare(self, worker: int, step: int) -> None:
        pace = self.paces[worker]
        others = sorted(other for index, other in self.paces.items() if index != worker)
        if others and pace > SLOW * others[len(others) // 2]:
            self._slow_since.setdefault(worker, step)
        else:
            self._slow_since.pop(worker, None)

    def count_dropped(self, pushes: int) -> None:
        """Add a number of pushes that will never be committed."""
        self.dropped += pushes

    def counts(self) -> dict[str, Any]:
        """What `load_state` takes."""
        counts = {"committed": self.committed, "skipped": self.skipped, "dropped": self.dropped}
        return {**counts, "staleness": sorted(self.staleness.items())}

    def load_state(self, told: dict[str, Any]) -> None:
        """Takes the counters over that another one told, by `counts` or `look`."""
        self.committed, self.skipped, self.dropped = (
            told["committed"],
            told["skipped"],
            told["dropped"],
        )
        self.staleness = Counter(dict(told["staleness"]))

    @property
    def keeps_log(self) -> bool:
        """Whether each commit is kept."""
        return self._log is not None

    def forget_log(self) -> None:
        """Weights were set: what came before does not explain what follows."""
        if self._log is not None:
            self._log.clear()

    def look(self) -> dict[str, Any]:
        """Return the counters, the pace of each worker, and since which step each straggler is slow."""
        paces, slow = sorted(self.paces.items()), sorted(self._slow_since.items())
        return {**self.counts(), "paces": paces, "slow": slow}

    def page(self, first: int) -> dict[str, Any]:
        """Return a page of the log from entry `first` on ("log"; None if no log is kept), and the log's length."""
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
