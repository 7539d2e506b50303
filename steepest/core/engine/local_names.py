"""The names of weights that a worker under local SGD has of its own, among its optimizer's state."""

from __future__ import annotations

#: The key of a parameter's own weights, and of the weight of the samples behind them.
LOCAL, LOCAL_WEIGHT = "@local", "@local_weight"


def is_own_weight(name: str) -> bool:
    """Return whether "PARAMETER/KEY" is no state of an optimizer, but of weights that one worker has."""
    return name.endswith((f"/{LOCAL}", f"/{LOCAL_WEIGHT}"))
