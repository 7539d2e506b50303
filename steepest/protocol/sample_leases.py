"""Leases: who computes which share, under rules by which a worker takes what is next instead of what is its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from steepest.messages.message import PushId
from steepest.protocol.commit_rules import CommitRule, Staged
from steepest.protocol.sample_ledger import Ledger


@dataclass
class _Busy:
    """A worker that was given a share and has not been answered yet."""

    lease: int | None  # None when somebody else has the share by now
    since: float
    push: PushId | None = None  # that was reported for it


class Leases:
    """What workers are at, and how far each has come. Pure; part of the coordinator.

    Args:
        rule: says who may go on.
        members: indices of the workers.

    Attributes:
        ledger: the shares.
        last: by worker, the sequence number of its last push that was committed.
        sent: the version whose weights each worker was sent last.
        clocks: by worker, how many of its pushes were committed.
    """

    def __init__(self, rule: CommitRule, members: Collection[int]) -> None:
        self.ledger = Ledger()
        self.clocks = dict.fromkeys(members, 0)
        self.last: dict[int, int] = {}
        self.sent: dict[int, int] = {}
        self._rule = rule
        self._busy: dict[int, _Busy] = {}

    @property
    def busy(self) -> tuple[int, ...]:
        """Workers that have not been answered."""
        return tuple(self._busy)

    def lease_of(self, worker: int) -> int | None:
        """The share that a worker is at."""
        return self._busy[worker].lease if worker in self._busy else None

    def state(self) -> list[int]:
        """The lowest share that was never given out, and all below it that are not committed."""
        out = [busy.lease for busy in self._busy.values() if busy.lease is not None]
        return [self.ledger.following, *sorted([*self.ledger.returned, *out])]

    def choose(self, joined: Collection[int], count: float, now: float) -> list[tuple[int, int]]:
        """Leases shares to idle workers, the slowest first, until that many are busy; returns (worker, lease)."""
        chosen = []
        clocks = {worker: self.clocks[worker] for worker in joined}
        for worker in sorted(joined - self._busy.keys(), key=lambda worker: (self.clocks[worker], worker)):
            if len(self._busy) >= count:
                break
            if self._rule.may_go_on(worker, clocks):
                lease = self.ledger.take()
                self._busy[worker] = _Busy(lease, now)
                chosen.append((worker, lease))
        return chosen

    def claim(self, push: PushId) -> bool:
        """Takes a push for what its worker was given a share for; whether there is such a share, and no other push."""
        busy = self._busy.get(push.worker)
        if busy is None or busy.push not in (None, push):
            return False
        busy.push = push
        return True

    def commit(self, pushes: Iterable[Staged]) -> None:
        """Their workers are answered."""
        for push in pushes:
            del self._busy[push.worker]
            self.clocks[push.worker] += 1
            self.last[push.worker] = push.sequence

    def drop(self, pushes: Iterable[Staged]) -> list[int]:
        """Their workers are answered; returns the shares that nobody has now."""
        return [lease for push in pushes if (lease := self._busy.pop(push.worker).lease) is not None]

    def give_back(self, workers: Iterable[int]) -> None:
        """Others may have what these are at."""
        for worker in workers:
            busy = self._busy[worker]
            if busy.lease is not None:
                self.ledger.give_back(busy.lease)
                busy.lease = None

    def begin(self, worker: int, version: int, joined: Collection[int]) -> None:
        """Another process takes the place of a worker: it holds up nobody, counts anew, and was sent the weights."""
        self.last.pop(worker, None)
        self.sent[worker] = version
        others = [self.clocks[other] for other in joined if other != worker]
        self.clocks[worker] = max(self.clocks[worker], min(others, default=0))

    def leave(self, worker: int) -> None:
        """A worker is gone; others may have what it was at."""
        if worker in self._busy:
            self.give_back([worker])
            del self._busy[worker]

    def clear(self, joined: Iterable[int], version: int) -> None:
        """A new generation: nobody is at anything, and all hold the weights of a version."""
        self.give_back(self._busy)
        self._busy.clear()
        self.sent = dict.fromkeys(joined, version)

    def overdue(self, now: float, timeout: float) -> list[int]:
        """Workers that were not answered for so long."""
        for busy in self._busy.values():
            busy.since = min(busy.since, now)
        return [worker for worker, busy in self._busy.items() if now - busy.since >= timeout]

    def behind(self, workers: Iterable[int], version: int) -> list[int]:
        """Who of them has not been sent the weights of a version; counts as sent from now on."""
        found = [worker for worker in workers if self.sent[worker] < version]
        self.sent |= dict.fromkeys(found, version)
        return found
