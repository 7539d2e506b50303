"""What a server has heard of the coordinator's decisions, so that these outlive the coordinator. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from steepest.messages.message import Kind, Message

#: Words that are remembered: a server that lags by more cannot be brought up to date.
WORDS = 4096
_DECISIONS = (Kind.COMMIT, Kind.MEMBERS, Kind.DISCARD, Kind.REFRESH, Kind.WORKER_JOINED, Kind.WORKER_ENDED)


class Witness:
    """The coordinator's words to the servers, which all of them are told in one order; each has a number.

    Attributes:
        log: entries of the coordinator's log, if it keeps one; all of them.
        schedule: where its schedule stood when it said so last, if it did.
    """

    def __init__(self) -> None:
        self._words: deque[Message] = deque(maxlen=WORDS)
        self.log: list[list[Any]] = []
        self.schedule: dict[str, Any] = {}

    def hear(self, message: Message) -> None:
        """Remembers a decision."""
        if message.kind in _DECISIONS:
            self._words.append(message)
            if (entry := message.values().get("entry")) is not None:
                self.log.append(entry)
            self.schedule = message.values().get("schedule", self.schedule)

    @property
    def words(self) -> list[Message]:
        """Those of late, oldest first."""
        return list(self._words)


def number(word: Message) -> int:
    """Of one of the coordinator's words, counted from 1."""
    return int(word.values()["word"])


def missing(heard: Sequence[Message], everything: Iterable[Sequence[Message]]) -> list[Message]:
    """What somebody has not heard of all that anybody has, in order."""
    last = number(heard[-1]) if heard else 0
    others = {number(word): word for words in everything for word in words if number(word) > last}
    return [others[key] for key in sorted(others)]
