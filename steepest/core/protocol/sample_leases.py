"""Leases of the samples, under rules by which a worker takes the next free share.

A share is one part of one step's samples; its number counts the shares of all steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from steepest.core.messages.message import PushId
from steepest.core.protocol.commit_rules import CommitRule, Staged


class Ledger:
    """The numbers of the shares that are leased, and of those that were returned.

    With n shares in a step, number ``L`` is share ``L % n`` of step ``L // n`` of the sample plan.
    Each is leased to one worker at a time; returned numbers are leased first, so that every sample
    is in exactly one committed push.

    Args:
        following: the lowest number that was never leased.
        returned: the numbers below it that are free.

    Example:
        >>> ledger = Ledger()
        >>> ledger.take(), ledger.take()
        (range(0, 1), range(1, 2))
        >>> ledger.give_back(0)
        >>> ledger.take(3), ledger.take(3)
        (range(0, 1), range(2, 5))
    """

    def __init__(self, following: int = 0, returned: Iterable[int] = ()) -> None:
        self.following = following
        self._returned = sorted(returned)

    def take(self, most: int = 1) -> range:
        """Lease and return the lowest free number and the free ones right after it, at most `most`."""
        first = last = self._take()
        while last - first + 1 < most and self._lowest == last + 1:
            last = self._take()
        return range(first, last + 1)

    @property
    def _lowest(self) -> int:
        """The lowest free number."""
        return self._returned[0] if self._returned else self.following

    def _take(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self.following += 1
        return self.following - 1

    def give_back(self, share: int) -> None:
        """Make a leased number free, because its push will not be committed."""
        heapq.heappush(self._returned, share)

    @property
    def returned(self) -> tuple[int, ...]:
        """The numbers that were returned and are not leased again, ascending."""
        return tuple(sorted(self._returned))

    def counters(self) -> dict[str, Any]:
        """Return "following" and "returned", as the constructor takes them."""
        return {"following": self.following, "returned": list(self.returned)}


@dataclass
class _Busy:
    """The lease of a worker whose push is neither committed nor dropped."""

    shares: range  # their numbers
    since: float  # when it was leased, in seconds on the caller's clock
    push: PushId | None = None  # which the worker has reported for it
    is_free: bool = False  # whether other workers may have them

    @property
    def held(self) -> range:
        """The shares that no other worker may have."""
        return range(0) if self.is_free else self.shares


class Leases:
    """Which share each worker computes, and how many pushes each has made. Pure.

    Args:
        rule: decides which workers may begin another push.
    """

    def __init__(self, rule: CommitRule, members: Collection[int]) -> None:
        self.ledger = Ledger()
        # by worker, the number of its pushes that are committed
        self.clocks = dict.fromkeys(members, 0)
        # by worker, sequence of its process' last push that is part of the weights
        self.last_applied: dict[int, int] = {}
        self.sent: dict[int, int] = {}  # by worker, the version whose weights it was sent last
        self._rule = rule
        self._busy: dict[int, _Busy] = {}
        self._idle = set(members)  # the others
        self._ahead: dict[int, range] = {}  # by worker, the shares that it is leased next
        #: How many shares busy workers compute, or will next, those that are free for others included.
        self.out = 0

    @property
    def busy(self) -> tuple[int, ...]:
        """The workers that have a lease: their pushes are neither committed nor dropped."""
        return tuple(self._busy)

    @property
    def awaited(self) -> list[int]:
        """The busy workers whose shares no other worker may have; if there are none, all busy workers."""
        return [worker for worker, busy in self._busy.items() if not busy.is_free] or [*self._busy]

    def shares_of(self, worker: int) -> range:
        """Return the shares that are leased to a worker; none if none are or they are free for others."""
        return self._busy[worker].held if worker in self._busy else range(0)

    def state(self) -> list[int]:
        """Return what `restore` takes: the lowest share never leased, then those below not committed."""
        leased = *(busy.held for busy in self._busy.values()), *self._ahead.values()
        out = [share for shares in leased for share in shares]
        return [self.ledger.following, *sorted([*self.ledger.returned, *out])]

    def lease(
        self,
        joined: Collection[int],
        most: float,
        now: float,
        wanted: Callable[[int], int] = lambda worker: 1,
        *,
        ahead: bool = False,
    ) -> list[tuple[int, range, range]]:
        """Lease free shares to idle joined workers, slowest first; return (worker, shares, next shares).

        Args:
            most: how many shares may be out, perhaps infinity.
            now: in seconds on the caller's clock.
            wanted: returns the most shares that a worker gets.
            ahead: whether workers also get their next shares, while there are enough for all.
        """
        leased = []
        # a copy at each push of a thousand workers would take longer than all else here
        clocks = (
            self.clocks
            if len(joined) == len(self.clocks)
            else {worker: self.clocks[worker] for worker in joined}
        )
        for worker in sorted(
            self._idle.intersection(joined), key=lambda worker: (self.clocks[worker], worker)
        ):
            shares = self._ahead.pop(worker, range(0))
            if not shares:
                if (left := most - self.out) <= 0 or not self._rule.may_go_on(worker, clocks):
                    continue
                shares = self._take(int(min(wanted(worker), left)))
            self._busy[worker] = _Busy(shares, now)
            self._idle.discard(worker)
            leased.append((worker, shares))
        for worker, _ in leased if ahead else ():
            if most - self.out >= wanted(worker) * len(joined):
                self._ahead[worker] = self._take(wanted(worker))
        return [(*each, self._ahead.get(each[0], range(0))) for each in leased]

    def _take(self, most: int) -> range:
        """Return free shares that are out from now on."""
        shares = self.ledger.take(most)
        self.out += len(shares)
        return shares

    def _end(self, worker: int) -> range:
        """End a busy worker's lease; return its shares that no other worker may have."""
        busy = self._busy.pop(worker)
        self._idle.add(worker)
        self.out -= len(busy.shares)
        return busy.held

    def restore(self, shares: Sequence[int]) -> None:
        """Continue with other free shares, as `state` returns them."""
        self.ledger = Ledger(shares[0], shares[1:])

    def free(self, shares: Iterable[int]) -> None:
        """Make shares free that are leased to no worker any more."""
        for share in shares:
            self.ledger.give_back(share)

    def claim(self, push: PushId) -> bool:
        """Bind a reported push to its worker's lease; return False if it has none or one bound already."""
        busy = self._busy.get(push.worker)
        if busy is None or busy.push not in (None, push):
            return False
        busy.push = push
        return True

    def commit(self, pushes: Iterable[Staged], *, skipped: bool = False) -> None:
        """End committed pushes' leases and advance their clocks by one; `skipped`: for NaN or infinity."""
        for push in pushes:
            self._end(push.worker)
            self.clocks[push.worker] += 1
            if not skipped:
                self.last_applied[push.worker] = push.sequence

    def drop(self, pushes: Iterable[Staged]) -> list[int]:
        """End the leases of dropped pushes; return their shares that are not free, see `free`."""
        return [share for push in pushes for share in self._end(push.worker)]

    def give_back(self, workers: Iterable[int]) -> None:
        """Make the shares of busy workers free for others; these workers still compute them."""
        for worker in workers:
            busy = self._busy[worker]
            self.free(busy.held)
            busy.is_free = True

    def begin(self, worker: int, version: int, joined: Collection[int]) -> None:
        """Add a worker that has the present version's weights.

        Its clock is raised to the lowest of the others', so that it holds up no other worker.
        """
        self.last_applied.pop(worker, None)
        self.sent[worker] = version
        others = [self.clocks[other] for other in joined if other != worker]
        self.clocks[worker] = max(self.clocks[worker], min(others, default=0))

    def forget_ahead(self, worker: int) -> None:
        """Make the shares free that a worker would have been leased next."""
        shares = self._ahead.pop(worker, range(0))
        self.out -= len(shares)
        self.free(shares)

    def leave(self, worker: int) -> None:
        """End the lease of a lost worker, if it has one; its share is free."""
        if worker in self._busy:
            self.free(self._end(worker))

    def clear(self, joined: Iterable[int], version: int) -> None:
        """End all leases, whose shares are free, as a generation begins.

        Args:
            joined: the workers that take part, which are sent the weights of `version`.
        """
        for worker in [*self._busy]:
            self.leave(worker)
        for worker in [*self._ahead]:
            self.forget_ahead(worker)
        self.sent = dict.fromkeys(joined, version)

    def overdue(self, now: float, timeout: float) -> list[int]:
        """Return the workers whose leases, of shares that no other worker may have, are `timeout` seconds old or older.

        A lease from before the first call counts from that call.
        """
        for busy in self._busy.values():
            busy.since = min(busy.since, now)
        held = ((worker, busy.since) for worker, busy in self._busy.items() if not busy.is_free)
        return [worker for worker, since in held if now - since >= timeout]

    def behind(self, workers: Iterable[int], version: int) -> list[int]:
        """Return which workers were sent no weights of `version` or newer.

        The caller sends them: they count as sent.
        """
        late = [worker for worker in workers if self.sent[worker] < version]
        self.sent |= dict.fromkeys(late, version)
        return late
