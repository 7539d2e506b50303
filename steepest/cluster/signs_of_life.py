"""For how long each of a job's processes has given no sign of life."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import ray

from steepest.cluster.diagnostics import has_answered
from steepest.cluster.processor_time import processor_seconds
from steepest.messages.message import Peer

if TYPE_CHECKING:
    from steepest.cluster.launch import Cluster

#: A process that uses at least this share of a processor computes.
_BUSY_SHARE = 0.05


class SignsOfLife:
    """Asks processes for signs of life.

    An answer is one. Where Python's lock is held for long (by a large computation in one call of C
    code) no answer comes, but the processor time of the process grows, which the driver or another
    process of its node sees: that is one too. A process that is stopped gives none.

    Args:
        cluster: the job's processes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._asked: dict[Peer, tuple[Any, float]] = {}  # unanswered: the call, and since when
        self._looking: dict[Peer, tuple[Any, float]] = {}  # a neighbour's call, and when it began
        self._computed: dict[Peer, tuple[float, float]] = {}  # processor seconds, and when
        self._seen: Counter[Peer] = Counter()  # how often a node was asked about it
        self._node = ""
        self._looked = 0.0

    def look(self, peers: Collection[Peer]) -> bool:
        """Take answers, and ask those of some processes that owe none; return whether it was time to.

        It is a sixth of `heartbeat` after the last time.
        """
        cluster, now = self._cluster, time.monotonic()
        limit = cluster.run_config.failure.heartbeat
        if now - self._looked < limit / 6:
            return False
        self._looked = now
        self._node = self._node or ray.get_runtime_context().get_node_id()
        for peer, (call, since) in list(self._asked.items()):
            if ray.wait([call], timeout=0)[0]:
                self.forget(peer)
            elif now - since >= limit / 3:
                self._look_at(peer, now)
        for peer in peers:
            if peer not in self._asked and cluster.deaths.cause(peer) is None:
                self._asked[peer] = (cluster.actors[peer].alive.remote(), now)
        return True

    def silence(self, peer: Peer) -> float:
        """Return for how many seconds a process has given no sign of life."""
        if peer not in self._asked or ray.wait([self._asked[peer][0]], timeout=0)[0]:
            return 0.0
        return time.monotonic() - self._asked[peer][1]

    def is_silent(self, peer: Peer) -> bool:
        """Return whether a process has given no sign of life for `heartbeat` seconds.

        It is if the node of the process was looked at twice and has seen it compute nothing, or
        does not answer either.
        """
        limit = self._cluster.run_config.failure.heartbeat
        if self.silence(peer) < limit:
            return False
        waits = time.monotonic() - self._looking[peer][1] if peer in self._looking else 0.0
        return self._alone(peer) or self._seen[peer] > 1 or waits >= limit / 3

    def _alone(self, peer: Peer) -> bool:
        """Return whether neither the driver nor another process is on the node of a process."""
        places = self._cluster.places
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
        cluster, place = self._cluster, self._cluster.places[peer]
        if place.node == self._node:
            self._note(peer, processor_seconds(place.pid), now)
        elif peer not in self._looking:
            neighbours = (
                actor
                for other, actor in cluster.actors.items()
                if other != peer and cluster.places[other].node == place.node
            )
            if (neighbour := next(neighbours, None)) is not None:
                self._looking[peer] = (neighbour.processor_seconds_of.remote(place.pid), now)
        elif has_answered(self._looking[peer][0]):
            call, asked = self._looking.pop(peer)
            self._note(peer, ray.get(call), asked)

    def _note(self, peer: Peer, seconds: float | None, now: float) -> None:
        before = self._computed.get(peer)
        self._seen[peer] += 1
        if seconds is None:
            return
        self._computed[peer] = (seconds, now)
        if before is not None and seconds - before[0] >= _BUSY_SHARE * (now - before[1]) > 0:
            self._asked[peer] = (self._asked[peer][0], now)
