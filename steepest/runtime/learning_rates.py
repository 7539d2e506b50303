"""The learning rates of a job's steps: those of its schedule, and those that the user has set instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from steepest.core.messages.fields import RateChanges, Rates
from steepest.core.optim.spec import OptimizerSpec, Schedule, ScheduleState
from steepest.core.protocol.commit_state import begun_by, changes_since, rates_at
from steepest.errors import ConfigurationError
from steepest.runtime.context import JobContext

#: Steps whose rates are remembered, so that a death that sets a job back computes no schedule from
#: its beginning.
_REMEMBERED = 10_000


class LearningRates:
    """The learning rate of each step on the driver, and the rates that the user sets.

    The coordinator, or each worker under local SGD, has the same schedule and is sent the changes.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._changes: list[tuple[int, Rates]] = []
        self._wanted: tuple[Rates] | None = None  # set, and not in force yet
        self._schedule: Schedule | None = None
        self._known: dict[int, tuple[float, ...]] = {}  # by number of updates, the schedule's

    @property
    def _spec(self) -> OptimizerSpec:
        return self._context.job.description.optimizer_spec

    def at(self, step: int) -> tuple[float, ...]:
        """Return each parameter group's learning rate in a step, of its first update under local SGD; NaN for none."""
        rates = rates_at(self._changes, step)
        return self._scheduled(step) if rates is None else tuple(rates)

    def _scheduled(self, step: int) -> tuple[float, ...]:
        updates = self._context.job.updates_before(step)
        if (known := self._known.get(updates)) is not None:
            return known
        self._schedule = self._schedule or Schedule(self._spec)
        hyper = self._spec.hyperparameters(self._schedule.at(updates))
        self._known[updates] = rates = tuple(group.get("lr", math.nan) for group in hyper)
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return rates

    def want(self, rate: float | Sequence[float] | None) -> None:
        """Take the rates of future steps, see `DistributedSGD.set_learning_rate`; `put_in_force` follows."""
        self._wanted = (self._checked(rate),)

    def _checked(self, rate: Any) -> Rates:
        groups = self._spec.groups
        if not all("lr" in hyper for _, hyper in groups):
            raise ConfigurationError(f"{self._spec.name} has no learning rate that could be set")
        if rate is None:
            return None
        several = isinstance(rate, Sequence) and not isinstance(rate, (str, bytes))
        rates = rate if several else [rate] * len(groups)
        if len(rates) != len(groups):
            raise ConfigurationError(
                f"{len(rates)} learning rates for {len(groups)} parameter groups: give one number, "
                "or one for each group"
            )
        for each in rates:
            number = isinstance(each, Real) and not isinstance(each, bool)
            if not number or not math.isfinite(each) or each < 0:
                raise ConfigurationError(f"learning rate {each!r}: give a number of at least 0")
        return [float(each) for each in rates]

    @property
    def are_wanted(self) -> bool:
        """Whether rates are set that are not in force yet."""
        return self._wanted is not None

    def put_in_force(self, step: int) -> None:
        """Put the user's rates in force from the next new step on; called while no step is computed."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            earlier = begun_by(self._changes, step - 1)
            if earlier < len(self._changes):  # of steps that a death has made new again
                self._changes = self._changes[:earlier]
            self._changes.append((step, wanted[0]))

    def since(self, step: int) -> RateChanges:
        """Return the changes that concern a step and those after it."""
        return changes_since(self._changes, step)

    @property
    def changes(self) -> RateChanges:
        """All changes."""
        return tuple(self._changes)

    def state(self, step: int) -> list[float] | None:
        """Return the rates that are set for a step, for a checkpoint; None for the schedule's."""
        rates = rates_at(self._changes, step)
        return None if rates is None else list(rates)

    def restore(self, step: int, rates: Rates, schedule: ScheduleState | None) -> None:
        """Continue from a checkpoint at a step, with rates as `state` returned them."""
        self._changes = [] if rates is None else [(step, rates)]
        self._wanted = None
        self._schedule = Schedule(self._spec)
        self._schedule.load_state(schedule)
        self._known.clear()
