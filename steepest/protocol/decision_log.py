"""What a server has heard of the coordinator's decisions, so that these outlive the coordinator. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from steepest.messages.gradients import Commit, Decision

#: Decisions that are remembered: a server that lags by more cannot be brought up to date.
REMEMBERED = 4096


class DecisionLog:
    """The coordinator's words to the servers, which all of them are told in one order; each has a number.

    Attributes:
        log: entries of the coordinator's log, if it keeps one; all of them.
        schedule: where its schedule stood when it said so last, if it did.
    """

    def __init__(self) -> None:
        self._recent: deque[Decision] = deque(maxlen=REMEMBERED)
        self.log: list[list[Any]] = []
        self.schedule: dict[str, Any] = {}

    def hear(self, decision: Decision) -> None:
        """Remember a decision."""
        self._recent.append(decision)
        if isinstance(decision, Commit) and decision.entry is not None:
            self.log.append(decision.entry)
        if decision.schedule is not None:
            self.schedule = decision.schedule

    @property
    def recent(self) -> list[Decision]:
        """Those of late, oldest first."""
        return list(self._recent)


def missing(heard: Sequence[Decision], everything: Iterable[Sequence[Decision]]) -> list[Decision]:
    """Return, in order, the decisions that one server has not heard of, of all that any server has heard of.

    Args:
        heard: what the server has heard, oldest first.
        everything: what each server has heard.
    """
    last = heard[-1].number if heard else 0
    others = {
        decision.number: decision
        for decisions in everything
        for decision in decisions
        if decision.number > last
    }
    return [others[number] for number in sorted(others)]
