"""The numbers of a worker's calls of `report`, which put together what all workers say at one place of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from steepest.observe.reports import CALLS_OF_PLACE


class ReportCalls:
    """The calls of `report` of one worker's loop.

    A call's number says the place of the loop, which is the same on all workers, and which of the calls there it is.

    Attributes:
        since: what the batches weigh since each name was reported last; "" for those that were not.
        made: the number of the first call that counts: those before were made where the loop was set back.
    """

    def __init__(self) -> None:
        self.since, self.made = {"": 0.0}, 0
        self._place, self._calls = 0, 0  # where the last call was, and the calls there

    def go_on(self, since: Mapping[str, float] | float, made: int) -> None:
        """Go on with what another worker had, or this one where it was set back to."""
        self.since = dict(since) if isinstance(since, Mapping) else {"": since}
        self.made = made

    def next(self, place: int) -> int:
        """Return the number of the next call, if it is at this place."""
        return place * CALLS_OF_PLACE + (self._calls if place == self._place else 0)

    def called(self, place: int) -> int:
        """Note a call at a place; return its number."""
        number = self.next(place)
        self._place, self._calls = place, number % CALLS_OF_PLACE + 1
        return number

    def weigh(self, names: Iterable[str]) -> float:
        """Return what values of these names weigh: as the batches since they were reported last."""
        own = {name: self.since.get(name, self.since[""]) for name in names}
        self.since |= dict.fromkeys(own, 0.0)
        return max(own.values(), default=0.0)

    def count(self, weight: float) -> None:
        """Note that the present batch weighs so much, or so much more."""
        for name in self.since:
            self.since[name] += weight
