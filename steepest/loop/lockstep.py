"""The place in the data of loops whose steps are not one for each batch: each loop counts them itself, all alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from steepest.core.data.protocol import Indices, Source
from steepest.core.data.sampler import Remaining, SamplePlan
from steepest.data.drawn import Drawn
from steepest.errors import ConfigurationError

#: Batches of one sum of gradients; a loop that takes more without a step evaluates by them.
MOST_AGAIN = 1024


class Steps:
    """Training data of which each share is one step of a loop: the loop has its samples from elsewhere.

    Args:
        contents: the data set that the loop reads; None without one.
    """

    size: int | None = None
    divides = True  # see `steepest.core.engine.job.Description`
    model_seeds = True  # see `steepest.core.data.protocol.Source`

    def __init__(self, contents: Any = None) -> None:
        self.contents = contents

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[None]:
        """Yield None without end."""
        while True:
            yield None


class Lockstep:
    """Where a loop is that takes several steps for a batch, or has no loader: as many steps on every worker.

    Args:
        source: of the loader's data; None without a loader.
        batch_size: of the loader.
        seed: of the order of samples.
        whole: samples of a batch of all workers; None for as many as theirs have.

    Attributes:
        skip: steps that are committed already of the batch, or epoch, at which the loop was entered.
        inside: whether the loop is at a batch, or without a loader in an epoch.
        taken: steps committed since that was begun.
        back: batches directly before, to whose gradients those of the present one are added for a later step.
        before: steps committed since the first of these was begun, until the present one was; of other optimizers.
        is_sure: whether it is known that they are added, and not dropped.
        samples: of the present batch, on this worker; None without a loader.
        whole: of the present batch, on all workers.
    """

    goes_back = True  # whether batches before the present one can be taken again; a stream has not kept them

    def __init__(
        self, source: Source | None, batch_size: int, seed: int, whole: int | None = None
    ) -> None:
        self.skip = self.taken = self.back = self.before = 0
        self.inside = self.is_sure = False
        self.samples: int | None = None
        self.whole = 0
        self._source = source
        self._batch_size, self._seed, self._all = batch_size, seed, whole
        self._epoch = self._step = 0  # steps in the data, of all epochs
        self._plan: SamplePlan | None = None
        self._size = 0  # workers in the plan
        self._begun = False  # whether any batch, or round, was
        self._summed_by = 0  # workers in the last one
        if source is not None and source.size is None:
            raise ConfigurationError(
                "steepest.prepare() was given a loader over data without a length: give one over a map-style dataset"
            )

    def whole_batch(self, size: int) -> int:
        """Return the number of samples of a batch of so many workers together."""
        return self._all or self._batch_size * size

    @property
    def has_loader(self) -> bool:
        """Whether batches come of a loader."""
        return self._source is not None

    @property
    def number(self) -> int:
        """The number of the present batch, or round."""
        return self._epoch if self._source is None else self._step

    def batch_before(self, rank: int, size: int) -> Any:
        """Return a worker's batch before the next one; again, it takes no place."""
        self._step -= 1
        self.has_more(size)
        return self.next_batch(rank, size)

    def adds_up(self, size: int, *, holds: bool) -> bool:
        """Note that the next batch, or round, is about to begin; return whether its gradients are added to others.

        Args:
            size: of the job, in workers.
            holds: whether the loop has gradients for a later step.
        """
        goes_on = holds and self._begun and size == self._summed_by and self.back < MOST_AGAIN
        if goes_on:
            self.back, self.before = self.back + 1, self.before + self.taken
        else:
            self.forget_before()
        self._summed_by = size
        return goes_on

    def has_other_size(self, size: int) -> bool:
        """Return whether the last batch, or round, was one of another number of workers."""
        return self._begun and size != self._summed_by

    def forget_before(self) -> None:
        """Note that no gradients of batches before are part of a later step."""
        self.back = self.before = 0

    def state(self) -> dict[str, Any]:
        """Return the place, as plain values."""
        plan = self._plan
        begun = None if plan is None else [plan.start_step, plan.start_epoch, plan.start_offset]
        left = [] if plan is None else [list(part) for part in plan.left]
        return {
            "step": self._step,
            "epoch": self._epoch,
            "inside": self.inside,
            "taken": self.taken,
            "back": self.back,
            "stepped": self.before,
            "is_sure": self.is_sure,
            "summed_by": self._summed_by,
            "begun": begun,
            "left": left,
            "size": self._size,
        }

    def load(self, state: Mapping[str, Any], size: int) -> bool:
        """Go to a place: to the beginning of the batch, or epoch, in which another loop is.

        If the gradients of that are added to those of batches before, to the first of them. All workers do that where
        their number has changed since, and what they have is dealt out anew; but not if another optimizer has stepped
        since then, with samples that would be other ones.

        Return whether the sum will be whole, as far as there is one.
        """
        self._step, self._epoch = state["step"], state["epoch"]
        is_alike = state.get("summed_by") == size or self._all is not None or self._source is None
        is_whole = is_alike or not (state.get("back") and state.get("stepped"))
        # between two batches of a sum: with another number of workers those who are there go on from there, and so does
        # who joins them; the batches before are dealt out in a way that is over
        if state["inside"] or (state.get("amid_sum") and state["summed_by"] == size):
            back = state.get("back", 0) if is_whole else 0
            self.skip = state["taken"] + (state.get("stepped", 0) if is_whole else 0)
            if self._source is None:
                self._epoch -= back
            else:
                self._step -= 1 + back
        if state["begun"] is not None:
            self._size = state["size"]
            step, epoch, offset = state["begun"]
            left = tuple((e, b, t) for e, b, t in state["left"])
            self._plan = self._planned(step, Remaining(epoch, offset, left))
        return is_whole

    @property
    def first_number(self) -> int:
        """The number of the first batch, or round, of whose gradients the present sum is made."""
        return self.number - self.back

    def _planned(self, step: int, rest: Remaining) -> SamplePlan:
        assert self._source is not None
        assert self._source.size is not None
        whole = self.whole_batch(self._size)
        about = self._source.size, whole, self._seed, step, rest.epoch, rest.offset
        blocks = getattr(self._source, "blocks", None)
        drop_last = bool(getattr(self._source, "drop_last", False))
        return SamplePlan(*about, blocks=blocks, left=rest.left, drop_last=drop_last)

    def _plan_for(self, size: int) -> SamplePlan:
        """Return the plan of the samples of so many workers."""
        if self._plan is None or size != self._size:
            rest = Remaining()
            if self._plan is not None:
                rest = self._plan.remaining(self._step * self._size, (), self._size, self._size)
            self._size = size
            self._plan = self._planned(self._step, rest)
        return self._plan

    def first_epoch(self, size: int) -> int:
        """Return the epoch in which the place is."""
        if self._source is None:
            return self._epoch
        return self._plan_for(size).position(self._step).epoch

    def batches_before(self, size: int) -> int:
        """Return how many batches of its epoch there are before the next one."""
        plan = self._plan_for(size)
        return plan.position(self._step).ranges[0][0] // plan.global_batch

    def begin(self, epoch: int, size: int) -> None:
        """Begin an epoch; what is left of earlier ones is left out."""
        self._epoch = epoch
        if self._source is None:
            self.inside = self._begun = True
            self.taken = 0
        else:
            self._step = max(self._step, self._plan_for(size).end_of(epoch - 1) if epoch else 0)

    def end(self, epochs: int) -> None:
        """Note that all epochs are over: a loop that begins here has nothing to do again."""
        self._epoch, self.inside = epochs, False

    def has_more(self, size: int) -> bool:
        """Return whether the epoch has a further batch."""
        self.inside = False
        return self._plan_for(size).position(self._step).epoch == self._epoch

    def next_batch(self, rank: int, size: int) -> Any:
        """Return a worker's next batch.

        One that has no samples in it gets the first of the batch, which is to weigh nothing.
        """
        plan = self._plan_for(size)
        position = plan.position(self._step)
        share = plan.share(self._step, rank, size)
        self.samples, self.whole = len(share), sum(end - begin for begin, end in position.ranges)
        if not self.samples:
            share = plan.samples_at(position.epoch, position.begin, position.begin + 1)
        self._step += 1
        self.inside = self._begun = True
        self.taken = 0
        assert self._source is not None
        batch = next(iter(self._source.open([share], prefetch=False)))
        if isinstance(batch, Drawn):
            self.samples = batch.samples if self.samples else 0
        return batch
