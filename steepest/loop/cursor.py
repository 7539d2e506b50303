"""The place of a loop in batches that all workers go through, and the worker's own part of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from steepest.core.data.protocol import Indices, Source
from steepest.core.data.sampler import Remaining, SamplePlan, even_share
from steepest.data.drawn import Drawn, DrawnSource
from steepest.errors import ConfigurationError

#: Batches of one sum of gradients; a loop that takes more without a step evaluates by them.
MOST_AGAIN = 1024


def _nothing() -> None:
    """Do nothing."""


class LoopPlace(NamedTuple):
    """Where a loop is in batches that all workers go through: the same place on all of them.

    Attributes:
        epoch: in which it is, from 0.
        passes: passes over the loader that it has begun or gone on with in that epoch; 0 before the first.
        passed: passes that it has begun in all epochs.
        batch: batches, or rounds of a loop without a loader, that it has begun in all epochs.
        step: steps that it has taken in the last of these.
        inside: whether it is at that batch, or behind the last one of a pass; otherwise it waits for the next one.
    """

    epoch: int = 0
    passes: int = 0
    passed: int = 0
    batch: int = 0
    step: int = 0
    inside: bool = False


class Steps:
    """Training data of which each share is one step of a loop: the loop has its samples from elsewhere.

    Args:
        contents: the data set that the loop reads; None without one.
        load_ahead: called where the engine would load the batch of the next step.
    """

    size: int | None = None
    divides = True  # see `steepest.core.engine.job.Description`
    model_seeds = True  # see `steepest.core.data.protocol.Source`

    def __init__(self, contents: Any = None, load_ahead: Callable[[], None] = _nothing) -> None:
        self.contents = contents
        self._load_ahead = load_ahead

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[None]:
        """Yield None without end."""
        while True:
            self._load_ahead()
            yield None


@dataclass
class Pass:
    """One pass of a loop over its loader.

    Attributes:
        number: in all epochs, from 1; 0 before it is begun.
        begun: whether it is.
        is_over: whether it has no further batch for the loop.
    """

    number: int = 0
    begun: bool = False
    is_over: bool = False


class Cursor:
    """Where a loop is that sees every batch of all workers, and takes as many steps in it on each of them.

    A worker without samples in a batch sees the first sample of it, which is to weigh nothing. Each pass over the
    loader goes through all samples once, in an order of its own.

    Args:
        source: of the loader's data; None without a loader, where batches are rounds, and each is an epoch.
        batch_size: of the loader.
        seed: of the order of samples.
        whole: samples of a batch of all workers; None for as many as theirs have.

    Attributes:
        place: of the loop.
        skip: the number of the loop's next steps that were committed before it was entered.
        before: steps committed from the first batch of the present sum of gradients up to the present batch; of
            other optimizers than that whose sum it is.
        is_sure: whether it is known that gradients of earlier batches are added to, and not dropped.
        samples: of the present batch, on this worker; None without a loader.
        whole: of the present batch, on all workers.
        samples_of_all: the number of samples in `whole`; 0 if unknown, as with a stream of batches.
        is_at_last: whether the present batch is the last one of its pass.
    """

    deals_evenly = True  # whether as many samples are dealt to the workers in the same way

    def __init__(
        self, source: Source | None, batch_size: int, seed: int, whole: int | None = None
    ) -> None:
        self.place = LoopPlace()
        self._opened = self.place  # of the first batch of the present sum of gradients
        self.skip = self.before = 0
        self.is_sure = False
        self.is_at_last = False
        self.samples: int | None = None
        self.whole = self.samples_of_all = 0
        self._source = source
        self.deals_evenly = not getattr(source, "of_batches", False)
        self._batch_size, self._seed, self._all = batch_size, seed, whole
        self._plan: SamplePlan | None = None
        self._size = 0  # workers in the plan
        self._summed_by = 0  # workers in the last batch, or round; 0 before the first
        self._to_come = (
            0  # passes of the epoch up to that in which others are, where it was entered
        )
        self._reader = _Reader(source)
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
    def back(self) -> int:
        """The number of batches before the present one in the present sum of gradients."""
        return self.place.batch - self._opened.batch

    @property
    def first_number(self) -> int:
        """The number of the first batch, or round, in the present sum of gradients."""
        return self._opened.batch

    @property
    def first_epoch(self) -> int:
        """The epoch of `first_number`."""
        return self._opened.epoch

    # -- sums of gradients ---------------------------------------------------------------------

    def adds_up(self, size: int, *, holds: bool) -> bool:
        """Note that a batch, or round, begins; return whether its gradients are added to those of earlier batches.

        Args:
            size: of the job, in workers.
            holds: whether the loop has gradients for a later step.
        """
        if self._source is not None:
            self._plan_for(size)  # before the place moves
        goes_on = holds and size == self._summed_by
        goes_on = goes_on and self.back < MOST_AGAIN
        if goes_on:
            self.before += self.place.step
        epoch, passes, passed, batch, _, _ = self.place
        self.place = LoopPlace(epoch, passes, passed, batch + 1, 0, True)
        if not goes_on:
            self.forget_before()
        self._summed_by = size
        return goes_on

    def has_other_size(self, size: int) -> bool:
        """Return whether the last batch, or round, was one of another number of workers."""
        return self._summed_by not in (0, size)

    def forget_before(self) -> None:
        """Note that no gradients of earlier batches are part of a later step."""
        self._opened, self.before = self.place, 0

    def take_step(self) -> None:
        """Note that a step of the present batch is committed, or passed over because it was."""
        self.skip = max(self.skip - 1, 0)
        epoch, passes, passed, batch, step, inside = self.place
        self.place = LoopPlace(epoch, passes, passed, batch, step + 1, inside)

    # -- entering ------------------------------------------------------------------------------

    def state(self, *, amid_sum: bool) -> dict[str, Any]:
        """Return the place, and the state of the data, as plain values.

        Args:
            amid_sum: whether the loop waits for a batch whose gradients are added to others, and has stepped
                since.
        """
        plan = self._plan
        begun = None if plan is None else [plan.start_step, plan.start_epoch, plan.start_offset]
        left = [] if plan is None else [list(part) for part in plan.left]
        return {
            "place": list(self.place),
            "opened": list(self._opened),
            "before": self.before,
            "is_sure": self.is_sure,
            "summed_by": self._summed_by,
            "amid_sum": amid_sum,
            "begun": begun,
            "left": left,
            "size": self._size,
        }

    def load(self, state: Mapping[str, Any], size: int) -> bool:
        """Go to where another loop is: to the beginning of its batch, or to the next one if it waits for that.

        If the gradients of its batch are added to those of batches before, to the first of them. All workers do
        that where their number has changed since, and what they have is dealt out anew; but not if another
        optimizer has stepped since then, with samples that would be other ones.

        Return whether the sum will be whole, as far as there is one.
        """
        place, opened = LoopPlace(*state["place"]), LoopPlace(*state["opened"])
        same = state["summed_by"] == size
        is_whole = same or self._all is not None or self._source is None
        is_whole = is_whole or not (place.batch > opened.batch and state["before"])
        self.place = self._opened = place
        # between two batches of a sum: with another number of workers those who are there go on from there, and so does
        # who joins them; the batches before are dealt out in a way that is over
        if place.inside or (state["amid_sum"] and same):
            self.skip = place.step + (state["before"] if is_whole else 0)
            begins = opened if is_whole else place
            self.place = self._opened = self._before_batch(begins)
        elif state["amid_sum"]:
            is_whole = False
        self._to_come = self.place.passes
        if state["begun"] is not None:
            self._size = state["size"]
            step, epoch, offset = state["begun"]
            left = tuple((e, b, t) for e, b, t in state["left"])
            self._plan = self._planned(step, Remaining(epoch, offset, left))
            self._reader.end_pass()
        return is_whole

    def _before_batch(self, place: LoopPlace) -> LoopPlace:
        """Return the place where a loop waits for the batch at which another one is."""
        return place._replace(batch=place.batch - 1, step=0, inside=False)

    @property
    def passes_by(self) -> bool:
        """Whether the loop is in, or behind, a pass that is over, and not yet in that in which others are."""
        return 0 < self._to_come < self.place.passes

    @property
    def is_amid_epoch(self) -> bool:
        """Whether the loop has yet to come, in the epoch that it has entered, to the pass in which others are."""
        return self._to_come > 0

    # -- data ----------------------------------------------------------------------------------

    def _planned(self, step: int, rest: Remaining) -> SamplePlan:
        assert self._source is not None
        assert self._source.size is not None
        whole = self.whole_batch(self._size)
        order = self._source.size, whole, self._seed, step, rest.epoch, rest.offset
        blocks = getattr(self._source, "blocks", None)
        drop_last = bool(getattr(self._source, "drop_last", False))
        return SamplePlan(*order, blocks=blocks, left=rest.left, drop_last=drop_last)

    def _plan_for(self, size: int) -> SamplePlan:
        """Return the plan of the samples of so many workers: its steps are batches, its epochs passes."""
        if self._plan is None or size != self._size:
            rest, at = Remaining(), self.place.batch
            if self._plan is not None:
                rest = self._plan.remaining(at * self._size, (), self._size, self._size)
            self._size = size
            self._reader.end_pass()
            self._plan = self._planned(at, rest)
        return self._plan

    def batches_before(self, size: int) -> int:
        """Return how many batches of its pass there are before the next one."""
        plan = self._plan_for(size)
        return plan.position(self.place.batch).ranges[0][0] // plan.global_batch

    def steps_left(self, epochs: int, size: int) -> int | None:
        """Return how many steps are left, of `epochs` epochs in all, if each batch has one; None if unknown."""
        place = self.place
        if self._source is None:
            return None if self.has_loader else max(epochs - place.batch, 0)
        if place.inside:
            return None  # what is left is perhaps dealt out anew from the beginning of the batch
        last = place.passed - (place.passes > 0) + epochs - 1 - place.epoch
        return max(self._plan_for(size).end_of(last) - place.batch, 0)

    def begin(self, epoch: int) -> None:
        """Begin an epoch."""
        if epoch != self.place.epoch:
            self.place = self.place._replace(epoch=epoch, passes=0, inside=False)

    def begin_pass(self, size: int) -> bool:
        """Begin a pass over the loader; what is left of earlier ones is left out.

        Return whether the loop has any of it to see: where it was entered, passes that are over are passed by.
        """
        if self._to_come:
            self._to_come -= 1
            return not self._to_come
        place = self.place
        batch = place.batch
        if self._source is not None and place.passed:
            batch = max(batch, self._plan_for(size).end_of(place.passed - 1))
        self.place = place._replace(
            passes=place.passes + 1, passed=place.passed + 1, batch=batch, inside=False
        )
        self._reader.end_pass()
        return True

    def go_on_with_pass(self) -> None:
        """Go on, in an epoch without a pass of its own yet, with one that was begun in an epoch before."""
        self.place = self.place._replace(passes=1)

    def end(self, epochs: int) -> None:
        """Note that all epochs are over: a loop that begins here has nothing to do."""
        self.place = self.place._replace(epoch=epochs, passes=0, inside=False)

    def has_more(self, size: int) -> bool:
        """Return whether the pass has a further batch, for which the loop then waits."""
        if not self._has_more(size):
            return False
        epoch, passes, passed, batch, step, _ = self.place
        self.place = LoopPlace(epoch, passes, passed, batch, step, False)
        return True

    def _has_more(self, size: int) -> bool:
        return self._plan_for(size).position(self.place.batch).epoch == self.place.passed - 1

    def next_batch(self, rank: int, size: int) -> Any:
        """Return a worker's batch of the number that the place has come to, see `adds_up`."""
        plan, step = self._plan_for(size), self.place.batch - 1
        self.whole = plan.position(step).size
        begin, end = even_share(self.whole, rank, size)
        self.samples = end - begin
        batch = self._reader.read(plan, _BatchReading(step, rank, size))
        self.samples_of_all = self.whole
        if isinstance(batch, Drawn):
            self.samples = batch.samples if self.samples else 0
            if not self.deals_evenly:
                self.samples_of_all = 0
            if isinstance(self._source, DrawnSource):
                at = plan.position(step)
                self.samples_of_all = sum(
                    self._source.samples_in(plan.samples_at(at.epoch, *part)) for part in at.ranges
                )
        self.is_at_last = not self._has_more(size)
        return batch

    def batch_before(self, rank: int, size: int) -> Any:
        """Return a batch of the worker's in a pass that is over: one that it sees does not count."""
        plan = self._plan_for(size)
        step = max(self.place.batch, plan.start_step)
        return self._reader.read(plan, _BatchReading(step, rank, size))

    def load_ahead(self, rank: int, size: int, seed: Callable[[int], None]) -> None:
        """Load the next batch of the pass before the loop asks for it; an error is raised when it does.

        Args:
            rank, size: of the worker, and the job.
            seed: seeds all generators for loading the batch of a number.
        """
        if not self.is_at_last:
            self._reader.load_ahead(_BatchReading(self.place.batch, rank, size), seed)


