"""Where a job is in a pass over a stream of batches."""

from __future__ import annotations

from typing import NamedTuple


class StreamPlace(NamedTuple):
    """Where a job is in a pass over a stream, of which each step takes as many batches."""

    # batches of the pass, of all replicas, before the job's first step; negative where it began later
    base: int
    replicas: int  # that take one batch after the other
    micros: int  # batches that each replica takes in a step
    # the same of the pass before, for steps before this one began; None if unknown
    before: StreamPlace | None = None

    def at(self, step: int, micro: int = 0) -> int:
        """Return how many batches of the pass, or of the one before, come before the `micro`-th batches of a step."""
        found = self.base + (step * self.micros + micro) * self.replicas
        if found < 0 and self.before is not None:
            return self.before.at(step, micro)
        return max(found, 0)
