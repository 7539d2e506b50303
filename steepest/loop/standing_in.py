"""A worker that joins while others gather behind an epoch: it goes through their last batch again, without updating."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StandIn:
    """The part of a loop that does not count: one batch, whose steps and reports are left out.

    Args:
        last_batch: returns the batch of the step before.
        take_arrived: sets the state that has arrived, now that all is done that the others have done before.

    Attributes:
        counts_not: whether the loop is in that part.
    """

    def __init__(self, last_batch: Callable[[], Any], take_arrived: Callable[[], None]) -> None:
        self.counts_not = self._given = False
        self._last_batch, self._take_arrived = last_batch, take_arrived

    def begin(self) -> None:
        """Stand in from now on, up to the end of the epoch."""
        self.counts_not, self._given = True, False

    def next_batch(self) -> tuple[Any] | None:
        """Return the batch, in a tuple, if the loop has not seen it; else end standing in and return None."""
        if self.counts_not and not self._given:
            self._given = True
            return (self._last_batch(),)
        if self.counts_not:
            self.counts_not = False
            self._take_arrived()
        return None
