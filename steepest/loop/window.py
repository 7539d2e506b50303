"""Batches whose gradients a loop adds up before a step: one that enters between them takes all of them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from steepest.core.models.protocol import Where
from steepest.loop.lockstep import MOST_AGAIN


@dataclass(frozen=True)
class Again:
    """A batch of an earlier step that is taken again."""

    data: Any
    samples: int
    whole: int  # samples of all workers
    is_first: bool = False  # whether it is the first of them


class Batches(Protocol):
    """What is asked of the model of a loop."""

    def batch_at(self, step: int) -> Again | None:
        """Return the worker's batch of a step of the job; None if it had none, or is not known."""
        ...

    def full_step(self, step: int) -> int:
        """Return the samples of a step that is not the last of its epoch; 0 where that is not known."""
        ...

    def steps_before(self, step: int) -> int:
        """Return how many steps of its epoch there are before a step; 0 where that is not known."""
        ...


@dataclass
class Window:
    """The batches since the last step of the optimizer.

    Attributes:
        start: the job's step of the first; None before any.
        epoch: of these.
        carried: batches of epochs before that are part of the present sum of gradients, if the loop makes one.
        until: the job's step whose batch is the first that is not taken again.
        goes_back: whether the present batch is taken again: its step is another worker's, and over.
        size: workers, when the first was taken.
        whole: samples of all workers in the first.
    """

    start: int | None = None
    epoch: int = 0
    carried: int = 0
    until: int = 0
    goes_back: bool = False
    size: int = 0
    whole: int = 0
    _last: int = 0  # the job's step of the last batch
    _left: Iterator[tuple[int, Again]] = field(default_factory=lambda: iter(()))

    def opens(self, where: Where, *, stepped: bool, size: int, whole: int) -> bool:
        """Note a batch; return whether it is the first since a step, or of an epoch.

        Args:
            where: its place.
            stepped: whether the loop has taken a step since the batch before.
            size, whole: of the job, in workers, and of the batch, in samples of them all.
        """
        last, self._last = self._last, where.step
        if self.start is not None and not stepped and self.epoch == where.epoch:
            return False
        goes_on = self.start is not None and not stepped
        self.carried = self.carried + last + 1 - (self.start or 0) if goes_on else 0
        self.start, self.epoch, self.size, self.whole = where.step, where.epoch or 0, size, whole
        return True

    def begins_before(self, step: int) -> tuple[int, int] | None:
        """Return the step of the first batch, if that is before a step and not by very much, and its samples."""
        if self.start is None or not 0 < step - self.start <= MOST_AGAIN:
            return None
        return self.start, self.whole

    def go_back(self, begun: Sequence[int] | None, where: Where, model: Batches) -> int:
        """Take batches of others again, if any, before the one of a place, where the loop enters an epoch.

        Return how many batches of the epoch there are before.

        Args:
            begun: as `begins_before` returned it in another loop: steps of another size are not taken again.
            where: the place.
            model: of the loop.
        """
        before, (start, full) = model.steps_before(where.step), begun or (where.step, 0)
        if not 0 < where.step - start <= before or model.full_step(start) != full:
            return before
        self.start, self.epoch, self.until, self.whole = start, where.epoch or 0, where.step, full
        self._left = self._taken_again(start, model)
        return before - (where.step - start)

    def _taken_again(self, start: int, model: Batches) -> Iterator[tuple[int, Again]]:
        for step in range(start, self.until):
            if (found := model.batch_at(step)) is not None:
                yield step, replace(found, is_first=not self.goes_back)

    def again(self) -> tuple[int, Again] | None:
        """Return the next batch to take again, with the job's step that it was of; None, once all are taken."""
        found = next(self._left, None)
        self.goes_back = found is not None
        return found
