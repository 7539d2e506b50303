"""The batches that a loop takes."""

from __future__ import annotations

from steepest.loop.prepared import Batch


class Batches:
    """The batches that a loop takes, and the epochs in which it does.

    Attributes:
        pending: a batch, or with `sees_all_batches` a step of the job, that the engine has given and the loop has yet
            to take.
        taken: the last one that it took.
        stepped: whether that one's step was taken.
        count: how many batches the loop has taken.
        wanted: the number of epochs that the loop wants in all; None before it has come to them.
        epoch: in which it is.
        left: through which it has gone last; -1 before the first.
    """

    def __init__(self) -> None:
        self.pending: Batch | None = None
        self.taken: Batch | None = None
        self.stepped = False
        self.count = 0
        self.wanted: int | None = None
        self.epoch, self.left = 0, -1

    def take(self) -> None:
        """Take the pending batch."""
        self.taken, self.pending = self.pending, None
