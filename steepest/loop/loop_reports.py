"""The reports of one worker's loop: their numbers, their weights, and their way to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from steepest.observe.reports import ASKS, CALLS_OF_PLACE, Reported


class LoopReports:
    """The reports of a loop until the driver has them: with a committed step, or when it asks between two steps.

    A report's number says the place of the loop, which is the same on all workers, and which of the calls there it
    is. So the reports of all workers from one place are put together.

    Attributes:
        fresh: what was reported since the last step.
        since: the weight of the batches since each name was last reported; under "", since the loop began.
    """

    def __init__(self) -> None:
        self._reports: list[Reported] = []
        self._noted = 0  # of these, that have gone to the driver with a step
        self._handed: tuple[int, list[Reported]] = (-1, [])  # of the last call of `hand_over`
        self._copies: dict[int, Any] = {}  # by number of the call that asked for an evaluation
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin with a function that has not run yet; what was reported before stays."""
        self.fresh: dict[str, float] = {}
        self.since = {"": 0.0}
        self._first = 0  # calls with smaller numbers were made where the loop was set back
        self._place = self._calls = 0  # where the last call was, and the calls there

    # -- the loop's calls ----------------------------------------------------------------------

    def go_on(self, since: Mapping[str, float] | float, first: int) -> None:
        """Go on with what another worker had, or this one where it was set back to.

        Args:
            since: see the attribute.
            first: the number of the first call that counts.
        """
        self.since = dict(since) if isinstance(since, Mapping) else {"": since}
        self._first = first

    def next(self, place: int) -> int:
        """Return the number of the next call, if it is at this place."""
        return place * CALLS_OF_PLACE + (self._calls if place == self._place else 0)

    def called(self, place: int) -> int:
        """Note a call at a place; return its number."""
        number = self.next(place)
        self._place, self._calls = place, number % CALLS_OF_PLACE + 1
        return number

    def add(self, number: int, values: Mapping[str, float]) -> None:
        """Take the values of a call, whose weight is that of the batches since its names were last reported."""
        weights = {name: self.since.get(name, self.since[""]) for name in values}
        self.since |= dict.fromkeys(weights, 0.0)
        if number >= self._first:
            weight = max(weights.values(), default=0.0)
            self._reports.append(Reported(number, weight, dict(values)))
            self.fresh |= values

    def ask(self, number: int, step: int, copy: Any) -> None:
        """Take a call that asks for an evaluation after a number of steps, with a copy of what is evaluated."""
        if number >= self._first:
            self._reports.append(Reported(number, 0.0, {ASKS: step}))
            self._copies[number] = copy

    def take_copy(self, number: int) -> Any:
        """Return the copy of a call that asked for an evaluation, and forget those before; None if it is not here."""
        found = self._copies.get(number)
        self._copies = {each: copy for each, copy in self._copies.items() if each > number}
        return found

    def count(self, weight: float) -> None:
        """Add the weight of the present batch, or its change."""
        for name in self.since:
            self.since[name] += weight

    # -- on their way --------------------------------------------------------------------------

    def take_fresh(self) -> dict[str, float]:
        """Return the reports since the last call of this method, or since the last step."""
        fresh, self.fresh = self.fresh, {}
        return fresh

    @property
    def notes(self) -> list[Reported]:
        """The reports that no committed step has taken to the driver."""
        return self._reports[self._noted :]

    def unsent_before(self, number: int) -> list[Reported]:
        """Return the reports before the one with a number that no committed step has taken to the driver."""
        return [each for each in self.notes if each.number < number]

    def take_over(self, unsent: Iterable[tuple[int, float, dict[str, float]]]) -> None:
        """Take reports that are part of a state of this worker's, but for those that are here."""
        here = {each.number for each in self._reports}
        self._reports += [Reported(*each) for each in unsent if each[0] not in here]

    def note(self) -> None:
        """Note that a committed step has taken all to the driver."""
        self._noted = len(self._reports)

    def note_before(self, number: int) -> None:
        """Note that committed steps have taken those before the one with this number to the driver."""
        while self._noted < len(self._reports) and self._reports[self._noted].number < number:
            self._noted += 1

    def hand_over(self, number: int) -> list[Reported]:
        """Return all reports, which are forgotten unless the call with this number is made again."""
        handed, self._reports, self._noted = self._reports, [], 0
        self._handed = number, handed
        return handed

    def give_back(self, number: int) -> None:
        """Take back the reports that the call with this number handed over: its answer has not arrived."""
        if self._handed[0] == number:
            self._noted += len(self._handed[1])
            self._reports = self._handed[1] + self._reports
            self._handed = (-1, [])

    def keep_before(self, number: int) -> None:
        """Forget the reports from the one with this number on: they are made again."""
        self._reports = [each for each in self._reports if each.number < number]
        self._noted = min(self._noted, len(self._reports))
