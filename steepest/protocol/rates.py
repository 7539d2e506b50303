"""Learning rates that a user sets while training runs, in place of those of the schedule. Pure."""

from __future__ import annotations

from typing import Any

from steepest.messages.fields import RateChanges, Rates


def rates_at(changes: RateChanges, step: int) -> Rates:
    """Return the rates that are set for a step.

    Example:
        >>> rates_at([(5, [0.1]), (9, None)], 4), rates_at([(5, [0.1]), (9, None)], 5)
        (None, [0.1])
    """
    found: Rates = None
    for first, rates in changes:
        if first <= step:
            found = rates
    return found


def changes_since(changes: RateChanges, step: int) -> RateChanges:
    """Return the changes without those that concern earlier steps than a step alone.

    Example:
        >>> changes_since([(2, [0.3]), (5, [0.1]), (9, None)], 6)
        [(5, [0.1]), (9, None)]
    """
    later = [change for change in changes if change[0] > step]
    begun = [change for change in changes if change[0] <= step][-1:]
    return [*(change for change in begun if change[1] is not None), *later]


def with_rates(
    hyper: list[dict[str, Any]], changes: RateChanges, step: int
) -> list[dict[str, Any]]:
    """Return hyperparameters of a step, by parameter group, with the learning rates that are set.

    Args:
        hyper: of each group.
        changes: of the learning rates.
        step: counted from 0.
    """
    rates = rates_at(changes, step)
    if rates is None:
        return hyper
    return [{**group, "lr": rate} for group, rate in zip(hyper, rates, strict=True)]
