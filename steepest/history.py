"""What was committed: counters and, if it is kept, the log. Pure; part of the coordinator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

#: Entries of the log that one answer holds.
LOG_PAGE = 2000


class History:
    """The commits of one job.

    Args:
        keep_log: whether to keep each of them, for a replay.

    Attributes:
        committed, skipped, dropped: updates, those of them that changed nothing, and pushes that became none.
        staleness: of the pushes that were committed: how many had which.
    """

    def __init__(self, keep_log: bool = False) -> None:
        self.committed = self.skipped = self.dropped = 0
        self.staleness: Counter[int] = Counter()
        self._log: list[list[Any]] | None = [] if keep_log else None

    def add(self, entry: list[Any], staleness: Iterable[int], *, skipped: bool) -> None:
        """One more commit; for its entry see `steepest.observe.commits.Commit.from_entry`."""
        self.committed += 1
        self.skipped += skipped
        self.staleness.update(staleness)
        if self._log is not None:
            self._log.append(entry)

    def go_on_from(self, told: dict[str, Any]) -> None:
        """Takes the counters over that `look` told of another one."""
        self.committed, self.skipped, self.dropped = told["committed"], told["skipped"], told["dropped"]
        self.staleness = Counter(dict(told["staleness"]))

    def forget_log(self) -> None:
        """Weights were set: what came before does not explain what follows."""
        if self._log is not None:
            self._log.clear()

    def look(self, log_from: int | None = None) -> dict[str, Any]:
        """Counters; or a page of the log, from an entry on."""
        if log_from is None:
            counts = {"committed": self.committed, "skipped": self.skipped, "dropped": self.dropped}
            return {**counts, "staleness": sorted(self.staleness.items())}
        if self._log is None:
            return {"log": None}
        return {"log": self._log[log_from : log_from + LOG_PAGE], "length": len(self._log)}
