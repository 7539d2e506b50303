"""For how long each of a job's processes has given no sign of life."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import Any

import ray

from steepest.cluster.context import JobContext
from steepest.cluster.deaths import Deaths
from steepest.cluster.diagnostics import has_answered
from steepest.cluster.processor_time import processor_use
from steepest.messages.message import Peer

#: A process that uses at least this share of a processor computes.
_BUSY_SHARE = 0.05


class SignsOfLife:
    """Asks processes for signs of life.

    An answer is one. Where Python's lock is held for long (by a large computation in one call of C
    code) no answer comes, but the processor time of the process grows, which the driver or another
    process of its node sees: that is one too. A process that is stopped gives none.

    Args:
        context: what is known of the job's processes.
        deaths: the dead.
    """

    def __init__(self, context: JobContext, deaths: Deaths) -> None:
        self._context = context
        self._deaths = deaths
        self._asked: dict[Peer, tuple[Any, float]] = {}  # unanswered: the call, and since when
        self._looking: dict[Peer, tuple[Any, float]] = {}  # a neighbour's call, and when it began
        self._computed: dict[Peer, tuple[float, float]] = {}  # processor seconds, and when
        self._seen: Counter[Peer] = Counter()  # how often a node was asked about it
        self._node = ""
        self._looked = 0.0

    def look(self, peers: Collection[Peer]) -> bool:
        """Take answers, and ask those of some processes that owe none; return whether it was time to.

        It is a sixth of `heartbeat` after the last time. Time in which nobody has looked, because
        the driver was paused or busy, counts as no silence.
        """
        context, now = self._context, time.monotonic()
        limit = context.run_config.failure.heartbeat
        if (passed := now - self._looked) < limit / 6:
            return False
        self._looked = now
        if passed > limit / 2:  # the driver itself stood still, and may not have read the answers
            self._asked = {peer: (call, at + passed) for peer, (call, at) in self._asked.items()}
        self._node = self._node or ray.get_runtime_context().get_node_id()
        for peer, (call, since) in list(self._asked.items()):
            if ray.wait([call], timeout=0)[0]:
                self.forget(peer)
            elif now - since >= limit / 3:
                self._look_at(peer, now)
        for peer in peers:
            if peer not in self._asked and self._deaths.cause(peer) is None:
                self._asked[peer] = (context.actors[peer].alive.remote(), now)
        return True

    def silence(self, peer: Peer) -> float:
        """Return for how many seconds a process had given no sign of life at the last look."""
        if peer not in self._asked or ray.wait([self._asked[peer][0]], timeout=0)[0]:
            return 0.0
        return max(self._looked - self._asked[peer][1], 0.0)

    def is_silent(self, peer: Peer) -> bool:
        """Return whether a process has given no sign of life for `heartbeat` seconds.

        It is if the node of the process was looked at twice and has seen it compute nothing, or
        does not answer either.
        """
        limit = self._context.run_config.failure.heartbeat
        if self.silence(peer) < limit:
            return False
        waits = self._looked - self._looking[peer][1] if peer in self._looking else 0.0
        return self._alone(peer) or self._seen[peer] > 1 or waits >= limit / 3

    def _alone(self, peer: Peer) -> bool:
        """Return whether neither the driver nor another process is on the node of a process."""
        places = self._context.places
        node = places[peer].node
        return node != self._node and not any(
            place.node == node for other, place in places.items() if other != peer
        )

    def forget(self, peer: Peer | None = None) -> None:
        """Forget what a process was asked; without an argument, what all were."""
        for known in (self._asked, self._looking, self._computed, self._seen):
            if peer is None:
                known.clear()
            else:
                known.pop(peer, None)

    def _look_at(self, peer: Peer, now: float) -> None:
        """Find out how much a process that does not answer has computed."""
        context, place = self._context, self._context.places[peer]
        if place.node == self._node:
            self._note(peer, processor_use(place.pid), now)
        elif peer not in self._looking:
            neighbours = (
                actor
                for other, actor in context.actors.items()
                if other != peer and context.places[other].node == place.node
            )
            if (neighbour := next(neighbours, None)) is not None:
                self._looking[peer] = (neighbour.processor_use_of.remote(place.pid), now)
        elif has_answered(self._looking[peer][0]):
            call, asked = self._looking.pop(peer)
            self._note(peer, ray.get(call), asked)

    def _note(self, peer: Peer, use: tuple[float, bool] | None, now: float) -> None:
        """Take what a process did with processors, at a time, for a sign of life if it computed."""
        before = self._computed.get(peer)
        self._seen[peer] += 1
        if use is None:
            return
        seconds, runnable = use
        self._computed[peer] = (seconds, now)
        grown = before is not None and seconds - before[0] >= _BUSY_SHARE * (now - before[1]) > 0
        if runnable or grown:
            self._asked[peer], self._seen[peer] = (self._asked[peer][0], now), 0
