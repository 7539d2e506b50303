"""The gatherings of a user's loop: their places, the worker's own parts, and the joined values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from steepest.core.engine.generators import HeldGenerators
from steepest.core.tensors.half_precision import sum_dtype
from steepest.errors import ConfigurationError
from steepest.loop.cursor import Cursor
from steepest.loop.gathering import (
    Gathered,
    GatheringParts,
    GatheringPlace,
    Gatherings,
    LoopSeat,
    Region,
    alone,
    check_here,
    from_record,
    joined,
    packed,
    recorded,
)
from steepest.loop.kept import pack, unpack

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


GATHERINGS_OF_STEP = 1 << 16  # more than a loop gathers between two steps


class Gatherer:
    """The gatherings of one loop.

    Args:
        loop: that gathers.

    Attributes:
        gatherings: the parts of all workers.
        among_batches: whether the loop has gathered elsewhere than at an epoch's end.
        region, number: the part of the loop in which it is, see `GatheringPlace`.
        wanted: what the loop waits for.
        order: by rank, the samples of the present evaluation so far.
        gathered_at_top: what was gathered in the present epoch before its first batch, as `pack` returns it.
    """

    def __init__(self, loop: UserLoop) -> None:
        self.gatherings = Gatherings(lambda: loop.steps_taken)
        self.among_batches = False
        self._loop = loop
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin with a loop that has not run yet."""
        self.gatherings.end(False)
        self.region, self.number, self._nth, self._at_top = Region.BEFORE, 0, 0, 0
        self.gathered_at_top: list[torch.Tensor] = []
        self._dealt_to: LoopSeat | None = None  # as whom the loop has begun its batch
        self.wanted: GatheringParts | None = None
        self.order: Sequence[list[int]] = []
        self._held: HeldGenerators | None = None  # as they were when it began to wait in vain

    @property
    def _seat(self) -> LoopSeat:
        """The loop's own seat, as far as it knows."""
        return LoopSeat(self._loop.job.rank, self._loop.job.size, self.gatherings.drops)

    # -- for the worker's thread ---------------------------------------------------------------

    def has_lost_its_seat(self, *, in_batch: bool, now: LoopSeat | None = None) -> bool:
        """Return whether the loop's seat in a gathering, or `in_batch` in its batch, differs from `now`."""
        if self.wanted is None and (self._dealt_to is None or not in_batch):
            return False
        now = now or self._seat
        if self.wanted is not None:
            return self.wanted.seat != now
        assert self._dealt_to is not None
        gathered = self.region is Region.BEFORE and self._nth > 0
        return now != (self._dealt_to if gathered else self._dealt_to._replace(drops=now.drops))

    @property
    def has_gathered(self) -> bool:
        """Whether the loop has gathered since it took its batch, or its last step in that."""
        return self._nth % GATHERINGS_OF_STEP > 0

    def behind_steps(self, cursor: Cursor | None) -> list[Any]:
        """Return what was gathered behind steps that the loop has taken, see `Gatherings.behind_steps`."""
        before = 0 if cursor is None else cursor.place.batch + (cursor.place.step > 0)
        return self.gatherings.behind_steps(before)

    def put(self, wanted: GatheringParts) -> None:
        """Wait for parts from now on; the worker's own are sent to the others."""
        self.wanted = wanted
        self.gatherings.put(wanted)

    def gathered(self, *, waits: bool) -> list[torch.Tensor] | None:
        """Return the parts of all workers that the loop waits for; None where some are missing."""
        wanted = self.wanted
        assert wanted is not None
        if waits and self.gatherings.found(wanted) is None:
            try:
                self._loop.job.turns.show()  # also where the wait is given up, until the function goes on
                self.gatherings.wait(wanted)
            except BaseException:
                self._held = self._held or HeldGenerators()
                raise
        parts = self.gatherings.found(wanted)
        if parts is None:
            self._held = self._held or HeldGenerators()
            return None
        if self._held is not None:
            self._held.go_on()
            self._held = None
        self.wanted = None
        return parts

    # -- for the user's thread -----------------------------------------------------------------

    def enter(self, region: Region, number: int) -> None:
        """Note in which part of the loop gatherings are from now on."""
        if (region, number) != (self.region, self.number) or self._dealt_to is None:
            self.region, self.number, self._nth, self._at_top = region, number, 0, 0
            if region is Region.BEFORE:
                self._dealt_to = self._seat

    def begin_step(self, step: int) -> None:
        """Note that the next step of the batch begins; a loop that passes over earlier ones did not gather there."""
        self._nth = step * GATHERINGS_OF_STEP

    def _place(self) -> GatheringPlace:
        """Return the place of a gathering that begins."""
        self._nth += 1
        return GatheringPlace(self.number, self.region, self._nth - 1)

    def _ask(
        self, place: GatheringPlace, own: torch.Tensor, call: str = "steepest.gather()"
    ) -> list[torch.Tensor]:
        """Return the parts of all workers at a place, to which a call of the user's has come."""
        wanted = GatheringParts(place, own, self._seat, self._loop.steps_taken)
        parts: list[torch.Tensor] = self._loop.job.turns.ask(wanted)
        check_here(parts, call)
        return parts

    def gather(self, value: Any) -> Any:
        """Return the values of all workers, see `steepest.gather`."""
        loop = self._loop
        if not loop.has_entered:
            raise ConfigurationError(
                "steepest.gather() before steepest.epochs(): call it in the loop, or after it, so that a worker that "
                "joins later knows which values are meant"
            )
        if not loop.job.kind.together:
            do = (
                "leave quorum= and pace= out"
                if loop.job.kind.local
                else 'give strategy="ps" or "allreduce"'
            )
            raise ConfigurationError(
                "steepest.gather() where workers do not wait for each other: report() gives the driver means over "
                f"them; or {do}"
            )
        if loop.entry.stands_in or loop.passes_by:
            return alone(value)
        if self.region is Region.TOP:
            return self._gather_at_top(value)
        return self._gather(value)

    def _gather_at_top(self, value: Any) -> Any:
        """Return what the others have gathered before the first batch of the epoch; gather it, if none has."""
        if self._at_top < len(self.gathered_at_top):
            gathered = from_record(value, self.gathered_at_top[self._at_top])
            self._at_top += 1
            return gathered
        if self._loop.entry.arriving is not None:
            raise ConfigurationError(
                f"worker {self._loop.job.rank} has entered the epoch later than others, and gathers before its first "
                "batch where these have not: let all workers gather there equally often"
            )
        gathered = self._gather(value)
        self.gathered_at_top.append(recorded(gathered))
        self._at_top += 1
        return gathered

    def _gather(self, value: Any) -> Any:
        loop = self._loop
        if loop.job.size == 1:
            return alone(value)
        if loop.job.kind.local and self.region is not Region.END:
            raise ConfigurationError(
                'steepest.gather() between the batches of an epoch with strategy="local", where workers have weights '
                "of their own and do not wait for each other: call it behind the loop over the loader"
            )
        self.among_batches |= self.region not in (Region.END, Region.TOP)
        place = self._place()
        none = self.region is Region.BEFORE and not loop.has_samples
        parts = self._ask(place, packed(value, counts=not none))

        def follow(leaf: torch.Tensor, whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            back = place._replace(nth=self._nth)
            self._nth += 1
            followed: torch.Tensor = Gathered.apply(leaf, whole, rows, partial(self._summed, back))  # type: ignore[no-untyped-call]
            return followed

        return joined(value, parts, self.order, loop.job.rank, follow)

    def total(self, number: float) -> float:
        """Return the sum of a number over all workers; each of them calls this at the same place."""
        loop = self._loop
        if loop.passes_by:
            return number
        self.among_batches = True
        own = pack({"leaves": [torch.tensor(number).double()]})
        parts = self._ask(self._place(), own, "steepest.weight()")
        return math.fsum(float(unpack(part)["leaves"][0]) for part in parts)

    def _summed(self, place: GatheringPlace, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of all workers' gradients of gathered rows, weighted as their losses are in the mean."""
        weight = 1.0 if self._loop.prepared.sums else self._loop.weights.present
        wide = gradient.to(sum_dtype(gradient.dtype))
        own = wide * weight if weight else torch.zeros_like(wide)
        parts = self._ask(place, pack({"leaves": [own]}))
        gradients = [unpack(part)["leaves"][0] for part in parts]
        total = torch.stack([each for each in gradients if each.shape == gradient.shape]).sum(dim=0)
        return (total / weight if weight else total).to(gradient)

    def average(
        self, loss: torch.Tensor, parameters: Sequence[torch.nn.Parameter | torch.Tensor]
    ) -> torch.Tensor:
        """Return the weighted mean of all workers' losses, and leave the means of their gradients in the parameters.

        A parameter without a gradient on any worker has none afterwards.
        """
        place, weight = self._place(), self._loop.weights.present
        if self._loop.job.size == 1:
            return loss
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        has = torch.tensor([p.grad is not None for p in parameters])
        own = [torch.stack([loss.double().cpu(), torch.tensor(weight).double()]), has, *gradients]
        of_workers = [unpack(part)["leaves"] for part in self._ask(place, pack({"leaves": own}))]
        of_workers = [leaves for leaves in of_workers if len(leaves[0]) and leaves[0][1]]
        total = sum(float(leaves[0][1]) for leaves in of_workers)
        for at, parameter in enumerate(parameters, 2):
            if not any(leaves[1][at - 2] for leaves in of_workers):
                parameter.grad = None
                continue
            dtype = sum_dtype(parameter.dtype)
            mean = sum(
                leaves[at].to(dtype) * (float(leaves[0][1]) / total) for leaves in of_workers
            )
            if isinstance(mean, torch.Tensor):
                parameter.grad = mean.to(parameter)
        losses = [leaves[0][0] * (leaves[0][1] / total) for leaves in of_workers]
        return torch.stack(losses).sum().to(loss) if losses else loss
