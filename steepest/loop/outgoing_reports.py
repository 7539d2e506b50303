"""The reports of a worker's loop on their way to the driver."""

from __future__ import annotations

from collections.abc import Iterable

from steepest.observe.reports import Reported


class OutgoingReports:
    """What a loop has reported, until the driver has it: with a committed step, or when it asks between two steps."""

    def __init__(self) -> None:
        self._found: list[Reported] = []
        self._noted = 0  # of these, that have gone to the driver with a step
        self._handed: tuple[int, list[Reported]] = (-1, [])  # of the last call of `hand_over`

    @property
    def notes(self) -> list[Reported]:
        """The reports that no committed step has taken to the driver."""
        return self._found[self._noted :]

    def unsent_before(self, number: int) -> list[Reported]:
        """Return the reports before the one with a number that no committed step has taken to the driver."""
        return [each for each in self.notes if each.number < number]

    def take_over(self, unsent: Iterable[tuple[int, float, dict[str, float]]]) -> None:
        """Take reports that are part of a state of this worker's, but for those that are here."""
        here = {each.number for each in self._found}
        self._found += [Reported(*each) for each in unsent if each[0] not in here]

    def add(self, report: Reported) -> None:
        """Take a report."""
        self._found.append(report)

    def note(self) -> None:
        """Note that a committed step has taken all to the driver."""
        self._noted = len(self._found)

    def note_before(self, number: int) -> None:
        """Note that committed steps have taken those before the one with this number to the driver."""
        while self._noted < len(self._found) and self._found[self._noted].number < number:
            self._noted += 1

    def hand_over(self, number: int) -> list[Reported]:
        """Return all reports, which are forgotten unless the call with this number is made again."""
        found, self._found, self._noted = self._found, [], 0
        self._handed = number, found
        return found

    def give_back(self, number: int) -> None:
        """Take back what the call with this number has handed over, if it is the last: its answer has not arrived."""
        if self._handed[0] == number:
            self._noted += len(self._handed[1])
            self._found = self._handed[1] + self._found
            self._handed = (-1, [])

    def keep_before(self, number: int) -> None:
        """Forget the reports from the one with this number on: they are made again."""
        self._found = [each for each in self._found if each.number < number]
        self._noted = min(self._noted, len(self._found))
