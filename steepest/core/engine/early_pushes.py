"""Pushes that reach a server before the coordinator's message about their generation or version."""

from __future__ import annotations

from collections import Counter

from steepest.core.messages.gradients import HostPush, Push
from steepest.core.messages.message import Peer


class EarlyPushes:
    """Pushes that wait at one server for their generation or version to begin.

    A sender can be ahead by two steps at most, and each message may come twice, so a server keeps
    four times as many pushes of each worker as a step has. More come only from a sender that does
    not follow the protocol.

    Args:
        chunks: the number of pushes in one worker's step: the server's trainable chunks.
    """

    def __init__(self, chunks: int) -> None:
        self._most = 4 * chunks
        self._pushes: list[tuple[Peer, Push | HostPush]] = []  # in the order of their arrival
        self._counts: Counter[Peer] = Counter()

    def keep(self, source: Peer, pushed: Push | HostPush, workers: int) -> Push | HostPush | None:
        """Keep a sender's push of a chunk for `workers` workers."""
        # Return its oldest one, which is dropped, if there are too many.
        self._pushes.append((source, pushed))
        self._counts[source] += 1
        if self._counts[source] <= self._most * workers:
            return None
        oldest = next(push for peer, push in self._pushes if peer == source)
        self._pushes = [(peer, push) for peer, push in self._pushes if push is not oldest]
        self._counts[source] -= 1
        return oldest

    def drop(self, peer: Peer) -> list[Push | HostPush]:
        """Return a sender's pushes, which are kept no more."""
        dropped = [push for source, push in self._pushes if source == peer]
        self._pushes = [(source, push) for source, push in self._pushes if source != peer]
        del self._counts[peer]
        return dropped

    def take(self) -> list[tuple[Peer, Push | HostPush]]:
        """Return all pushes with their senders, in the order of their arrival; none is kept."""
        taken, self._pushes = self._pushes, []
        self._counts.clear()
        return taken