class _BatchReading(NamedTuple):
    """Which batch is read: the number of its step in the plan, and the worker's and the job's numbers."""

    step: int
    rank: int
    size: int


class _Ahead(NamedTuple):
    """A batch that was loaded before its turn, or what loading it has raised."""

    reading: _BatchReading
    batch: Any
    error: BaseException | None


class _Reader:
    """Reads a worker's batches, each pass by an iterator of its own.

    Args:
        source: of the data; None without a loader, where nothing is read.
    """

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._batches: Iterator[Any] = iter(())
        self._next: _BatchReading | None = (
            None  # what the iterator reads next; None where that is exhausted
        )
        self._ahead: _Ahead | None = None

    def end_pass(self) -> None:
        """Read what follows by a new iterator."""
        self._next = None

    def read(self, plan: SamplePlan, reading: _BatchReading) -> Any:
        """Return a batch, read by the iterator that has read the one before, if there is one."""
        assert self._source is not None
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.reading == reading and self._next is not None:
            if ahead.error is not None:
                self._next = None  # an iterator that raises is exhausted
                raise ahead.error
            return ahead.batch
        if ahead is not None or self._next != reading:
            self._batches = iter(self._source.open(_shares(plan, reading)))
        self._next = reading._replace(step=reading.step + 1)
        return next(self._batches)

    def load_ahead(self, reading: _BatchReading, seed: Callable[[int], None]) -> None:
        """Load a batch if it is the iterator's next one; what raises does so in `read`.

        Args:
            reading: which batch.
            seed: seeds all generators for loading the batch of a number.
        """
        if self._ahead is not None or self._next != reading:
            return
        seed(reading.step + 1)
        batch, error = None, None
        try:
            batch = next(self._batches)
        except BaseException as raised:  # noqa: BLE001 - raised where the loop takes the batch
            error = raised
        self._ahead = _Ahead(reading, batch, error)
        self._next = reading._replace(step=reading.step + 1)


def _shares(plan: SamplePlan, reading: _BatchReading) -> Iterator[Indices]:
    """Yield a worker's shares from a step to the end of its epoch; the first sample where it has none."""
    step, rank, size = reading
    epoch = (at := plan.position(step)).epoch
    while at.epoch == epoch:
        share = plan.share(step, rank, size)
        yield share if len(share) else plan.samples_at(epoch, at.begin, at.begin + 1)
        step += 1
        at = plan.position(step)
