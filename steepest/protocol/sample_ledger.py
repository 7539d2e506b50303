"""The ledger: which shares of the samples are taken, which came back. Pure; part of the coordinator."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any


class Ledger:
    """Leases of shares, for rules under which workers take what is next instead of what is theirs.

    A lease is the number of a share: with n shares in a step, lease ``L`` is share ``L % n`` of step
    ``L // n`` of the sample plan. Each is given to one worker at a time; what comes back is given out
    first, so that every sample is in exactly one committed push.

    Example:
        >>> ledger = Ledger()
        >>> ledger.take(), ledger.take()
        (0, 1)
        >>> ledger.give_back(0)
        >>> ledger.take(), ledger.take()
        (0, 2)
    """

    def __init__(self, following: int = 0, returned: Iterable[int] = ()) -> None:
        self.following = following  # the lowest number that was never given out
        self._returned = sorted(returned)

    def take(self) -> int:
        """The next lease, the lowest that is free."""
        if self._returned:
            return heapq.heappop(self._returned)
        self.following += 1
        return self.following - 1

    def give_back(self, lease: int) -> None:
        """What was taken is not committed; somebody else may have it."""
        heapq.heappush(self._returned, lease)

    @property
    def returned(self) -> tuple[int, ...]:
        """What came back and was not given out again."""
        return tuple(sorted(self._returned))

    def look(self) -> dict[str, Any]:
        """Both: all below the first are committed or taken, except those that came back."""
        return {"following": self.following, "returned": list(self.returned)}
