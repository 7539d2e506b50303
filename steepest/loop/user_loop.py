"""The function's side of a user's own loop: `prepare`, `epochs`, loaders, `step` and `report` in a worker."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from steepest.core.data.sampler import step_seed
from steepest.core.engine.generators import seed_everything
from steepest.core.models.protocol import Where, checked_metrics
from steepest.core.models.scalars import as_number
from steepest.errors import ConfigurationError
from steepest.loop import counting
from steepest.loop.cursor import Cursor, Pass
from steepest.loop.entry import LoopEntry
from steepest.loop.gatherer import Gatherer
from steepest.loop.gathering import Region
from steepest.loop.job_view import JobView
from steepest.loop.kept import Kept
from steepest.loop.loop_reports import LoopReports
from steepest.loop.loop_states import LoopStates, Rounds
from steepest.loop.loop_steps import LoopSteps
from steepest.loop.losses import Losses, line_of_user, watched
from steepest.loop.mistakes import explained
from steepest.loop.notices import Notices
from steepest.loop.prepared import NOTHING, Ask, Batch, Prepared, TakenBatches
from steepest.loop.script_settings import ScriptSettings, check_lengths, tell_of_schedules
from steepest.loop.step_weights import StepWeights
from steepest.loop.torch_clipping import watched as clipping_watched
from steepest.loop.torch_scaling import watched as scaling_watched
from steepest.loop.unprepared import watch as watch_unprepared
from steepest.loop.unprepared import watched as unprepared_watched
from steepest.loop.unseen import noted

MOST_BATCHES = 1 << 24  # of a worker's: more than it has in a job

_local = threading.local()
_running: list[UserLoop] = []  # in this process


class UserLoop:
    """One worker's loop of a user's own, as the user's function calls it.

    Its methods are called on the function's thread, but for those of the first part, which the worker's side
    (`steepest.loop.session.Session`) calls while the function waits.

    Args:
        function: the user's.
        job: what is known of the job.

    Attributes:
        function, job: as given.
        prepared: what the function has given to `prepare`.
        gatherer: what it gathers.
        steps: those of its optimizers.
        reports: its calls of `report`.
        states: what another worker goes on with.
        batches: that it takes.
        weights: what those of its next step weigh.
        entry: how it enters.
        notices: what it hears of its node's end.
    """

    def __init__(self, function: Callable[[], Any], job: JobView) -> None:
        self.function, self.job = function, job
        self.prepared = NOTHING
        self.notices = Notices()
        self.gatherer = Gatherer(self)
        self.steps = LoopSteps(self)
        self.reports = LoopReports()
        self._reset()

    def _reset(self) -> None:
        """Begin with a function that has not run yet."""
        self.gatherer.begin_anew()
        self.steps.begin_anew()
        self.reports.begin_anew()
        self.batches = TakenBatches()
        self.weights = StepWeights(self)
        self.entry = LoopEntry(self)
        self.states = LoopStates(self, self.job)

    # -- for the worker's side -----------------------------------------------------------------

    def begin_anew(self, state: dict[str, Any], rounds: Rounds | None = None) -> None:
        """Begin with a function that has not run yet, which goes on from a state, amid some rounds."""
        self._reset()
        self.states.rounds = rounds or self.states.rounds
        self.entry.arriving = state
        self.reports.keep_before(state.get("reported", state["reports"]))

    @property
    def leaves_early(self) -> bool:
        """Whether gradients may leave during the backward pass."""
        prepared = self.prepared
        if prepared.sums:
            return False
        return not prepared.closures and len(prepared.optimizers) == 1

    # -- for the user's function ---------------------------------------------------------------

    @property
    def sees_all_batches(self) -> bool:
        """Whether all workers go through the same batches."""
        return self.prepared.cursor is not None

    @property
    def steps_left(self) -> int | None:
        """The number of steps left if each batch has one; None if unknown, as before the loop is entered."""
        if self.prepared.cursor is None or self.batches.wanted is None:
            return None
        return self.prepared.cursor.steps_left(self.batches.wanted, self.job.size)

    @property
    def is_over(self) -> bool:
        """Whether the epoch in which the loop is has no further batch."""
        return self.job.next_epoch > self.batches.epoch

    @property
    def has_seen_all(self) -> bool:
        """Whether the epoch is over for certain; a step without samples here may still be dealt out anew."""
        return self.is_over and (
            self.job.passed <= self.job.committed or not self.job.kind.together
        )

    def run(self) -> Any:
        """Call the function, on its own thread; return what it returns.

        `sys.exit()`, or with 0, is a return, as of a script.
        """
        _local.loop = self
        _running.append(self)
        try:
            with (
                watched(_losses_here),
                clipping_watched(current),
                scaling_watched(_steps_here),
                noted(self.steps.unseen),
                unprepared_watched(current),
            ):
                return self.function()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            return None
        except Exception as error:
            better = explained(error, self.prepared.given, self.entry.passed_by)
            if better is not None:
                raise better from error
            raise
        finally:
            counting.end(self)
            _local.loop = None
            _running.remove(self)

    def prepare(self, prepared: Prepared) -> None:
        """Take what the user has prepared, and wait for the job."""
        if self.prepared is not NOTHING and self.entry.arriving is not None:
            # the function has begun anew
            self.prepared.model.adopt(prepared.model)
            prepared = replace(prepared, model=self.prepared.model)
        self.prepared = prepared
        self.steps.take_over(prepared)
        if prepared.closures:
            prepared.model.expect_trials()
            self.gatherer.among_batches = True  # all workers take part in each evaluation
        self.states.settings = ScriptSettings(prepared)
        self.job.turns.ask(Ask.BEGIN)

    def epochs(self, count: int, first: int = 0) -> Iterator[int]:
        """Yield the numbers of the epochs that are still to come, of `count`, where the user counts from `first`."""
        if self.prepared is NOTHING:
            raise ConfigurationError(
                "steepest.epochs() before steepest.prepare(): call that before"
            )
        if self.batches.wanted is not None:
            raise ConfigurationError(
                "steepest.epochs() was called twice: the epochs of a job are counted once; make one loop of both "
                "phases, and change what differs where the second one begins"
            )
        self.batches.wanted = count
        watch_unprepared(self)
        if self.entry.arriving is not None and (
            self.prepared.cursor is None or self.prepared.cursor.has_loader
        ):
            counting.begin(self)
        assert self.states.settings is not None
        self.states.settings.state["epochs"] = count
        check_lengths(self.prepared, count, self.job.size)
        if not self.job.rank or self.entry.arriving is not None:
            tell_of_schedules(self.prepared, self.states.kept)
        pending = self.batches.pending
        self.batches.epoch = self.job.next_epoch if pending is None else pending.where.epoch or 0
        self.batches.left = self.batches.epoch - 1
        if (cursor := self.prepared.cursor) is not None:
            yield from self._epochs_together(cursor, count, first)
            return
        arriving = self.entry.arriving
        from_the_start = arriving is None or not arriving["batches"]
        if arriving is not None and arriving["at"]:
            self.entry.begin_to_stand_in(arriving)
        elif arriving is not None:
            self.entry.take(arriving)
        arrived = self.job.passed > 0 or pending is None
        before = (self.job.passed if arrived or pending is None else pending.where.step) - 1
        self.begin_ticks(before)
        while self.batches.epoch < count:
            self.seed_for(self.batches.epoch, region=Region.TOP)
            self.prepared.enter(first + self.batches.epoch)
            yield first + self.batches.epoch
            if from_the_start:
                self.steps.check_any_taken(self.batches.epoch)
            self.batches.epoch += 1

    def _epochs_together(self, cursor: Cursor, count: int, first: int) -> Iterator[int]:
        """Yield the numbers of epochs, where all workers see all batches."""
        arriving = self.entry.arriving
        from_the_start = arriving is None or not arriving["batches"]
        if arriving is not None:
            self.entry.enter_epoch(cursor, arriving, first)
        self.batches.epoch = cursor.place.epoch
        while self.batches.epoch < count:
            cursor.begin(self.batches.epoch)
            if cursor.has_loader:
                self.gatherer.enter(Region.TOP, cursor.place.batch)
                self.states.open_epoch()
            else:
                self._begin_batch(cursor)
                self.gatherer.enter(Region.BEFORE, cursor.place.batch)
            self.states.let_objects_go()
            self.batches.count += 1
            self.weights.own = None
            if not cursor.has_loader and (factor := self.weights.begin_batch(cursor)) is not None:
                self._rescale(factor)
            self.seed_for(self.batches.epoch, region=Region.TOP)
            self.prepared.enter(first + self.batches.epoch)
            yield first + self.batches.epoch
            # rounds of a loop without a loader may add up gradients for a step in a later one
            if from_the_start and (cursor.has_loader or self.batches.epoch == count - 1):
                self.steps.check_any_taken(self.batches.epoch)
            self.batches.epoch += 1
        cursor.end(count)

    def begin_ticks(self, step: int) -> None:
        """Have schedulers count after a step of the job."""
        kind = self.job.kind
        self.prepared.tell_schedulers()
        self.steps.schedules.begin((step + 1) * (kind.local or 1) - 1, together=kind.together)

    def on_device(self, batch: Any) -> Any:
        """Return a batch on the device of the model."""
        return batch if self.prepared is NOTHING else self.prepared.model.on_device(batch)

    @property
    def counts(self) -> bool:
        """Whether what the loop gives counts: it has come to where the others are."""
        return self.entry.arriving is None and not self.entry.stands_in

    @property
    def steps_taken(self) -> int:
        """One more than the number of steps of the job that the loop has taken; 0 where that is not known."""
        if not self.counts or self.job.kind.local or not self.job.kind.together:
            return 0
        done = (
            0
            if self.batches.taken is None
            else self.batches.taken.where.step + self.batches.stepped
        )
        return max(done, self.job.passed) + 1  # in the last ones it may have had no samples

    @property
    def passes_by(self) -> bool:
        """Whether the loop is in a pass over its loader that the others have left behind them."""
        return self.prepared.cursor is not None and self.prepared.cursor.passes_by

    @property
    def has_samples(self) -> bool:
        """Whether the worker has samples in the present batch."""
        if self.prepared.cursor is not None:
            return self.prepared.cursor.samples != 0
        return self.batches.taken is None or self.batches.taken.samples > 0

    @property
    def has_entered(self) -> bool:
        """Whether the loop has come to its epochs."""
        return self.batches.wanted is not None

    def register(self, objects: Mapping[str, Any]) -> Kept:
        """Take what is kept with the job's state."""
        if self.states.kept is not None:
            raise ConfigurationError(
                "steepest.register() was called twice: give it everything in one call, before steepest.epochs()"
            )
        if self.batches.wanted is not None:
            raise ConfigurationError(
                "steepest.register() in the loop: call it before steepest.epochs(), where a worker that joins later is "
                "given what was kept"
            )
        tables = () if self.prepared is NOTHING else self.prepared.model.tables
        if tables and any(isinstance(each, torch.amp.GradScaler) for each in objects.values()):
            raise ConfigurationError(
                f"a GradScaler with embedding tables ({tables[0].name!r}), whose gradients it does not divide: "
                "train in bfloat16, or without autocast"
            )
        self.steps.schedules.add(objects.values())
        self.states.kept = Kept(objects)
        return self.states.kept

    def next_batch(self, own: Pass) -> Any:
        """Return the next batch of a pass over the loader; StopIteration at its end."""
        if self.batches.wanted is None:
            raise ConfigurationError(
                "the loader was iterated over outside of steepest.epochs(): write `for epoch in steepest.epochs(n)` "
                "around the loop, so that a worker that joins later knows where the job is"
            )
        if self.prepared.cursor is not None:
            return self._next_of_pass(self.prepared.cursor, own)
        if (again := self.entry.batch_again()) is not None:
            return again[0]
        pending = self._next_pending()
        self.entry.take_batch(pending.where.step)
        pending = self.prepared.model.loaded(pending)
        self.seed_for(pending.where.step, part=pending.where.part[0])
        taken = None if self.batches.taken is None else self.batches.taken.where
        new = taken is None or taken.step != pending.where.step
        if self.job.kind.local and not self.job.kind.together:
            new = self.states.rounds.opens()
        if new:
            self.states.begin_step()
        if new and self.job.kind.local:
            self.states.begin_round(pending.where.step)
        same = taken is not None and self._own_updates(taken) == self._own_updates(pending.where)
        is_counted = same and self.weights.whole > 0
        self.batches.pending, self.batches.taken = None, pending
        self.job.see(pending.where)
        self.gatherer.enter(Region.BEFORE, pending.where.step)
        self.gatherer.order = []
        self.batches.stepped = False
        self.batches.count += 1
        self.weights.begin_share(pending.samples, 0 if is_counted else pending.whole)
        return pending.data

    def _next_pending(self) -> Batch:
        """Return the batch that the engine gives next; StopIteration at the end of the present epoch."""
        while self.batches.pending is None:
            if self.has_seen_all:
                self._end_epoch()
            self.job.turns.ask(Ask.BATCH)
        epoch = self.batches.pending.where.epoch or 0
        if epoch > self.batches.epoch:
            self._end_epoch()
        # what a dead worker has left over comes late
        late = self.batches.pending.where.leased and self.batches.left == self.batches.epoch - 1
        if epoch < self.batches.epoch and not late:
            raise ConfigurationError(
                f"the loop over the loader was left in epoch {epoch} before its end, and begun anew: go through all "
                "batches of an epoch, or return"
            )
        missed = (
            self.batches.taken is not None
            and self.batches.pending.where.step > self.batches.taken.where.step + 1
        )
        if (
            missed and self.job.kind.together and not self.job.kind.local
        ):  # steps in which this worker has no samples
            self.steps.schedules.catch_up(self.batches.pending.where.step - 1)
        return self.batches.pending

    def _end_epoch(self) -> None:
        """Raise StopIteration: the epoch has no further batch."""
        number = max(self.at_step + 1, self.job.passed)
        if not self.job.kind.together:  # each has had another step last
            number = self.batches.epoch + 1
        self.batches.left = self.batches.epoch
        if (self.gatherer.region, self.gatherer.number) != (Region.END, number):
            self.gatherer.enter(Region.END, number)
            self.seed_for(number, 0, Region.END)
            self.states.hold_end()
        raise StopIteration

    def _next_of_pass(self, cursor: Cursor, own: Pass) -> Any:
        """Return the next batch of a pass over the loader, of all workers' batches."""
        if own.is_over:
            raise StopIteration
        if not own.begun:
            self._begin_pass(cursor, own)
            if own.is_over:
                return self.on_device(cursor.batch_before(self.job.rank, self.job.size))
        elif own.number != cursor.place.passed:
            raise ConfigurationError(
                "the loop goes on with a pass over the loader after it has begun another one: go through one at a time"
            )
        elif not cursor.place.passes:
            cursor.go_on_with_pass()
        if not cursor.has_more(self.job.size):
            if self.gatherer.region is not Region.END:
                self.gatherer.enter(Region.END, cursor.place.batch)
                self.seed_for(cursor.place.batch, 0, Region.END)
            own.is_over = True
            raise StopIteration
        while self.batches.pending is None and not cursor.skip:
            self.job.turns.ask(Ask.BATCH)
        self._begin_batch(cursor)
        self._seed_for_loading(cursor.place.batch)
        batch = cursor.next_batch(self.job.rank, self.job.size)
        self.seed_for(cursor.place.batch)
        if cursor.is_at_last:
            self.states.hold_objects()
        else:
            self.states.let_objects_go()
        self.gatherer.enter(Region.BEFORE, cursor.place.batch)
        self.gatherer.order = []
        self.batches.count += 1
        self.reports.count(cursor.samples or 0)
        if (factor := self.weights.begin_batch(cursor)) is not None:
            self._rescale(factor)
        return self.on_device(batch)

    def _end_step_of(self, cursor: Cursor, index: int) -> None:
        """Note that a step of an optimizer in the present batch is committed, or passed over since it is."""
        cursor.take_step()
        self.gatherer.begin_step(cursor.place.step)
        self.weights.begin_next_step()
        self._end_sum(cursor, index)

    def _begin_pass(self, cursor: Cursor, own: Pass) -> None:
        """Begin a pass over the loader; one that the others have left behind them is over behind one batch."""
        own.begun, enters = True, cursor.is_amid_epoch
        if not cursor.begin_pass(self.job.size):
            own.is_over = True
            return
        own.number = cursor.place.passed
        if enters:
            self.entry.come_to_place(cursor)
            self.entry.pass_by(cursor.batches_before(self.job.size))
            self.entry.amid_pass = own.number if self.entry.passed_by else 0
        else:
            counting.end(self)
            self.states.close_top()

    def _begin_batch(self, cursor: Cursor) -> None:
        """Begin with the next batch, or round; its gradients may be added to those of batches before."""
        if self.weights.losses.looks.is_looking:
            self.weights.losses.end_part()
        holds = self.steps.held.begin_batch()
        if not cursor.place.step:  # of a sum this worker may have had nothing to learn yet
            is_first = cursor.has_loader and not self.steps.stepping
            holds |= is_first or self.steps.held.adds_up or self._holds_gradients
        cursor.is_sure = self.steps.held.is_sure
        if cursor.is_sure and cursor.has_other_size(self.job.size):
            self.tell_of_other_size()
        if cursor.adds_up(self.job.size, holds=holds):
            self.states.begin_batch()
        else:
            self.states.begin_sum()

    def tell_of_other_size(self) -> None:
        """Warn that the loop holds gradients of batches of which workers that have left had a part."""
        warnings.warn(
            f"worker {self.job.rank}: there are {self.job.size} workers now, another number than when the first of the "
            "batches was taken whose gradients are added up for one step: it lacks what workers that have left had of "
            "these, and weighs its samples otherwise than one process would",
            stacklevel=2,
        )

    def _rescale(self, factor: float) -> None:
        """Multiply the gradients of earlier batches, whose share changes with the present batch."""
        self.prepared.model.rows.rescale(factor)
        with torch.no_grad():
            for parameter in (each for own in self.prepared.trained() for each in own):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _end_sum(self, cursor: Cursor, index: int) -> None:
        """Note that an optimizer has stepped, and perhaps used up the gradients of earlier batches."""
        if self.steps.held.step(index):
            warnings.warn(
                f"worker {self.job.rank}: a step was taken with gradients that were there before another step of the "
                "batch, or of batches before: this worker has entered between these steps, and has computed them with "
                "the weights of now; where they depend on what the other step has changed, compute and use gradients "
                "between the same steps to have what one process has",
                stacklevel=line_of_user(),
            )
        if cursor.back and not self.steps.held.awaited:
            cursor.forget_before()
            self.states.forget_before()

    @property
    def _holds_gradients(self) -> bool:
        """Whether there are gradients of backward passes since the last step."""
        return bool(self.weights.losses.found) and self.prepared.has_gradients

    def passes_over_step(self, index: int) -> bool:
        """Return whether an optimizer's step is not taken here: it does not count, or is committed already."""
        if self.entry.stands_in:
            return True
        cursor = self.prepared.cursor
        if cursor is None or not (cursor.skip or cursor.is_amid_epoch):
            return False
        if cursor.is_amid_epoch:  # of what the others have left behind them
            return True
        self._end_step_of(cursor, index)
        self.seed_for(cursor.place.batch, cursor.place.step)
        self.weights.losses.found = []
        if (
            not cursor.skip and self.entry.arriving is not None
        ):  # the next one is taken with the others
            self.steps.held.note_computed_anew()
            self.entry.take(self.entry.arriving)
            self.states.begin_step()
        return True

    def _tell_of_kept_batches(self, cursor: Cursor) -> None:
        """Warn once of steps behind a pass of which this worker has not had all batches."""
        if self.entry.amid_pass == cursor.place.passed and cursor.place.step:
            self.entry.amid_pass = 0
            warnings.warn(
                f"worker {self.job.rank}: the loop takes several steps behind a pass over the loader, which this "
                "worker has entered in the middle: what it keeps of a pass's batches (itertools.cycle, a list) has "
                "only those that were left; go over the loader itself again, or keep them by steepest.register()",
                stacklevel=line_of_user(),
            )

    def begin_step(self) -> None:
        """Note that a step is about to be taken, with the job's next batch where the loop counts steps itself."""
        if self.prepared.cursor is not None:
            if self.entry.amid_pass and self.gatherer.region is Region.END:
                self._tell_of_kept_batches(self.prepared.cursor)
            while self.batches.pending is None:
                self.job.turns.ask(Ask.BATCH)
            self.batches.taken, self.batches.pending = self.batches.pending, None
            self.weights.begin_step()
        if self.job.kind.local and self.batches.taken is not None:
            self.steps.schedules.catch_up(self._own_updates(self.batches.taken.where) - 1)
        self.batches.stepped = True

    def end_step(self, index: int) -> None:
        """Note that a step of an optimizer is committed, and the loop goes on behind it."""
        self.weights.end_step()
        if (cursor := self.prepared.cursor) is not None:
            self._end_step_of(cursor, index)
            self.weights.weight = self.weights.sum.weight  # of a further step of the batch
            self.states.begin_step()
            self.seed_for(cursor.place.batch, cursor.place.step)
            self.gatherer.gatherings.drop_before(cursor.first_number)
            if cursor.is_at_last or self.gatherer.among_batches:
                self.states.hold_objects()
            else:
                self.states.let_objects_go()
        else:
            self.gatherer.enter(Region.AFTER, self.at_step + 1)
            assert self.batches.taken is not None
            self.seed_for(self.batches.taken.where.step, 1, part=self.batches.taken.where.part[0])

    def load_ahead(self) -> None:
        """Load the batch after the one whose step is being committed."""
        if (
            self.prepared.cursor is not None
            and self.job.asked is Ask.COMMIT
            and self.entry.arriving is None
        ):
            _local.loads_for = self
            try:
                self.prepared.cursor.load_ahead(
                    self.job.rank, self.job.size, self._seed_for_loading
                )
            finally:
                _local.loads_for = None

    def _seed_for_loading(self, number: int) -> None:
        """Seed all generators for loading a batch, which may be done before its turn."""
        seed_everything(step_seed(self.job.kind.seed, number, self.job.rank))

    def seed_for(
        self, number: int, taken: int = 0, region: int = 0, part: int | None = None
    ) -> None:
        """Seed all generators for a place of the loop: a worker that joins draws the same there.

        Args:
            number: of the batch, or round, see `GatheringPlace`; of the epoch at its top.
            taken: steps that are taken of it.
            region: Region.END behind an epoch, Region.TOP before its first batch.
            part: of the batch that is the worker's; its rank, if that is left out.
        """
        salted = self.job.kind.seed + (
            (4 * taken + region + 1) << 32
        )  # loading a batch is seeded without
        seed_everything(step_seed(salted, number, self.job.rank if part is None else part))

    @property
    def at_step(self) -> int:
        """The number of the job's last step of which the loop has taken all batches; -1 before the first."""
        if self.batches.taken is None:
            return self.job.passed - 1
        return self.batches.taken.where.step - self.batches.taken.where.has_more

    @property
    def at_update(self) -> int:
        """The number of the last update of which the loop has taken all batches, see `steepest.loop.ticks.Counts`."""
        taken = self.batches.taken
        if (
            self.job.kind.local
            and taken is not None
            and (self.job.kind.paced or taken.where.has_more)
        ):
            return self._own_updates(taken.where, 1) - 1
        return (self.at_step + 1) * (self.job.kind.local or 1) - 1

    def _own_updates(self, where: Where, more: int = 0) -> int:
        """Return the number of updates, of steps or of a worker itself, before a batch plus a number of batches."""
        if not self.job.kind.local:
            return where.step
        part, parts = where.part
        if self.job.kind.paced:
            return where.step * self.job.kind.local + (part + more) * self.job.kind.local // parts
        each = parts // self.job.size  # batches of a round
        return where.step * self.job.kind.local + (part % each + more) * self.job.kind.local // each

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values of the user's, for the driver."""
        number = self.reports.called(self.place_number)
        if not self.counts:
            return
        numbers = checked_metrics({name: _number(value) for name, value in values.items()})
        self.reports.add(number, numbers)

    @property
    def place_number(self) -> int:
        """The number of the loop's place: the same on all workers, and greater than those of earlier places."""
        is_end = self.gatherer.region is Region.END
        if not self.job.kind.together:  # each worker has as many batches in an epoch as it manages
            return (
                (self.batches.epoch + 1) * MOST_BATCHES - 1
                if is_end
                else self.batches.epoch * MOST_BATCHES + self.batches.count
            )
        if self.prepared.cursor is not None:
            batches = self.prepared.cursor.place.batch
        elif is_end:
            batches = self.gatherer.number * (self.job.kind.local or 1)
        else:
            batches = (
                0 if self.batches.taken is None else self._own_updates(self.batches.taken.where)
            )
        return 2 * (self.batches.epoch + batches) + is_end

    @property
    def next_report(self) -> int:
        """The number of the next call of `report`, if it is made here."""
        return self.reports.next(self.place_number)


