"""Measures for how long each of a job's processes has given no sign of life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from steepest.core.system import system
from steepest.runtime.calls import has_answered
from steepest.runtime.job_runtime import runtime
from steepest.runtime.places import Place

#: A process that uses at least this share of a processor computes.
_BUSY_SHARE = 0.05


class SignsOfLife:
    """Asks processes for signs of life.

    An answer is one. While Python's lock is held (by a large computation in one call of C code) no
    answer comes, but the processor time of the process grows, which the driver or another process of
    its node sees: that is one too. A stopped process gives none. Processes are identified by Ray's
    handles, because a process without a role is asked too.
    """

    def __init__(self, heartbeat: float) -> None:
        self._limit = heartbeat
        self._places: Mapping[Any, Place] = {}  # of the living, as of the last look
        self._asked: dict[Any, tuple[Any, float]] = {}  # unanswered: the call, and since when
        self._looking: dict[Any, tuple[Any, float]] = {}  # a neighbour's call, and when it began
        self._computed: dict[Any, tuple[float, float]] = {}  # processor seconds, and when
        self._seen: Counter[Any] = Counter()  # how often a node was asked about it
        self._node = ""
        self._looked = 0.0

    @property
    def is_time(self) -> bool:
        """Whether it is time to `look`: a sixth of `heartbeat` after the last time."""
        return system().now() - self._looked >= self._limit / 6

    def look(self, places: Mapping[Any, Place]) -> bool:
        """Take answers, and ask the living processes that owe none; return whether it was time to.

        Time without looks, because the driver was paused or busy, does not count as silence.
        """
        limit, now = self._limit, system().now()
        if not self.is_time:
            return False
        passed = now - self._looked
        self._looked, self._places = now, dict(places)
        if passed > limit / 2:  # the driver itself stood still, and may not have read the answers
            self._asked = {actor: (call, at + passed) for actor, (call, at) in self._asked.items()}
        self._node = self._node or runtime().node
        for actor, (call, since) in list(self._asked.items()):
            if actor not in places or call.done():
                self.forget(actor)
            elif now - since >= limit / 3:
                self._look_at(actor, now)
        for actor in places:
            if actor not in self._asked:
                self._asked[actor] = (runtime().call(actor, "alive"), now)
        return True

    def silence(self, actor: Any) -> float:
        """Return for how many seconds a process had given no sign of life at the last look."""
        if actor not in self._asked or self._asked[actor][0].done():
            return 0.0
        return max(self._looked - self._asked[actor][1], 0.0)

    def is_silent(self, actor: Any) -> bool:
        """Return whether a process has given no sign of life for `heartbeat` seconds.

        If its node has other processes of the job, they must have seen twice that it computes
        nothing, or not answer either.
        """
        if self.silence(actor) < self._limit:
            return False
        waits = self._looked - self._looking[actor][1] if actor in self._looking else 0.0
        here = self._places[actor].node == self._node
        alone = not here and next(self._neighbours(actor), None) is None
        return alone or self._seen[actor] > 1 or waits >= self._limit / 3

    def _neighbours(self, actor: Any) -> Iterator[Any]:
        """Return the other processes on the node of a process."""
        node = self._places[actor].node
        return (one for one, at in self._places.items() if one != actor and at.node == node)

    def forget(self, actor: Any = None) -> None:
        """Forget the questions to a process, or to all without an argument."""
        for known in (self._asked, self._looking, self._computed, self._seen):
            if actor is None:
                known.clear()
            else:
                known.pop(actor, None)

    def _look_at(self, actor: Any, now: float) -> None:
        """Find out how much a process that does not answer has computed."""
        place = self._places[actor]
        if place.node == self._node:
            self._note(actor, runtime().processor_use(place.pid), now)
        elif actor not in self._looking:
            if (neighbour := next(self._neighbours(actor), None)) is not None:
                self._looking[actor] = (
                    runtime().call(neighbour, "processor_use_of", place.pid),
                    now,
                )
        elif has_answered(self._looking[actor][0]):
            call, asked = self._looking.pop(actor)
            self._note(actor, call.get(), asked)

    def _note(self, actor: Any, use: tuple[float, bool] | None, now: float) -> None:
        """Count processor time of a process, seen at time `now`, as a sign of life if it computed."""
        before = self._computed.get(actor)
        self._seen[actor] += 1
        if use is None:
            return
        seconds, runnable = use
        self._computed[actor] = (seconds, now)
        grown = before is not None and seconds - before[0] >= _BUSY_SHARE * (now - before[1]) > 0
        if runnable or grown:
            self._asked[actor], self._seen[actor] = (self._asked[actor][0], now), 0
