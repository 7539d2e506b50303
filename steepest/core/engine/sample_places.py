"""The places of one worker's batches among the samples of each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from steepest.core.data.protocol import Indices
from steepest.core.data.sampler import DataPosition, SamplePlan, even_share
from steepest.core.models.protocol import Share, Where

#: The place of a batch: number of its share, index of its replica, number of the micro-batch.
Place = tuple[int, int, int]


class SamplePlaces:
    """The places of one worker's batches: (number of the share, replica, micro-batch) each.

    With n shares in a step, share s is part ``s % n`` of step ``s // n``. Within a step, batches are ordered by
    worker, device and micro-batch.
    """

    def __init__(self, devices: int, shares: int, micros: int) -> None:
        self.shares, self.micros = shares, micros
        # of the samples; None where the data choose their own batches
        self.plan: SamplePlan | None = None
        self._devices = devices
        self._counted: tuple[int, list[int]] = (-1, [])  # a share, and its counts of batches
        self._last: tuple[int, DataPosition] | None = None  # a step, and its place: asked for often

    def use(self, plan: SamplePlan | None) -> None:
        """Set `plan`."""
        self.plan = plan
        self._counted, self._last = (-1, []), None

    def step_of(self, number: int) -> int:
        """Return the step of a share."""
        return number // self.shares

    def part_of(self, place: Place) -> int:
        """Return the number of a batch among all micro-batches of its step."""
        number, replica, micro = place
        return (number % self.shares * self._devices + replica) * self.micros + micro

    def where(self, place: Place) -> Where:
        """Return the step and epoch of a batch."""
        step, part = self.step_of(place[0]), (self.part_of(place), self._parts)
        if self.plan is None:
            return Where(step, None, part, has_more=place[2] + 1 < self.micros)
        position = self._position(step)
        last = self.plan.end_of(position.epoch) == step + 1
        more = place[2] + 1 < self.counts(place[0])[place[1]]
        return Where(step, position.epoch, part, position.ranges, last, more)

    def indices(
        self, place: Place, plan: SamplePlan | None = None, *, of_epoch: bool = False
    ) -> Iterator[Indices]:
        """Yield the samples of a replica's batches from that of a place on; nothing without a plan.

        Args:
            of_epoch: up to the end of the place's epoch, otherwise without end.
        """
        plan = plan or self.plan
        if plan is None:
            return iter(())
        step, first = self.step_of(place[0]), self.part_of((*place[:2], 0))
        end = plan.end_of(plan.position(step).epoch) if of_epoch else None
        return plan.shares(step, first, self._parts, self.micros, end)

    def counts(self, number: int) -> list[int]:
        """Return the number of each replica's micro-batches in a share that are not empty; empty ones come last."""
        if self.plan is None:
            return [self.micros] * self._devices
        if self._counted[0] != number:
            step = self._step_size(number)
            counts = [
                sum(self._size((number, replica, m), step) > 0 for m in range(self.micros))
                for replica in range(self._devices)
            ]
            self._counted = number, counts
        return self._counted[1]

    def of(self, number: int) -> list[Place]:
        """Return the places of a share's batches, in the order in which they are computed."""
        counts = enumerate(self.counts(number))
        return [(number, replica, micro) for replica, count in counts for micro in range(count)]

    def share_of(self, place: Place, alone: Iterable[Place] | None) -> Share | None:
        """Return the number of a batch's samples and of its update's; None if the data choose their own batches.

        Args:
            place: of the batch.
            alone: the batches of the update; None for those of the whole step.
        """
        if self.plan is None:
            return None
        step = self._step_size(place[0])
        whole = step if alone is None else sum(self._size(each, step) for each in alone)
        return Share(self._size(place, step), whole)

    @property
    def _parts(self) -> int:
        """The number of micro-batches of all workers in one step."""
        return self.shares * self._devices * self.micros

    def _step_size(self, number: int) -> int:
        """Return the number of samples of a share's step."""
        return self._position(self.step_of(number)).size

    def _position(self, step: int) -> DataPosition:
        """Return the epoch and samples of a step."""
        assert self.plan is not None
        if self._last is None or self._last[0] != step:
            self._last = step, self.plan.position(step)
        return self._last[1]

    def _size(self, place: Place, step: int) -> int:
        """Return the number of samples of a batch, of the `step` samples of its step."""
        begin, end = even_share(step, self.part_of(place), self._parts)
        return end - begin