def current() -> UserLoop | None:
    """Return the loop in whose function the calling thread is; None outside of any."""
    loop: UserLoop | None = getattr(_local, "loop", None)
    return loop


def calling(name: str) -> UserLoop | None:
    """Return the loop in whose function steepest is called; None outside of any.

    Raises:
        ConfigurationError: a thread calls it that is not the function's, in a process in which one runs.
    """
    loop = current()
    if loop is None and _running and not getattr(_local, "is_outside", False):
        thread = threading.current_thread()
        if thread is not threading.main_thread():  # which may be the driver's
            raise ConfigurationError(
                f"steepest.{name}() in the thread {thread.name!r}, which is not that of the function that trains: call "
                "it in the function itself, and hand to threads, data sets and hooks what it returns"
            )
    return loop


def seen_from(name: str) -> UserLoop | None:
    """Return the loop for a call of `rank` or `size`: that of `calling`, or the one for which a batch is loaded."""
    loop: UserLoop | None = getattr(_local, "loads_for", None)
    return calling(name) if loop is None else loop


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Treat the calling thread as outside of any loop's function, in this context."""
    before = current(), getattr(_local, "is_outside", False)
    _local.loop, _local.is_outside = None, True
    try:
        yield
    finally:
        _local.loop, _local.is_outside = before


def _losses_here() -> Losses | None:
    """Return the losses of the loop in whose function the calling thread is."""
    loop: UserLoop | None = getattr(_local, "loop", None)
    return None if loop is None else loop.weights.losses


def _steps_here() -> LoopSteps | None:
    """Return the steps of the loop in whose function the calling thread is."""
    loop: UserLoop | None = getattr(_local, "loop", None)
    return None if loop is None else loop.steps


def _number(value: Any) -> Any:
    """Return a value of a report as a number, if it is one."""
    number = as_number(value)
    return value if number is None else number
