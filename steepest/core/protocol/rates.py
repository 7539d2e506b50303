"""Learning rates that a user sets while training runs, in place of those of the schedule. Pure."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from steepest.core.messages.fields import RateChanges, Rates


def rates_at(changes: RateChanges, step: int) -> Rates:
    """Return the rates that are set for a step.

    Example:
        >>> rates_at([(5, [0.1]), (9, None)], 4), rates_at([(5, [0.1]), (9, None)], 5)
        (None, [0.1])
    """
    begun = begun_by(changes, step)
    return changes[begun - 1][1] if begun else None


def begun_by(changes: RateChanges, step: int) -> int:
    """Return how many changes, which are sorted by step, take effect at a step or before it."""
    return bisect_right(changes, step, key=lambda change: change[0])


def changes_since(changes: RateChanges, step: int) -> RateChanges:
    """Return the changes without those that another change has replaced by `step`.

    Example:
        >>> changes_since([(2, [0.3]), (5, [0.1]), (9, None)], 6)
        [(5, [0.1]), (9, None)]
    """
    begun = begun_by(changes, step)
    in_force = begun > 0 and changes[begun - 1][1] is not None
    return list(changes[begun - in_force :])


def with_rates(
    hyper: list[dict[str, Any]], changes: RateChanges, step: int
) -> list[dict[str, Any]]:
    """Return hyperparameters of a step (from 0), by parameter group, with the learning rates that are set."""
    rates = rates_at(changes, step)
    if rates is None:
        return hyper
    return [{**group, "lr": rate} for group, rate in zip(hyper, rates, strict=True)]
