"""The coordinator's decisions as servers remember them, to go on without it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from steepest.core.messages.gradients import CommitOrder, Decision

#: The decisions that are remembered: a server that lags by more cannot be brought up to date.
REMEMBERED = 4096


class DecisionLog:
    """The decisions that one server has received; all servers receive them in one order, by number."""

    def __init__(self) -> None:
        self._recent: deque[Decision] = deque(maxlen=REMEMBERED)
        self.log: list[list[Any]] = []  # all entries of the coordinator's log, if it keeps one
        # the newest state of the coordinator's schedule that came with a decision
        self.schedule: dict[str, Any] = {}

    def hear(self, decision: Decision) -> None:
        """Add a decision, with the entry of the log and the schedule's state that it has.

        The coordinator's state of the one before is dropped: nobody goes on from that.
        """
        if self._recent:
            self._recent[-1] = replace(self._recent[-1], state=None)
        self._recent.append(decision)
        if isinstance(decision, CommitOrder) and decision.entry is not None:
            self.log.append(decision.entry)
        if decision.schedule is not None:
            self.schedule = decision.schedule

    @property
    def recent(self) -> list[Decision]:
        """The last decisions, at most 4096, oldest first."""
        return list(self._recent)


def missing(
    received: Sequence[Decision], by_server: Iterable[Sequence[Decision]]
) -> list[Decision]:
    """Return, in order, the decisions that some server received and this one (`received`) did not."""
    last = received[-1].number if received else 0
    others = {
        decision.number: decision
        for decisions in by_server
        for decision in decisions
        if decision.number > last
    }
    return [others[number] for number in sorted(others)]
