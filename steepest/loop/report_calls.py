"""The numbers of a worker's calls of `report`, which put together what all workers say of one step."""

from __future__ import annotations


class ReportCalls:
    """The calls of `report` of one worker's loop.

    Where others take a step in which this worker has no samples, its next calls have the numbers that theirs have:
    as many are left out as it has made for the batch before.

    Attributes:
        count: of calls before the next one, with those that are left out.
        weight: of the batches since the last call.
        made: calls that were made before the loop began anew, whose values count.
    """

    def __init__(self, count: int = 0, weight: float = 0.0, made: int = 0) -> None:
        self.count, self.weight, self.made = count, weight, made
        self._before: int | None = None  # as `count`, before the last batch of the epoch
        self._missed = 0  # steps since that batch in which the worker has no samples

    def called(self) -> tuple[int, float]:
        """Note a call; return its number, and the weight with which its values count."""
        found, self.count, self.weight = (self.count, self.weight), self.count + 1, 0.0
        return found

    def miss(self) -> None:
        """Note a step in which the worker has no samples."""
        self._missed += 1

    @property
    def of_batch(self) -> int:
        """The number of calls since the last batch of the epoch; 0 before any."""
        return 0 if self._before is None else self.count - self._before

    def leave_out(self, of_batch: int) -> None:
        """Leave out the numbers of others' calls in the steps that were missed, so many in each."""
        self.count += of_batch * self._missed
        self._missed = 0

    def begin_batch(self) -> None:
        """Note that a batch begins."""
        self._before = self.count

    def end_epoch(self) -> None:
        """Note that an epoch has no further batch."""
        self._before = None
