"""The weights of the batches in a loop's next step, and the losses of their backward passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steepest.core.models.protocol import checked_weight
from steepest.errors import ConfigurationError
from steepest.loop.losses import Losses
from steepest.loop.sum_weights import SumWeights

if TYPE_CHECKING:
    from steepest.loop.cursor import Cursor
    from steepest.loop.user_loop import UserLoop


class StepWeights:
    """The weights of the batches of the step in progress, or of the last step.

    Args:
        loop: that takes them.

    Attributes:
        weight, samples, whole: their weight, and the numbers of their samples on this worker and on all.
        own: the weight of the last batch, if the loop has set it.
        losses: of their backward passes.
        sum: of the gradients that are added up, where all workers go through the same batches.
    """

    def __init__(self, loop: UserLoop) -> None:
        self._loop = loop
        self.weight = 0.0
        self.samples = self.whole = 0
        self.own: float | None = None
        self.losses = Losses(loop)
        self.sum = SumWeights(loop.gatherer.total)
        self._batch = 0.0  # what the present one of the worker's own shares weighs
        self._passes = 0  # backward passes since the last step, when the present batch began
        # samples on this worker and on all: of the present batch, and of all batches of the next step
        self._present = self._seen = 0, 0

    # -- shares of the worker's own ------------------------------------------------------------

    def begin_share(self, samples: int, whole: int) -> None:
        """Count a batch before its step.

        Args:
            samples: of the batch.
            whole: those of all workers, if they are not counted yet.
        """
        self.whole += whole
        self.samples += samples
        self.weight += samples
        self._loop.reports.count(samples)
        self.losses.looks.begin(self._loop.batches.epoch, samples)
        self._batch, self.own = float(samples), None

    # -- batches that all workers go through ---------------------------------------------------

    def begin_batch(self, cursor: Cursor) -> float | None:
        """Begin with the present batch, or round; return the factor for earlier gradients, or None."""
        self.own = None
        learned, self._passes = len(self.losses.found) > self._passes, len(self.losses.found)
        size = self._loop.job.size
        if cursor.samples is None:  # a round has a sample of each worker
            samples, whole = 1, size
        else:
            samples, whole = cursor.samples, cursor.whole
        before = (0, 0) if self.sum.has_ended else self._seen
        self._present, self._seen = (samples, whole), (before[0] + samples, before[1] + whole)
        kinds = {"sums": self._loop.prepared.sums, "learned": learned, "even": cursor.deals_evenly}
        self.sum.begin(samples, cursor.samples_of_all, size, **kinds)
        self.losses.looks.begin(self._loop.batches.epoch, cursor.samples or 0)
        self.weight, self.losses.scale = self.sum.weight, self.sum.scale
        if (factor := self.sum.rescale) is not None:
            self.losses.found = [loss * factor for loss in self.losses.found]
        return factor

    def begin_step(self) -> None:
        """Have the weight and the samples be those of the batches of the step that is about to be taken."""
        self.weight = self.sum.weight
        self.samples, self.whole = self._seen

    def end_step(self) -> None:
        """Note that a step of an optimizer is committed."""
        self.weight, self.samples, self.whole = 0.0, 0, 0
        self.losses.found = []

    def begin_next_step(self) -> None:
        """Note that a step in the present batch is committed, or passed over since it is."""
        self.sum.step()
        self._passes, self._seen = 0, self._present

    # -- what the loop says --------------------------------------------------------------------

    def say(self, weight: float) -> None:
        """Set the weight of the present batch, in place of its number of samples.

        Raises:
            ConfigurationError: losses are sums; or there is no batch yet; or see `SumWeights.say`.
        """
        loop = self._loop
        if loop.prepared.sums:
            raise ConfigurationError(
                "steepest.weight() with steepest.prepare(..., reduction='sum'): sums are not weighed; leave one out"
            )
        if (cursor := loop.prepared.cursor) is not None:
            before = self._weight_of(cursor) if cursor.samples is not None else 0.0
            if self.own is not None:
                before = self.own
            # a batch of none of the worker's samples is there to be looked at
            self.own = checked_weight(weight) if loop.has_samples else 0.0
            self.sum.say(self.own, passed=len(self.losses.found) > self._passes)
            self.weight, self.losses.scale = self.sum.weight, self.sum.scale
            loop.reports.count(self.own - before)
            return
        if loop.batches.taken is None:
            raise ConfigurationError(
                "steepest.weight() before the first batch: call it in the loop over the loader"
            )
        before, self._batch = self._batch, checked_weight(weight)
        self.own = self._batch
        self.weight += self._batch - before
        loop.reports.count(self._batch - before)

    def _weight_of(self, cursor: Cursor) -> float:
        """Return the weight of the present batch in a step."""
        if self.own is not None:
            return self.own
        return 1.0 if cursor.samples is None else float(cursor.samples)

    @property
    def present(self) -> float:
        """The weight of the present batch's gradient among those of all workers."""
        if (cursor := self._loop.prepared.cursor) is None:
            return self._batch
        return 1.0 if self.sum.by_pass else self._weight_of(cursor)

    @property
    def averaged(self) -> int:
        """The number of samples over which a loss has to be the mean, or the sum; 0 if it may be something else."""
        loop = self._loop
        if not loop.steps.averages or not loop.has_entered or self.own is not None:
            return 0
        if (cursor := loop.prepared.cursor) is not None:
            return cursor.samples or 0
        taken = loop.batches.taken
        return taken.samples if taken is not None and self.weight == self.samples else 0
