"""Leases of the samples: which worker computes which share, under rules by which a worker takes the next free one.

A share is one part of one step's samples; its number counts the shares of all steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from steepest.messages.message import PushId
from steepest.protocol.commit_rules import CommitRule, Staged


class Ledger:
    """The numbers of shares that were given out, and of those that came back.

    With n shares in a step, number ``L`` is share ``L % n`` of step ``L // n`` of the sample plan.
    Each is given to one worker at a time; numbers that come back are given out first, so that every
    sample is in exactly one committed push.

    Args:
        following: the lowest number that was never given out.
        returned: numbers below that came back.

    Example:
        >>> ledger = Ledger()
        >>> ledger.take(), ledger.take()
        (0, 1)
        >>> ledger.give_back(0)
        >>> ledger.take(), ledger.take()
        (0, 2)
    """

    def __init__(self, following: int = 0, returned: Iterable[int] = ()) -> None:
        self.following = following
        self._returned = sorted(returned)

    def take(self) -> int:
        """Return the lowest number that is free; it is given out from now on."""
        if self._returned:
            return heapq.heappop(self._returned)
        self.following += 1
        return self.following - 1

    def give_back(self, share: int) -> None:
        """Make a number free that was given out: its push will not be committed."""
        heapq.heappush(self._returned, share)

    @property
    def returned(self) -> tuple[int, ...]:
        """Return the numbers that came back and were not given out again, ascending."""
        return tuple(sorted(self._returned))

    def look(self) -> dict[str, Any]:
        """Return "following" and "returned": shares below the first are committed or given out, but for the second."""
        return {"following": self.following, "returned": list(self.returned)}


@dataclass
class _Busy:
    """A worker that was given a share, whose push is neither committed nor dropped.

    Attributes:
        share: its number; None when another worker may have it by now.
        since: when it was given, on the caller's clock, in seconds.
        push: that the worker has reported for it.
    """

    share: int | None
    since: float
    push: PushId | None = None


class Leases:
    """Which share each worker computes, and how far each has come. Pure; part of the coordinator.

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
        """Return the workers that have a share whose push is neither committed nor dropped."""
        return tuple(self._busy)

    def share_of(self, worker: int) -> int | None:
        """Return the share that a worker computes; None if it has none, or another worker may have it."""
        return self._busy[worker].share if worker in self._busy else None

    def state(self) -> list[int]:
        """Return the lowest share that was never given out, followed by all below it that are not committed."""
        out = [busy.share for busy in self._busy.values() if busy.share is not None]
        return [self.ledger.following, *sorted([*self.ledger.returned, *out])]

    def choose(self, joined: Collection[int], count: float, now: float) -> list[tuple[int, int]]:
        """Give shares to idle workers, the slowest first, until `count` are busy; return (worker, share) of each."""
        chosen = []
        clocks = {worker: self.clocks[worker] for worker in joined}
        for worker in sorted(
            joined - self._busy.keys(), key=lambda worker: (self.clocks[worker], worker)
        ):
            if len(self._busy) >= count:
                break
            if self._rule.may_go_on(worker, clocks):
                share = self.ledger.take()
                self._busy[worker] = _Busy(share, now)
                chosen.append((worker, share))
        return chosen

    def restore(self, shares: Sequence[int]) -> None:
        """Continue with another ledger.

        Args:
            shares: the lowest that was never given out, followed by all below it that are free; as
                `state` returns them.
        """
        self.ledger = Ledger(shares[0], shares[1:])

    def free(self, shares: Iterable[int]) -> None:
        """Make shares free that no worker has any more."""
        for share in shares:
            self.ledger.give_back(share)

    def claim(self, push: PushId) -> bool:
        """Return whether a push is of the share that its worker has; the share takes no other push from then on."""
        busy = self._busy.get(push.worker)
        if busy is None or busy.push not in (None, push):
            return False
        busy.push = push
        return True

    def commit(self, pushes: Iterable[Staged]) -> None:
        """Take note that pushes are committed: their workers are idle, and one push further."""
        for push in pushes:
            del self._busy[push.worker]
            self.clocks[push.worker] += 1
            self.last[push.worker] = push.sequence

    def drop(self, pushes: Iterable[Staged]) -> list[int]:
        """Take note that pushes are dropped: their workers are idle. Return the shares that no worker has now."""
        return [
            share for push in pushes if (share := self._busy.pop(push.worker).share) is not None
        ]

    def give_back(self, workers: Iterable[int]) -> None:
        """Make the shares of some workers free for others, although these still compute them."""
        for worker in workers:
            busy = self._busy[worker]
            if busy.share is not None:
                self.ledger.give_back(busy.share)
                busy.share = None

    def begin(self, worker: int, version: int, joined: Collection[int]) -> None:
        """Take note that a process joins as a worker.

        It has pushed nothing yet, has the weights of `version`, and its clock holds up no other
        worker.
        """
        self.last.pop(worker, None)
        self.sent[worker] = version
        others = [self.clocks[other] for other in joined if other != worker]
        self.clocks[worker] = max(self.clocks[worker], min(others, default=0))

    def leave(self, worker: int) -> None:
        """Take note that a worker is gone; its share is free."""
        if worker in self._busy:
            self.give_back([worker])
            del self._busy[worker]

    def clear(self, joined: Iterable[int], version: int) -> None:
        """Begin a generation: all shares that are not committed are free; `joined` have the weights of `version`."""
        self.give_back(self._busy)
        self._busy.clear()
        self.sent = dict.fromkeys(joined, version)

    def overdue(self, now: float, timeout: float) -> list[int]:
        """Return the workers that have had their share for `timeout` seconds."""
        for busy in self._busy.values():
            busy.since = min(busy.since, now)
        return [worker for worker, busy in self._busy.items() if now - busy.since >= timeout]

    def behind(self, workers: Iterable[int], version: int) -> list[int]:
        """Return the workers that were not sent the weights of `version` or newer; from then on they count as sent."""
        found = [worker for worker in workers if self.sent[worker] < version]
        self.sent |= dict.fromkeys(found, version)
        return found
