"""The function's side of a user's own loop: what `prepare`, `epochs`, loaders, `step` and `report` do in a worker."""

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
from steepest.core.models.protocol import Where, checked_metrics, checked_weight
from steepest.core.models.scalars import as_number
from steepest.core.protocol.commit_rules import CommitRule
from steepest.errors import ConfigurationError
from steepest.loop import counting
from steepest.loop.cursor import Cursor, Pass
from steepest.loop.gatherer import Gatherer
from steepest.loop.gathering import Region
from steepest.loop.held_gradients import HeldGradients
from steepest.loop.job_view import JobView
from steepest.loop.kept import Kept
from steepest.loop.kept_values import finder
from steepest.loop.loop_states import LoopStates, Rounds, kept_at
from steepest.loop.loop_steps import LoopSteps
from steepest.loop.losses import Losses, line_of_user, watched
from steepest.loop.mistakes import explained
from steepest.loop.notices import Notices
from steepest.loop.outgoing_reports import OutgoingReports
from steepest.loop.place import LoopPlace
from steepest.loop.prepared import Ask, Batch, Prepared
from steepest.loop.report_calls import ReportCalls
from steepest.loop.script_settings import ScriptSettings, check_lengths, tell_of_schedules
from steepest.loop.standing_in import StandIn
from steepest.loop.sum_weights import SumWeights
from steepest.loop.ticks import Schedules
from steepest.loop.torch_clipping import watched as clipping_watched
from steepest.loop.torch_scaling import watched as scaling_watched
from steepest.loop.turns import Turns
from steepest.loop.unseen import Unseen, noted
from steepest.observe.reports import CALLS_OF_PLACE, Reported

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
        seed, rule, local, paced, ahead: see `steepest.loop.session.Session`.

    Attributes:
        states: what another worker goes on with.
        notices: what it hears of its node's end.
        steps: those of its optimizers.
        prepared: what the function has given to `prepare`; `cursor` and `sums` are of that.
        taken: the last batch that the loop took; `stepped` says whether its step was taken.
        own_weight: what the last batch weighs, if the loop has said it.
        weight, samples, whole, losses: of the batches of the last step, or of the step in progress: what they weigh,
            their samples, those of all workers, and their losses.
        fresh: what was reported since the last step.
        settings: what the script has set of its optimizers and schedulers; None before `prepare`.
        resumed: which of these are others than those of the checkpoint, in words.
        batches: that the loop has taken.
        passed_by: batches of passes that the loop has entered behind them.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        job: JobView,
        seed: int,
        rule: CommitRule,
        local: int,
        paced: bool = False,
        ahead: bool = False,
    ) -> None:
        self.job, self.seed, self.rule, self.local = job, seed, rule, local
        self.together = rule.needs_all  # whether every worker contributes to each update
        self.ahead = ahead
        self._paced = paced
        self._function = function
        self.notices = Notices()
        self.unseen = Unseen()  # writes to gradients that torch does not count
        self.prepared: Prepared | None = None
        # of that, as it is asked for often: where the loop is, if all workers go through the same batches; whether
        # losses add up samples
        self.cursor: Cursor | None = None
        self.sums = False
        self.arriving: dict[str, Any] | None = None  # a state, until the loop is entered
        self.calls = ReportCalls()
        self.reports = OutgoingReports()
        self._batch_weight = 0.0  # of the present batch, where each step has its own
        self.gatherer = Gatherer(self)
        self.steps = LoopSteps(self)
        self._reset()

    def _reset(self) -> None:
        """Begin with a function that has not run yet."""
        self.gatherer.begin_anew()
        self.steps.begin_anew()
        self.weight = 0.0
        self.samples = self.whole = 0
        self.losses = Losses(self)
        self.fresh: dict[str, float] = {}
        self.batches = 0
        self.pending: Batch | None = None  # a batch that the loop has yet to take
        self.taken: Batch | None = None
        self.wanted_epochs: int | None = None
        self.epoch, self._left = 0, -1  # in which the loop is; through which it has gone last
        self.stepped = False
        self.own_weight: float | None = None
        self.calls = ReportCalls()
        self.kept: Kept | None = None
        self.schedules = Schedules(self)
        self.settings: ScriptSettings | None = None
        self.resumed = ""
        self.held = HeldGradients()
        self.weights = SumWeights(self.gatherer.total)
        self._passes = 0  # backward passes since the last step, when the present batch began
        self._seen = 0, 0  # samples of the batches of the next step, on this worker and on all
        self._enters = True  # whether no batch was taken yet
        self.passed_by = self._entered_at = (
            0  # _entered_at: the pass that was entered in the middle
        )
        self.states = LoopStates(self, self.job)
        self._stand_in = StandIn(self._last_batch, self._take_arrived)

    # -- for the worker's side -----------------------------------------------------------------

    def give(self, batch: Batch | None) -> None:
        """Have a batch be the next one that the loop takes; None for none."""
        self.pending = batch

    def arrive(self, state: dict[str, Any]) -> None:
        """Go on from a state once the function comes to its epochs."""
        self.arriving = state
        of, unsent = state["unsent"]
        if of == self.job.rank:  # else they are another worker's, which sends them
            self.reports.take_over(unsent)
        size, gathered = state["gathered"]
        if size == self.job.size:
            self.gatherer.gatherings.restore(gathered)

    def begin_anew(self, state: dict[str, Any], rounds: Rounds | None = None) -> None:
        """Begin with a function that has not run yet, which goes on from a state, amid some rounds."""
        self._reset()
        self.states.rounds = rounds or self.states.rounds
        self.arriving = state
        self.reports.keep_before(state.get("reported", state["reports"]))

    def take_fresh(self) -> dict[str, float]:
        """Return what was reported since this was called before, or since the last step."""
        found, self.fresh = self.fresh, {}
        return found

    @property
    def is_arriving(self) -> bool:
        """Whether the loop has yet to come to where a state is of."""
        return self.arriving is not None

    @property
    def leaves_early(self) -> bool:
        """Whether gradients may leave during the backward pass."""
        prepared = self.prepared
        if self.sums or prepared is None:
            return not self.sums
        return not prepared.closures and len(prepared.optimizers) == 1

    # -- for the user's function ---------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The number of the worker."""
        return self.job.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self.job.size

    @property
    def turns(self) -> Turns:
        """The turns of the two sides."""
        return self.job.turns

    @property
    def is_prepared(self) -> bool:
        """Whether the function has called `prepare` since it began."""
        return self.job.asked is not None

    @property
    def sees_all_batches(self) -> bool:
        """Whether all workers go through the same batches."""
        return self.cursor is not None

    @property
    def steps_left(self) -> int | None:
        """How many steps are to come if each batch has one; None where nobody knows, as before the loop is entered."""
        if self.cursor is None or self.wanted_epochs is None:
            return None
        return self.cursor.steps_left(self.wanted_epochs, self.job.size)

    @property
    def is_over(self) -> bool:
        """Whether the epoch in which the loop is has no further batch."""
        return self.job.next_epoch > self.epoch

    @property
    def has_seen_all(self) -> bool:
        """Whether the epoch is over for certain: a step without samples here may yet be dealt out anew."""
        return self.is_over and (self.job.passed <= self.job.committed or not self.together)

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
                noted(self.unseen),
            ):
                return self._function()
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            return None
        except Exception as error:
            given = () if self.prepared is None else self.prepared.given
            if (told := explained(error, given, self.passed_by)) is not None:
                raise told from error
            raise
        finally:
            counting.end(self)
            _local.loop = None
            _running.remove(self)

    def prepare(self, prepared: Prepared) -> None:
        """Take what the user has prepared, and wait for the job."""
        if self.prepared is not None and self.arriving is not None:  # the function has begun anew
            self.prepared.model.adopt(prepared.model)
            prepared = replace(prepared, model=self.prepared.model)
        self.prepared, self.cursor, self.sums = prepared, prepared.cursor, prepared.sums
        tabled = prepared.model.tables
        self.held = HeldGradients(prepared.optimizers, self._holds_rows if tabled else None)
        self.steps.take_over(prepared)
        if prepared.closures:
            prepared.model.expect_trials()
            self.gatherer.among_batches = True  # all workers take part in each evaluation
        self.settings = ScriptSettings(prepared)
        self.schedules = Schedules(self, prepared.schedulers)
        self.job.turns.ask(Ask.BEGIN)

    def epochs(self, count: int, first: int = 0) -> Iterator[int]:
        """Yield the numbers of the epochs that are still to come, of `count`, where the user counts from `first`."""
        if self.prepared is None:
            raise ConfigurationError(
                "steepest.epochs() before steepest.prepare(): call that before"
            )
        if self.wanted_epochs is not None:
            raise ConfigurationError(
                "steepest.epochs() was called twice: the epochs of a job are counted once; make one loop of both"
            )
        self.wanted_epochs = count
        if self.arriving is not None and (self.cursor is None or self.cursor.has_loader):
            counting.begin(self)
        assert self.settings is not None
        self.settings.state["epochs"] = count
        check_lengths(self.prepared, count, self.job.size)
        if not self.job.rank or self.arriving is not None:
            tell_of_schedules(self.prepared, self.kept)
        pending = self.pending
        self.epoch = self.job.next_epoch if pending is None else pending.where.epoch or 0
        self._left = self.epoch - 1
        if (cursor := self.prepared.cursor) is not None:
            yield from self._epochs_together(cursor, count, first)
            return
        from_the_start = self.arriving is None or not self.arriving["batches"]
        if self.arriving is not None and self.arriving["at"]:
            self._begin_to_stand_in(self.arriving)
        elif self.arriving is not None:
            self._take(self.arriving)
        arrived = self.job.passed > 0 or pending is None
        before = (self.job.passed if arrived or pending is None else pending.where.step) - 1
        self._begin_ticks(before)
        while self.epoch < count:
            self._seed_for(self.epoch, region=Region.TOP)
            self.prepared.enter(first + self.epoch)
            yield first + self.epoch
            if from_the_start:
                self.steps.check_any_taken(self.epoch)
            self.epoch += 1

    def _epochs_together(self, cursor: Cursor, count: int, first: int) -> Iterator[int]:
        """Yield the numbers of epochs whose batches all workers see."""
        prepared = self.prepared
        assert prepared is not None
        from_the_start = self.arriving is None or not self.arriving["batches"]
        if self.arriving is not None:
            self._arrive_amid(cursor, self.arriving, first)
        self.epoch = cursor.place.epoch
        while self.epoch < count:
            cursor.begin(self.epoch)
            if cursor.has_loader:
                self.gatherer.enter(Region.TOP, cursor.place.batch)
                self.states.open_epoch()
            else:
                self._begin_batch(cursor)
                self.gatherer.enter(Region.BEFORE, cursor.place.batch)
            self.states.let_objects_go()
            self.batches += 1
            self.own_weight = None
            if not cursor.has_loader:
                self._weigh_batch(cursor)
            self._seed_for(self.epoch, region=Region.TOP)
            prepared.enter(first + self.epoch)
            yield first + self.epoch
            # rounds of a loop without a loader may add up gradients for a step in a later one
            if from_the_start and (cursor.has_loader or self.epoch == count - 1):
                self.steps.check_any_taken(self.epoch)
            self.epoch += 1
        cursor.end(count)

    def _arrive_amid(self, cursor: Cursor, state: dict[str, Any], first: int) -> None:
        """Go to the epoch in which others are, and set what they had at its beginning."""
        prepared, where = self.prepared, state.get("cursor")
        assert prepared is not None
        if where is None:
            raise ConfigurationError(
                "the state to go on from is that of a loop of an older version, or of a strategy under which workers "
                "do not wait for each other: begin with its weights, by model.load_state_dict(), and other checkpoints"
            )
        prepared.tell_schedulers()
        prepared.enter(first + LoopPlace(*where["place"]).epoch)  # a stream may be read
        is_whole = cursor.load(where, self.job.size)
        self._tell_of_other_size(holds=not is_whole and (where["is_sure"] or where["amid_sum"]))
        self.arriving = {**state, "entry": state["entries"][0 if is_whole else 1]}
        self.states.tops = {int(epoch): top for epoch, top in state["tops"].items()}
        if not cursor.is_amid_epoch:
            self._come_to_place(cursor)
        elif (top := self.states.tops.get(cursor.place.epoch)) is not None:
            self._set_by_hand({**top["set"], "kept": kept_at(top)}, settings=state["settings"])

    def _come_to_place(self, cursor: Cursor) -> None:
        """Set what others have where they are, now that the loop has come to their batch."""
        assert self.arriving is not None
        if cursor.skip:
            self._set_by_hand(self.arriving["entry"], settings=self.arriving["settings"])
        else:
            self._take(self.arriving)

    def _take(self, state: Mapping[str, Any]) -> None:
        """Set what has arrived, now that all is there of which it is the state."""
        self.arriving = None
        self.steps.lacks_batches = True
        self.job.arrive(state["step"])
        self.calls.go_on(state["since"], self._first_report(state))
        self.batches = state["batches"]
        assert self.prepared is not None
        prepared = self.prepared
        if (
            state["settings"]["epochs"] is None
        ):  # of a function that had yet to set what this one has
            prepared.model.keep_buffers()
            return
        prepared.model.restore_buffers()
        self._set_by_hand(state, settings=state["settings"], kept=False)
        if state.get("frozen") is not None:  # not in checkpoints of before
            prepared.model.freeze(state["frozen"])
        for (_, each), own in zip(prepared.closures, state.get("closures", ()), strict=False):
            each.optimizer.load_state_dict(own)
        if state.get("local", 0) == self.local:  # else schedulers have counted something else
            self.schedules.restore(state)
        if self.kept is not None:
            self.kept.load(state["kept"], finder(self._function))

    def _first_report(self, state: Mapping[str, Any]) -> int:
        """Return the number of the first report that counts of a loop which goes on from a state."""
        reported: int = state.get("reported", 0)
        of, _ = state.get("unsent", (self.job.rank, ()))
        # another worker may have had calls of its own at that place
        return reported if of == self.job.rank else reported - reported % CALLS_OF_PLACE

    def _set_by_hand(
        self, state: Mapping[str, Any], *, settings: Mapping[str, Any], kept: bool = True
    ) -> None:
        """Set what loops set by hand: what optimizers' groups and schedulers have, and what is `kept`.

        Args:
            state: with these.
            settings: of the script of which it is.
            kept: whether to set that too.
        """
        if (weights := state.get("weights")) is not None:
            self.weights.load(weights)
        if state["groups"]:
            assert self.settings is not None
            self.resumed = self.settings.go_on(settings, state, self.schedules.steps)
        if kept and self.kept is not None:
            self.kept.load(state["kept"], finder(self._function))

    def _begin_ticks(self, step: int) -> None:
        """Have schedulers count after a step of the job."""
        assert self.prepared is not None
        self.prepared.tell_schedulers()
        self.schedules.begin((step + 1) * (self.local or 1) - 1, together=self.together)

    def _begin_to_stand_in(self, state: Mapping[str, Any]) -> None:
        """Go to the end of a step, or of an epoch, where other workers gather; `state` is taken there."""
        self._stand_in.begin()
        self.epoch = state["epoch"]
        self.job.arrive(state["step"])

    def _last_batch(self) -> Any:
        """Return the worker's batch of the step before."""
        assert self.prepared is not None
        found = self.prepared.model.batch_before(self.job.passed)
        self._seed_for(self.job.passed - 1)
        return found

    def _take_arrived(self) -> None:
        """Take the state of the others that gather."""
        assert self.arriving is not None
        self._take(self.arriving)
        self._begin_ticks(self.job.passed - 1)
        self.losses.found = []
        self.steps.clips.clear()

    def on_device(self, batch: Any) -> Any:
        """Return a batch on the device of the model."""
        return batch if self.prepared is None else self.prepared.model.on_device(batch)

    @property
    def counts(self) -> bool:
        """Whether what the loop gives counts: it has come to where the others are."""
        return self.arriving is None and not self.stands_in

    @property
    def stands_in(self) -> bool:
        """Whether the loop goes through a batch that does not count, to where others gather."""
        return self._stand_in.counts_not

    @property
    def steps_taken(self) -> int:
        """One more than the number of steps of the job that the loop has taken; 0 where that is not known."""
        if self.stands_in or self.is_arriving or self.local or not self.together:
            return 0
        done = 0 if self.taken is None else self.taken.where.step + self.stepped
        return max(done, self.job.passed) + 1  # in the last ones it may have had no samples

    @property
    def passes_by(self) -> bool:
        """Whether the loop is in a pass over its loader that the others have left behind them."""
        return self.cursor is not None and self.cursor.passes_by

    @property
    def has_samples(self) -> bool:
        """Whether the worker has samples in the present batch."""
        if self.cursor is not None:
            return self.cursor.samples != 0
        return self.taken is None or self.taken.samples > 0

    @property
    def has_entered(self) -> bool:
        """Whether the loop has come to its epochs."""
        return self.wanted_epochs is not None

    def register(self, objects: Mapping[str, Any]) -> Kept:
        """Take what is kept with the job's state."""
        if self.kept is not None:
            raise ConfigurationError(
                "steepest.register() was called twice: give it everything in one call, before steepest.epochs()"
            )
        if self.wanted_epochs is not None:
            raise ConfigurationError(
                "steepest.register() in the loop: call it before steepest.epochs(), where a worker that joins later is "
                "given what was kept"
            )
        tables = () if self.prepared is None else self.prepared.model.tables
        if tables and any(isinstance(each, torch.amp.GradScaler) for each in objects.values()):
            raise ConfigurationError(
                f"a GradScaler with embedding tables ({tables[0].name!r}), whose gradients it does not divide: "
                "train in bfloat16, or without autocast"
            )
        self.kept = Kept(objects)
        return self.kept

    def next_batch(self, own: Pass) -> Any:
        """Return the next batch of a pass over the loader; StopIteration at its end."""
        if self.wanted_epochs is None:
            raise ConfigurationError(
                "the loader was iterated over outside of steepest.epochs(): write `for epoch in steepest.epochs(n)` "
                "around the loop, so that a worker that joins later knows where the job is"
            )
        assert self.prepared is not None
        if self.cursor is not None:
            return self._next_of_pass(self.cursor, own)
        if (again := self._stand_in.next_batch()) is not None:
            self._enters = False
            self._pass_by(self.prepared.model.steps_before(self.job.passed - 1))
            return again[0]
        pending = self._next_pending()
        if self._enters:
            self._enters = False
            step = pending.where.step
            self._pass_by(self.prepared.model.steps_before(step) if self.together else 0)
        pending = self.prepared.model.loaded(pending)
        self._seed_for(pending.where.step, part=pending.where.part[0])
        taken = None if self.taken is None else self.taken.where
        new = taken is None or taken.step != pending.where.step
        if self.local and not self.together:
            new = self.states.rounds.opens()
        if new:
            self.states.begin_step()
        if new and self.local:
            self.states.begin_round(pending.where.step)
        same = taken is not None and self._own_updates(taken) == self._own_updates(pending.where)
        if not (same and self.whole):
            self.whole += pending.whole
        self.pending, self.taken = None, pending
        self.job.see(pending.where)
        self.gatherer.enter(Region.BEFORE, pending.where.step)
        self.gatherer.order = []
        self._count(pending.samples)
        return pending.data

    def _next_pending(self) -> Batch:
        """Return the batch that the engine gives next; StopIteration at the end of the present epoch."""
        while self.pending is None:
            if self.has_seen_all:
                self._end_epoch()
            self.job.turns.ask(Ask.BATCH)
        epoch = self.pending.where.epoch or 0
        if epoch > self.epoch:
            self._end_epoch()
        # what a dead worker has left over comes late
        late = self.pending.where.leased and self._left == self.epoch - 1
        if epoch < self.epoch and not late:
            raise ConfigurationError(
                f"the loop over the loader was left in epoch {epoch} before its end, and begun anew: go through all "
                "batches of an epoch, or return"
            )
        missed = self.taken is not None and self.pending.where.step > self.taken.where.step + 1
        if missed and self.together and not self.local:  # steps in which this worker has no samples
            self.schedules.catch_up(self.pending.where.step - 1)
        return self.pending

    def _count(self, samples: int) -> None:
        """Count a batch, whose step is yet to be taken."""
        self.stepped = False
        self.batches += 1
        self.samples += samples
        self.weight += samples
        self.calls.count(samples)
        self.losses.looks.begin(self.epoch, samples)
        self._batch_weight, self.own_weight = float(samples), None

    def _end_epoch(self) -> None:
        """Raise StopIteration: the epoch has no further batch."""
        number = max(self.at_step + 1, self.job.passed)
        if not self.together:  # each has had another step last
            number = self.epoch + 1
        self._left = self.epoch
        if (self.gatherer.region, self.gatherer.number) != (Region.END, number):
            self.gatherer.enter(Region.END, number)
            self._seed_for(number, 0, Region.END)
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
        else:
            cursor.go_on_with_pass()
        if not cursor.has_more(self.job.size):
            if self.gatherer.region is not Region.END:
                self.gatherer.enter(Region.END, cursor.place.batch)
                self._seed_for(cursor.place.batch, 0, Region.END)
            own.is_over = True
            raise StopIteration
        while self.pending is None and not cursor.skip:
            self.job.turns.ask(Ask.BATCH)
        self._begin_batch(cursor)
        self._seed_for_loading(cursor.place.batch)
        batch = cursor.next_batch(self.job.rank, self.job.size)
        self._seed_for(cursor.place.batch)
        if cursor.is_at_last:
            self.states.hold_objects()
        else:
            self.states.let_objects_go()
        self.gatherer.enter(Region.BEFORE, cursor.place.batch)
        self.gatherer.order = []
        self.batches += 1
        self.own_weight = None
        self.calls.count(cursor.samples or 0)
        self._weigh_batch(cursor)
        return self.on_device(batch)

    def _samples_in(self, cursor: Cursor) -> tuple[int, int]:
        """Return how many samples the present batch has, on this worker and on all; a round has one of each worker."""
        if cursor.samples is None:
            return 1, self.job.size
        return cursor.samples, cursor.whole

    def _end_step_of(self, cursor: Cursor, index: int) -> None:
        """Note that a step of an optimizer in the present batch is committed, or passed over since it is."""
        cursor.take_step()
        self.gatherer.begin_step(cursor.place.step)
        self.weights.step()
        self._passes, self._seen = 0, self._samples_in(cursor)
        self._end_sum(cursor, index)

    def _weigh_batch(self, cursor: Cursor) -> None:
        """Note what the present batch, or round, weighs in a sum of gradients of several."""
        learned, self._passes = len(self.losses.found) > self._passes, len(self.losses.found)
        samples, whole = self._samples_in(cursor)
        before = (0, 0) if self.weights.has_ended else self._seen
        self._seen = before[0] + samples, before[1] + whole
        kinds = {"sums": self.sums, "learned": learned, "even": cursor.deals_evenly}
        self.weights.begin(samples, cursor.samples_of_all, self.job.size, **kinds)
        self.losses.looks.begin(self.epoch, cursor.samples or 0)
        self.weight, self.losses.scale = self.weights.weight, self.weights.scale
        if (factor := self.weights.rescale) is None or self.prepared is None:
            return
        self.prepared.model.rows.rescale(factor)
        self.losses.found = [loss * factor for loss in self.losses.found]
        with torch.no_grad():
            for parameter in (each for own in self.prepared.trained() for each in own):
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _begin_pass(self, cursor: Cursor, own: Pass) -> None:
        """Begin a pass over the loader; one that the others have left behind them is over behind one batch."""
        own.begun, enters = True, cursor.is_amid_epoch
        if not cursor.begin_pass(self.job.size):
            own.is_over = True
            return
        own.number = cursor.place.passed
        if enters:
            self._come_to_place(cursor)
            self._pass_by(cursor.batches_before(self.job.size))
            self._entered_at = own.number if self.passed_by else 0
        else:
            counting.end(self)
            self.states.close_top()

    def _pass_by(self, batches: int) -> None:
        """Note that the loop enters a pass behind so many of its batches."""
        self.passed_by += batches
        counting.end(self)

    def _begin_batch(self, cursor: Cursor) -> None:
        """Note that the next batch, or round, begins, whose gradients may be added to those of batches before."""
        if self.losses.looks.is_looking:
            self.losses.end_part()
        holds = self.held.begin_batch()
        if not cursor.place.step:  # of a sum this worker may have had nothing to learn yet
            is_first = cursor.has_loader and not self.steps.stepping
            holds |= is_first or self.held.adds_up or self._holds_gradients
        cursor.is_sure = self.held.is_sure
        if cursor.has_other_size(self.job.size):
            self._tell_of_other_size(holds=cursor.is_sure)
        if cursor.adds_up(self.job.size, holds=holds):
            self.states.begin_batch()
        else:
            self.states.begin_sum()

    def _tell_of_other_size(self, *, holds: bool) -> None:
        """Warn, if the loop holds gradients: other workers had a part of the batches of which these are."""
        if holds:
            warnings.warn(
                f"worker {self.job.rank}: there are {self.job.size} workers now, another number than when the first of "
                "the batches was taken whose gradients are added up for one step: it lacks what workers that have left "
                "had of these, and weighs its samples otherwise than one process would",
                stacklevel=2,
            )

    def _end_sum(self, cursor: Cursor, index: int) -> None:
        """Note that an optimizer has stepped, and with that perhaps used up the gradients of batches before."""
        if self.held.step(index):
            warnings.warn(
                f"worker {self.job.rank}: a step was taken with gradients that were there before another step of the "
                "batch, or of batches before: this worker has entered between these steps, and has computed them with "
                "the weights of now; where they depend on what the other step has changed, compute and use gradients "
                "between the same steps to have what one process has",
                stacklevel=line_of_user(),
            )
        if cursor.back and not self.held.awaited:
            cursor.forget_before()
            self.states.forget_before()

    @property
    def _holds_gradients(self) -> bool:
        """Whether there are gradients of backward passes since the last step."""
        return bool(self.losses.found and self.prepared and self.prepared.has_gradients)

    def _holds_rows(self) -> bool:
        """Return whether there are gradients of rows since the last step."""
        assert self.prepared is not None
        return bool(self.prepared.model.rows.has_gradients)

    def weigh(self, weight: float) -> None:
        """Set the weight of the present batch, in place of its number of samples."""
        if self.sums:
            raise ConfigurationError(
                "steepest.weight() with steepest.prepare(..., reduction='sum'): sums are not weighed; leave one out"
            )
        if self.cursor is not None:
            before = self._weight_of(self.cursor) if self.cursor.samples is not None else 0.0
            if self.own_weight is not None:
                before = self.own_weight
            # a batch of none of the worker's samples is there to be looked at
            self.own_weight = checked_weight(weight) if self.has_samples else 0.0
            self.weights.say(self.own_weight, passed=len(self.losses.found) > self._passes)
            self.weight, self.losses.scale = self.weights.weight, self.weights.scale
            self.calls.count(self.own_weight - before)
            return
        if self.taken is None:
            raise ConfigurationError(
                "steepest.weight() before the first batch: call it in the loop over the loader"
            )
        before, self._batch_weight = self._batch_weight, checked_weight(weight)
        self.own_weight = self._batch_weight
        self.weight += self._batch_weight - before
        self.calls.count(self._batch_weight - before)

    @property
    def present_weight(self) -> float:
        """What a gradient of the present batch weighs beside those of other workers."""
        if self.cursor is None:
            return self._batch_weight
        return 1.0 if self.weights.by_pass else self._weight_of(self.cursor)

    def passes_over_step(self, index: int) -> bool:
        """Return whether an optimizer's step is not taken here: it does not count, or is committed already."""
        if self.stands_in:
            return True
        cursor = self.cursor
        if cursor is None or not (cursor.skip or cursor.is_amid_epoch):
            return False
        if cursor.is_amid_epoch:  # of what the others have left behind them
            return True
        self._end_step_of(cursor, index)
        self._seed_for(cursor.place.batch, cursor.place.step)
        self.losses.found = []
        if not cursor.skip and self.arriving is not None:  # the next one is taken with the others
            self.held.note_computed_anew()
            self._take(self.arriving)
            self.states.begin_step()
        return True

    def _tell_of_kept_batches(self, cursor: Cursor) -> None:
        """Warn once of steps behind a pass of which this worker has not had all batches."""
        if self._entered_at == cursor.place.passed and cursor.place.step:
            self._entered_at = 0
            warnings.warn(
                f"worker {self.job.rank}: the loop takes several steps behind a pass over the loader, which this "
                "worker has entered in the middle: what it keeps of a pass's batches (itertools.cycle, a list) has "
                "only those that were left; go over the loader itself again, or keep them by steepest.register()",
                stacklevel=line_of_user(),
            )

    def begin_step(self) -> None:
        """Note that a step is about to be taken, with the job's next batch where the loop counts steps itself."""
        if self.cursor is not None:
            if self._entered_at and self.gatherer.region is Region.END:
                self._tell_of_kept_batches(self.cursor)
            while self.pending is None:
                self.job.turns.ask(Ask.BATCH)
            self.taken, self.pending = self.pending, None
            self.weight = self.weights.weight
            self.samples, self.whole = self._seen
        if self.local and self.taken is not None:
            self.schedules.catch_up(self._own_updates(self.taken.where) - 1)
        self.stepped = True

    def end_step(self, index: int) -> None:
        """Note that a step of an optimizer is committed, and the loop goes on behind it."""
        self.weight, self.samples, self.whole = 0.0, 0, 0
        self.losses.found = []
        if (cursor := self.cursor) is not None:
            self._end_step_of(cursor, index)
            self.weight = self.weights.weight  # of a further step of the batch
            self.states.begin_step()
            self._seed_for(cursor.place.batch, cursor.place.step)
            self.gatherer.gatherings.drop_before(cursor.first_number)
            if cursor.is_at_last or self.gatherer.among_batches:
                self.states.hold_objects()
            else:
                self.states.let_objects_go()
        else:
            self.gatherer.enter(Region.AFTER, self.at_step + 1)
            assert self.taken is not None
            self._seed_for(self.taken.where.step, 1, part=self.taken.where.part[0])

    def load_ahead(self) -> None:
        """Load the batch behind that whose step the function awaits."""
        if self.cursor is not None and self.job.asked is Ask.COMMIT and self.arriving is None:
            _local.loads_for = self
            try:
                self.cursor.load_ahead(self.job.rank, self.job.size, self._seed_for_loading)
            finally:
                _local.loads_for = None

    def _seed_for_loading(self, number: int) -> None:
        """Seed all generators for loading a batch, which may be done before its turn."""
        seed_everything(step_seed(self.seed, number, self.job.rank))

    def _seed_for(
        self, number: int, taken: int = 0, region: int = 0, part: int | None = None
    ) -> None:
        """Seed all generators for a place of the loop: a worker that joins draws the same there.

        Args:
            number: of the batch, or round, see `GatheringPlace`; of the epoch at its top.
            taken: steps that are taken of it.
            region: Region.END behind an epoch, Region.TOP before its first batch.
            part: of the batch that is the worker's; its rank, if that is left out.
        """
        salted = self.seed + ((4 * taken + region + 1) << 32)  # loading a batch is seeded without
        seed_everything(step_seed(salted, number, self.job.rank if part is None else part))

    def _weight_of(self, cursor: Cursor) -> float:
        """Return what the present batch weighs in a step."""
        if self.own_weight is not None:
            return self.own_weight
        return 1.0 if cursor.samples is None else float(cursor.samples)

    @property
    def averaged(self) -> int:
        """The number of samples of which a loss is to be the mean; 0 where it may be something else."""
        averages = self.steps.averages and not self.sums
        if not averages or not self.has_entered or self.own_weight is not None:
            return 0
        if self.cursor is not None:
            return self.cursor.samples or 0
        return self.taken.samples if self.taken is not None and self.weight == self.samples else 0

    @property
    def reduced(self) -> int:
        """The number of samples of which a loss is to be the mean, or the sum; 0 where it may be something else."""
        if not self.sums or self.cursor is None or not self.steps.averages:
            return self.averaged
        return self.cursor.samples or 0

    @property
    def at_step(self) -> int:
        """The number of the job's last step of which the loop has taken all batches; -1 before the first."""
        if self.taken is None:
            return self.job.passed - 1
        return self.taken.where.step - self.taken.where.has_more

    @property
    def at_update(self) -> int:
        """The number of the last update of which the loop has taken all batches, see `steepest.loop.ticks.Counts`."""
        taken = self.taken
        if self.local and taken is not None and (self._paced or taken.where.has_more):
            return self._own_updates(taken.where, 1) - 1
        return (self.at_step + 1) * (self.local or 1) - 1

    def _own_updates(self, where: Where, more: int = 0) -> int:
        """Return how many updates there are before a batch, and so many batches more: steps', or a worker's own."""
        if not self.local:
            return where.step
        part, parts = where.part
        if self._paced:
            return where.step * self.local + (part + more) * self.local // parts
        each = parts // self.job.size  # batches of a round
        return where.step * self.local + (part % each + more) * self.local // each

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values of the user's, for the driver."""
        number = self.calls.called(self.place_number)
        if not self.counts:
            return
        numbers = checked_metrics({name: _number(value) for name, value in values.items()})
        weight = self.calls.weigh(numbers)
        if number >= self.calls.made:
            self.reports.add(Reported(number, weight, numbers))
            self.fresh |= numbers

    @property
    def place_number(self) -> int:
        """The number of the place where the loop is, the same on all workers: each is greater than those before."""
        is_end = self.gatherer.region is Region.END
        if not self.together:  # each worker has as many batches in an epoch as it manages
            return (
                (self.epoch + 1) * MOST_BATCHES - 1
                if is_end
                else self.epoch * MOST_BATCHES + self.batches
            )
        if self.cursor is not None:
            batches = self.cursor.place.batch
        elif is_end:
            batches = self.gatherer.number * (self.local or 1)
        else:
            batches = 0 if self.taken is None else self._own_updates(self.taken.where)
        return 2 * (self.epoch + batches) + is_end

    @property
    def next_report(self) -> int:
        """The number of the next call of `report`, if it is made here."""
        return self.calls.next(self.place_number)


