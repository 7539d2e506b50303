"""What a server has heard of the coordinator's decisions, so that these outlive the coordinator. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from steepest.messages.gradients import Commit, Decision

#: Decisions that are remembered: a server that lags by more cannot be brought up to date.
WORDS = 4096


class Witness:
    """The coordinator's words to the servers, which all of them are told in one order; each has a number.

    Attributes:
        log: entries of the coordinator's log, if it keeps one; all of them.
        schedule: where its schedule stood when it said so last, if it did.
    """

    def __init__(self) -> None:
        self._words: deque[Decision] = deque(maxlen=WORDS)
        self.log: list[list[Any]] = []
        self.schedule: dict[str, Any] = {}

    def hear(self, decision: Decision) -> None:
        """Remember a decision."""
        self._words.append(decision)
        if isinstance(decision, Commit) and decision.entry is not None:
            self.log.append(decision.entry)
        if decision.schedule is not None:
            self.schedule = decision.schedule

    @property
    def words(self) -> list[Decision]:
        """Those of late, oldest first."""
        return list(self._words)


def missing(heard: Sequence[Decision], everything: Iterable[Sequence[Decision]]) -> list[Decision]:
    """Return, in order, the decisions that one server has not heard of, of all that any server has heard of.

    Args:
        heard: what the server has heard, oldest first.
        everything: what each server has heard.
    """
    last = heard[-1].word if heard else 0
    others = {decision.word: decision for decisions in everything for decision in decisions if decision.word > last}
    return [others[word] for word in sorted(others)]
