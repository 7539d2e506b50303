"""Where a loop of a user's own is."""

from __future__ import annotations

from typing import NamedTuple


class LoopPlace(NamedTuple):
    """Where a loop is whose workers go through all batches together: the same on all of them.

    Attributes:
        epoch: in which it is, from 0.
        passes: over the loader that it has begun in that epoch, with one that it went on with; 0 before the first.
        passed: passes that it has begun in all epochs.
        batch: batches, or rounds of a loop without a loader, that it has begun in all epochs.
        step: steps that it has taken in the last of these.
        inside: whether it is at that batch, and what follows the last one of a pass; else it waits for another.
    """

    epoch: int = 0
    passes: int = 0
    passed: int = 0
    batch: int = 0
    step: int = 0
    inside: bool = False