def current() -> UserLoop | None:
    """Return the loop in whose function the calling thread is; None outside of any."""
    loop: UserLoop | None = getattr(_local, "loop", None)
    return loop


def calling(name: str) -> UserLoop | None:
    """Return the loop whose function calls something of steepest, by its name; None outside of any.

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
    """Return the loop whose rank or size is asked for, as `calling`, also by a data set of which it loads ahead."""
    loop: UserLoop | None = getattr(_local, "loads_for", None)
    return calling(name) if loop is None else loop


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Have the calling thread be in no loop's function, in this context."""
    before = current(), getattr(_local, "is_outside", False)
    _local.loop, _local.is_outside = None, True
    try:
        yield
    finally:
        _local.loop, _local.is_outside = before


def _losses_here() -> Losses | None:
    """Return the losses of the loop in whose function the calling thread is."""
    loop: UserLoop | None = getattr(_local, "loop", None)
    return None if loop is None else loop.losses


def _steps_here() -> LoopSteps | None:
    """Return the steps of the loop in whose function the calling thread is."""
    loop: UserLoop | None = getattr(_local, "loop", None)
    return None if loop is None else loop.steps


def _number(value: Any) -> Any:
    """Return a value of a report as a number, if it is one."""
    number = as_number(value)
    return value if number is None else number
