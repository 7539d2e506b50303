"""A session: one worker's side of a user's own loop, between the user's thread and the engine's."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from steepest.core.data.sampler import step_seed
from steepest.core.engine.generators import seed_everything
from steepest.core.models.protocol import Where, checked_metrics, checked_weight
from steepest.core.models.scalars import as_number
from steepest.core.optim.portable import Record
from steepest.errors import ConfigurationError
from steepest.loop.closures import ByClosure, step_by_closure
from steepest.loop.gatherer import Gatherer
from steepest.loop.gathering import GatheringParts, Region
from steepest.loop.kept import Kept, pack, unpack
from steepest.loop.lockstep import Lockstep
from steepest.loop.losses import Losses, watched
from steepest.loop.prepared import Ask, Batch, Prepared, Progress, Reported
from steepest.loop.report_calls import ReportCalls
from steepest.loop.standing_in import Boundary, StandIn
from steepest.loop.table_rows import Errand
from steepest.loop.ticks import Schedules
from steepest.loop.torch_clipping import watched as clipping_watched
from steepest.loop.turns import Ended, Turns
from steepest.loop.unseen import Unseen, noted
from steepest.loop.window import Window
from steepest.validation import require_positive

_local = threading.local()


class Session:
    """One worker's run of a user's function, which calls `steepest.prepare` and trains by itself.

    Methods of the first part are called by the worker's thread, those of the second by the user's function on its own
    thread; only one of the two runs at any time.

    Args:
        function: the user's.
        rank: number of the worker.
        size: number of workers.
        seed: of the job.
        together: whether every worker contributes to each update.
        local: batches of each round of updates that workers make by themselves; 0 where servers make each update.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        rank: int,
        size: int,
        seed: int = 0,
        together: bool = True,
        local: int = 0,
    ) -> None:
        self.rank, self.size, self.seed, self.together = rank, size, seed, together
        self.local = local
        self.unseen = Unseen()  # writes to gradients that torch does not count
        self.prepared: Prepared | None = None
        # of that, as it is asked for often: where the loop is, if its steps are not one for each batch; whether losses
        # add up samples
        self.lockstep: Lockstep | None = None
        self.sums = False
        self._stepped_by: list[set[int]] = []  # ids of each optimizer's parameters
        # batches of the epoch before the next one, where the loop enters in its middle
        self.first = 0
        self._function = function
        self._arriving: dict[str, Any] | None = None  # a state, until the loop is entered
        self.calls = ReportCalls()
        self._reports: list[Reported] = []
        self._noted = 0  # of these, that have gone to the driver with a step
        self.trying: ByClosure | None = None  # whose step is under way
        self.read_state: Callable[[], list[Record]] | None = (
            None  # of the job's optimizer; on the worker's thread
        )
        self._batch_weight = 0.0  # of the present batch, where each step has its own
        self.gatherer = Gatherer(self)
        self._handed: tuple[int, list[Reported]] = (-1, [])  # reports of the last call of `advance`
        self.told_of_clipping = False  # see `steepest.loop.torch_clipping`
        self._reset()

    def _reset(self) -> None:
        """Begin with a function that has not run yet."""
        self.turns = Turns(self._run, f"steepest loop {self.rank}")
        self.gatherer.begin_anew()
        # of the last step, by parameter group: what differs from the optimizer as it was given to `prepare`
        self.hyper: list[dict[str, Any]] | None = None
        self.weight = 0.0  # of the batches of the last step, or of the step in progress
        self.samples = 0  # likewise
        self.whole = 0  # of all workers, likewise
        self.losses = Losses(self)
        self.clip: float | None = None  # the greatest norm in the last step, or in that in progress
        self.fresh: dict[str, float] = {}  # what was reported since the last step
        self.batches = 0  # that the loop has taken
        self._asked: Ask | None = None
        self._error: BaseException | None = None  # that it has raised, or with which it has ended
        self._pending: Batch | None = None
        self._taken: Batch | None = None  # the last batch that the loop took
        self._epochs: int | None = None
        self._epoch = 0  # in which the loop is
        self._next_epoch = 0  # of the job's next step, as far as it is known
        self._stepped = False  # whether the last batch's step was taken
        self.stepping: set[int] = set()  # ids of the parameters of the optimizer that steps
        self._changed: list[dict[str, Any]] | None = None  # as `hyper`, right behind a step
        self._own_weight: float | None = None  # of the present batch, as the user says it
        self.calls = ReportCalls(self.calls.count)
        self._kept: Kept | None = None
        self._before: dict[str, Any] = {"kept": {}}  # see `_begin_step`
        self._round: torch.Tensor | None = None  # the state where a round of own updates begins
        self._schedules = Schedules(self)
        self.window = Window()  # of batches since the last step
        self._go_back_to: Sequence[int] | None = None  # to where that of the others begins
        self._enters = True  # whether no batch was taken yet
        self._errand: Errand | None = None  # that the loop awaits
        self._committed = 0  # steps of the job that are known to be
        self._passed = 0  # steps of the job of which the loop has seen the end
        self._boundary = Boundary(self, self.gatherer)
        self._stand_in = StandIn(self)

    # -- for the worker's thread ---------------------------------------------------------------

    @property
    def is_prepared(self) -> bool:
        """Whether the function has called `prepare` since it began."""
        return self._asked is not None

    @property
    def is_arriving(self) -> bool:
        """Whether the loop has yet to come to where a state is of."""
        return self._arriving is not None

    @property
    def has_ended(self) -> bool:
        """Whether the function has returned."""
        return self.turns.ended is not None

    @property
    def sees_all_steps(self) -> bool:
        """Whether the loop goes through a step in which the worker has no samples, with others that do not count."""
        # one that has not begun has to come to the end of that epoch
        known = self.gatherer.among_batches or self.gatherer.gatherings.among_batches
        return self.together and (known or self._asked is Ask.BEGIN)

    def begin(self) -> Any:
        """Run the function up to `prepare`; return the model that was made there.

        Raises:
            ConfigurationError: it has returned without that. What the function raises is raised too.
        """
        self._go_on()
        self._raise_error()
        if self._asked is not Ask.BEGIN or self.prepared is None:
            raise ConfigurationError(
                "the function that trains returned without calling steepest.prepare(model, optimizer, loader): "
                "call it before the loop"
            )
        return self.prepared.model

    def compute(self, batch: Batch) -> bool:
        """Let the loop go on with a batch; return whether it has taken a step of the optimizer.

        It has not where it asks for another batch before, or has ended. What the function raises is raised. If the
        batch is that of the step that the loop awaits, its gradients serve again.
        """
        here = self._taken is not None and self._taken.where == batch.where
        if here and self._asked is Ask.COMMIT:
            return True
        if here and self._is_uncommitted:
            return False
        amid = here and self._asked is Ask.PARTS and self.gatherer.region is Region.BEFORE
        if not amid or self.lockstep is not None:
            self._pending, self.hyper = batch, None
        if self.lockstep is None:
            self.gatherer.gatherings.drop_before(batch.where.step)
        self._go_on()
        self._raise_error()
        return self._asked is Ask.COMMIT

    @property
    def notes(self) -> list[Reported]:
        """The reports that no committed step has taken to the driver."""
        return self._reports[self._noted :]

    @property
    def in_lockstep(self) -> bool:
        """Whether the loop's steps are not one for each batch."""
        return self.lockstep is not None

    @property
    def leaves_early(self) -> bool:
        """Whether gradients may leave during the backward pass."""
        if self.lockstep is not None or self.sums:
            return False
        return self.prepared is None or not self.prepared.closures

    def awaits(self, where: Where) -> bool:
        """Whether the loop awaits the commit of the step of a batch."""
        return self._asked is Ask.COMMIT and self._taken is not None and self._taken.where == where

    def is_undone(self, where: Where) -> bool:
        """Return whether the loop has to begin anew: the step that it awaits was dealt out in another way."""
        taken = None if self._taken is None else self._taken.where
        in_batch = taken == where if self.lockstep is None else self.lockstep.inside
        if self.gatherer.has_lost_its_seat(in_batch=in_batch):
            return True
        if self.local and taken == where and self._asked is not Ask.COMMIT:
            return True  # the batch was seen, and made no update
        return taken is not None and taken != where and not where.follows(taken)

    def pass_by(self, where: Where) -> None:
        """Note that the worker has no samples in the job's next step."""
        if self.together and where.step >= self._passed:
            self.calls.miss()
        self._passed = max(self._passed, where.step + 1)
        self._committed = max(self._committed, where.step)
        self._see(where)
        if self.together:
            self.gatherer.gatherings.miss(where.step)

    def committed(self, steps: int) -> None:
        """Let the loop go on where it awaits the commit of a step that is one of so many, or the end of an epoch.

        What the function raises meanwhile is raised by the next `compute` or `advance`.
        """
        awaited = self._taken is not None and self._taken.where.step < steps
        self._committed = max(self._committed, steps)
        if awaited:
            self._noted = len(self._reports)
        over = self._asked is Ask.BATCH and self._is_over and self._passed <= steps
        if (self._asked is Ask.COMMIT and awaited) or over or self._asked is Ask.PARTS:
            self._go_on(waits=False)

    def updated(self) -> None:
        """Let the loop go on where it awaits an update that is the worker's own, and not the last of its round."""
        if self._asked is Ask.COMMIT and self._taken is not None and self._taken.where.has_more:
            self._go_on(waits=False)

    def fail(self, error: BaseException) -> None:
        """Have the next `compute` or `advance` raise an error."""
        self._error = self._error or error

    def advance(self, epoch: int, number: int = 0) -> Progress:
        """Between two steps, let the function go on up to where it needs the next batch, or to its end.

        Args:
            epoch: of the job's next step.
            number: of such calls before of which the answers have arrived.
        """
        if self._handed[0] == number:
            self._noted += len(self._handed[1])
            self._reports = self._handed[1] + self._reports
            self._handed = (-1, [])
        self._next_epoch = max(self._next_epoch, epoch)
        now = self.gatherer.gatherings.seat
        amid = self.lockstep is not None and self.lockstep.inside
        if now is not None and self.gatherer.has_lost_its_seat(in_batch=amid, now=now):
            self.rank, self.size = now.rank, now.size
            self.begin_anew(self.state())
        while self._asked is not None and not self._waits_for_the_job:
            self._go_on()
        self._raise_error()
        reports, self._reports, self._noted = self._reports, [], 0
        self._handed = number, reports
        return Progress(self.has_ended, self._epochs, self.in_lockstep, reports)

    @property
    def _waits_for_the_job(self) -> bool:
        """Whether the loop needs a further batch, or the commit of a step that the job has yet to take again."""
        if self._asked is Ask.COMMIT and self.together and self._taken is not None:
            return self._taken.where.step >= self._committed
        return self._asked is Ask.BATCH and not self._has_seen_all

    def state(self) -> dict[str, Any]:
        """Return what the loop has to go on with elsewhere, see `load`."""
        if self._arriving is not None:
            return self._arriving
        inside = self.gatherer.region is Region.BEFORE and not self.in_lockstep
        if self._asked is Ask.PARTS and not inside:
            found = self._boundary.state({} if self._kept is None else self._kept.state())
            if found is not None:
                return found
        if self.is_in_round:
            assert self._round is not None
            return unpack(self._round)
        state = self._state()
        if self.is_in_step:  # its batch is taken again
            kept = state["kept"] | self._before["kept"]
            state |= {**self._before, "kept": kept}
        return state

    def state_at(self, at: str, *, objects: bool) -> dict[str, Any]:
        """Return the state at the end of a step, or of an epoch, see `steepest.loop.standing_in.Boundary`."""
        return {**self._state(at, objects), "step": max(self.at_step + 1, self._passed)}

    @property
    def is_in_step(self) -> bool:
        """Whether the loop has begun a step that is not committed."""
        lockstep = self.lockstep
        if lockstep is not None:
            return lockstep.inside and self._asked in (Ask.COMMIT, Ask.BATCH, Ask.PARTS)
        in_batch = self._asked is Ask.PARTS and self.gatherer.region is Region.BEFORE
        return self._asked is Ask.COMMIT or in_batch or self._adds_up

    @property
    def _adds_up(self) -> bool:
        """Whether the loop has taken batches without a step, of which it may keep the gradients."""
        if not self._keeps_windows or self._asked is not Ask.BATCH or self._taken is None:
            return False
        return not self._stepped and (not self._is_over or self._is_uncommitted)

    @property
    def _is_uncommitted(self) -> bool:
        """Whether the loop has passed through the last batch without a step, which is not known to be committed."""
        if self._asked is not Ask.BATCH or self._taken is None or self._stepped or self.in_lockstep:
            return False
        return self.together and not self.local and self._taken.where.step >= self._committed

    @property
    def _keeps_windows(self) -> bool:
        """Whether a loop that enters between two batches without a step takes the first again."""
        gathers = self.gatherer.among_batches
        return self.together and not (self.local or self.in_lockstep or gathers)

    @property
    def is_in_round(self) -> bool:
        """Whether the loop has begun a round of own updates that is not committed: all of it is taken again."""
        begun = self._taken is not None and self._round is not None
        if not (self.local and begun and self._asked) or self._taken is None:
            return False
        return self._taken.where.has_more or self._asked is Ask.COMMIT

    def _begin_step(self) -> None:
        """Note what is the state of a worker that takes the step from here on that the loop begins now."""
        numbers = {} if self._kept is None else self._kept.numbers()
        self._before = {
            "reports": self.calls.count,
            "since": self.calls.weight,
            "kept": numbers,
        }
        if self.prepared is not None:
            self.prepared.model.note_buffers()
        self._round = pack(self.state_at("", objects=True)) if self.local else None

    def _state(self, at: str = "", objects: bool = True) -> dict[str, Any]:
        """Return the present state.

        Args:
            at: "after" a step, or at the "end" of an epoch, where others gather.
            objects: whether to ask the objects that are kept for their state.
        """
        kept = {} if self._kept is None else self._kept.state(objects)
        return {
            "step": self._steps,
            "batches": self.batches,
            "reports": self.calls.count,
            "since": self.calls.weight,
            "kept": kept,
            "at": at,
            "epoch": self._epoch,
            **self._schedules.state(),
            "gathers": self.gatherer.among_batches,
            "local": self.local,
            "lockstep": None if self.lockstep is None else self.lockstep.state(),
            "window": None if at == "after" else self._window_of_others(),
            "frozen": None if self.prepared is None else self.prepared.model.frozen,
            "closures": self._of_closures() if objects else [],
            **self._scheduled(),
        }

    def _window_of_others(self) -> tuple[int, int] | None:
        """Return with which step a loop that enters here begins, see `Window.begins_before`; None for the next."""
        if self.prepared is None or not (self.is_in_step and self._keeps_windows):
            return None
        return self.window.begins_before(self._steps, self.prepared.model)

    def _of_closures(self) -> list[Any]:
        """Return the states of the optimizers that step in the workers."""
        closures = {} if self.prepared is None else self.prepared.closures
        return [each.state() for each in closures.values()]

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state: a function that stands elsewhere in the job is begun anew.

        Args:
            state: as `state` returned it in this or another worker.
        """
        self.gatherer.among_batches |= state["gathers"]
        if self._asked is not Ask.BEGIN:
            if state["step"] == self._steps:
                return
            self.gatherer.gatherings.drop()
            self.begin_anew(state)
        self._arriving = state

    def begin_anew(self, state: dict[str, Any]) -> None:
        """End the function where it is, and run it again up to `prepare`, to go on from a state."""
        self.turns.end(SetBack())
        self._reset()
        self._arriving = state
        self._reports = [each for each in self._reports if each.number < state["reports"]]
        self._noted = min(self._noted, len(self._reports))
        self.begin()

    @property
    def _steps(self) -> int:
        """The number of the job's steps after which the loop is, with all that it does after a step."""
        if self._taken is None:
            return self._passed
        taken = self._taken.where.step
        before = (
            self._asked is Ask.PARTS
            and self.gatherer.region is Region.BEFORE
            and not self.in_lockstep
        )
        if self._asked is Ask.COMMIT or before or self._is_uncommitted:
            return taken
        return max(self.at_step + 1, min(self._passed, self._committed))

    def _scheduled(self) -> dict[str, Any]:
        """Return the states of schedulers, and what they have set."""
        if self.prepared is None:
            return {"schedulers": [], "groups": []}
        changed = self._changed
        if changed is None:
            changed = self.prepared.model.optimizer_spec.changed(self.prepared.groups)
        schedulers = [each.state_dict() for each in self.prepared.schedulers]
        return {"schedulers": schedulers, "groups": changed}

    def end(self) -> None:
        """End the function where it stands."""
        self.turns.end(SetBack())

    def _go_on(self, waits: bool = True) -> None:
        """Give the turn to the function, until it asks for something or has ended.

        Args:
            waits: for other workers, where it gathers; otherwise it stays there unless all parts are here.
        """
        while True:
            given = None
            if self._errand is not None:
                if not waits:
                    return  # between two steps nothing can be received
                self.turns.show()
                given, self._errand = self._errand.run(), None
            elif self.gatherer.wanted is not None:
                given = self.gatherer.gathered(waits=waits)
                if given is None:
                    return
            asked = self.turns.resume(given)
            if isinstance(asked, Errand):
                self._asked, self._errand = Ask.PARTS, asked
                continue
            if isinstance(asked, GatheringParts):
                self._asked = Ask.PARTS
                self.gatherer.put(asked)
                continue
            if isinstance(asked, Ended):
                self.gatherer.gatherings.end()
                self._asked = self._pending = None
                self._error = self._error or asked.error
            else:
                self._asked = asked
            return

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- for the user's thread -----------------------------------------------------------------

    def _run(self) -> Any:
        _local.session = self
        try:
            with watched(_losses_here), clipping_watched(current), noted(self.unseen):
                return self._function()
        finally:
            _local.session = None

    def prepare(self, prepared: Prepared) -> None:
        """Take what the user has prepared, and wait for the job."""
        if self.prepared is not None and self._arriving is not None:  # the function has begun anew
            self.prepared.model.adopt(prepared.model)
            prepared = replace(prepared, model=self.prepared.model)
        self.prepared, self.lockstep, self.sums = prepared, prepared.lockstep, prepared.sums
        self._stepped_by = [
            {id(p) for group in each.param_groups for p in group["params"]}
            for each in prepared.optimizers
        ]
        for index, each in enumerate(prepared.optimizers):
            optimizer: Any = each
            name = type(optimizer).__name__
            optimizer.add_param_group = partial(_refuse_group, name)
            if index in prepared.closures:
                user: Any = prepared.closures[index].optimizer
                user.step = step_by_closure(
                    self, prepared.closures[index], partial(self.step, index)
                )
                continue
            optimizer.step = self._step_function(index)
            if getattr(optimizer.zero_grad, "__func__", None) is torch.optim.Optimizer.zero_grad:
                optimizer.zero_grad = partial(drop_gradients, each)
            optimizer.state_dict = partial(self._optimizer_state, each)
            optimizer.load_state_dict = partial(_refuse_state, name)
        # all workers take part in each evaluation
        self.gatherer.among_batches |= bool(prepared.closures)
        self._schedules = Schedules(self, prepared.schedulers)
        self.turns.ask(Ask.BEGIN)

    def epochs(self, count: int, first: int = 0) -> Iterator[int]:
        """Yield the numbers of the epochs that are still to come, of `count`, where the user counts from `first`."""
        return (first + epoch for epoch in self._epochs_of(count))

    def _epochs_of(self, count: int) -> Iterator[int]:
        if self.prepared is None:
            raise ConfigurationError(
                "steepest.epochs() before steepest.prepare(): call that before"
            )
        if self._epochs is not None:
            raise ConfigurationError(
                "steepest.epochs() was called twice: the epochs of a job are counted once; make one loop of both"
            )
        self._epochs = count
        pending = self._pending
        self._epoch = self._next_epoch if pending is None else pending.where.epoch or 0
        lockstep = self.prepared.lockstep
        if lockstep is not None:
            yield from self._locked_epochs(lockstep, count)
            return
        if self._arriving is not None and self._arriving["at"]:
            self._begin_to_stand_in(self._arriving)
        elif self._arriving is not None:
            self._take(self._arriving)
        arrived = self._passed > 0 or pending is None
        before = (self._passed if arrived or pending is None else pending.where.step) - 1
        self._begin_ticks(before)
        while self._epoch < count:
            yield self._epoch
            self._epoch += 1

    def _locked_epochs(self, lockstep: Lockstep, count: int) -> Iterator[int]:
        if self._arriving is not None:
            assert self.prepared is not None
            self.prepared.tell_schedulers()
            if (where := self._arriving["lockstep"]) is not None:
                lockstep.load(where)
            if self._arriving["at"] == "end":
                self._begin_to_stand_in(self._arriving)
            elif not lockstep.skip:
                self._take(self._arriving)
        if not self.stands_in:
            self._epoch = lockstep.first_epoch(self.size)
        while self._epoch < count:
            lockstep.begin(self._epoch, self.size)
            self.gatherer.enter(Region.BEFORE, lockstep.number)
            self._boundary.leave()
            self.batches += 1
            self._own_weight = None
            self._seed_for(lockstep.number, 0)
            self._begin_step()
            yield self._epoch
            self._epoch += 1

    def _take(self, state: Mapping[str, Any]) -> None:
        """Set what has arrived, now that all is there of which it is the state."""
        self._arriving = None
        self._passed = state["step"]
        self.calls = ReportCalls(state["reports"], state["since"])
        self._committed = max(self._committed, state["step"])
        self.batches = state["batches"]
        assert self.prepared is not None
        prepared = self.prepared
        prepared.model.restore_buffers()
        if state["groups"]:
            for scheduler, own in zip(prepared.schedulers, state["schedulers"], strict=True):
                scheduler.load_state_dict(own)
            prepared.set_groups(state["groups"])
        if state.get("frozen") is not None:  # not in checkpoints of before
            prepared.model.freeze(state["frozen"])
        for each, own in zip(prepared.closures.values(), state.get("closures", ()), strict=False):
            each.optimizer.load_state_dict(own)
        if state.get("local", 0) == self.local:  # else schedulers have counted something else
            self._schedules.restore(state)
        self._go_back_to = state.get("window")
        if self._kept is not None:
            self._kept.load(state["kept"])

    def _begin_ticks(self, step: int) -> None:
        """Have schedulers count after a step of the job."""
        assert self.prepared is not None
        self.prepared.tell_schedulers()
        self._schedules.begin((step + 1) * (self.local or 1) - 1, together=self.together)

    def _begin_to_stand_in(self, state: Mapping[str, Any]) -> None:
        """Go to the end of a step, or of an epoch, where other workers gather; `state` is taken there."""
        self._stand_in.begin(state["at"])
        self._epoch, self._passed = state["epoch"], state["step"]
        self._committed = max(self._committed, state["step"])

    def last_batch(self) -> Any:
        """Return the worker's batch of the step before, see `steepest.loop.standing_in.Joins`."""
        assert self.prepared is not None
        return self.prepared.model.batch_before(self._passed)

    def take_arrived(self, *, after_step: bool) -> None:
        """Take the state of the others that gather, see `steepest.loop.standing_in.Joins`."""
        assert self._arriving is not None
        self._take(self._arriving)
        self._begin_ticks(self._passed - 1 - after_step)
        self.losses.found, self.clip = [], None

    def enter_after(self) -> None:
        """Note that the loop is behind a step, as the others are."""
        self.gatherer.enter(Region.AFTER, self._passed)

    def on_device(self, batch: Any) -> Any:
        """Return a batch on the device of the model."""
        return batch if self.prepared is None else self.prepared.model.on_device(batch)

    @property
    def counts(self) -> bool:
        """Whether what the loop gives counts: it does not stand in, and the others are no further."""
        lockstep = self.lockstep
        return not (self.stands_in or (lockstep is not None and lockstep.skip))

    @property
    def stands_in(self) -> bool:
        """Whether the loop goes through a batch that does not count, to where others gather."""
        return bool(self._stand_in.at)

    @property
    def has_samples(self) -> bool:
        """Whether the worker has samples in the present batch."""
        if self.lockstep is not None:
            return self.lockstep.samples != 0
        return self._taken is None or self._taken.samples > 0

    @property
    def has_entered(self) -> bool:
        """Whether the loop has come to its epochs."""
        return self._epochs is not None

    def register(self, objects: Mapping[str, Any]) -> Kept:
        """Take what is kept with the job's state."""
        if self._kept is not None:
            raise ConfigurationError(
                "steepest.register() was called twice: give it everything in one call, before steepest.epochs()"
            )
        if self._epochs is not None:
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
        self._kept = Kept(objects)
        return self._kept

    @property
    def _is_over(self) -> bool:
        """Whether the epoch in which the loop is has no further batch."""
        return self._next_epoch > self._epoch

    @property
    def _has_seen_all(self) -> bool:
        """Whether the epoch is over for certain: a step without samples here may yet be dealt out anew."""
        return self._is_over and (self._passed <= self._committed or not self.together)

    def _see(self, where: Where) -> None:
        """Note what the place of a step says of the epoch after it."""
        if where.epoch is not None:
            over = where.is_last and not where.has_more
            self._next_epoch = max(self._next_epoch, where.epoch + over)

    def next_batch(self) -> Any:
        """Return the next batch of the present epoch; StopIteration at its end."""
        if self._epochs is None:
            raise ConfigurationError(
                "the loader was iterated over outside of steepest.epochs(): write `for epoch in steepest.epochs(n)` "
                "around the loop, so that a worker that joins later knows where the job is"
            )
        assert self.prepared is not None
        if (again := self._stand_in.next_batch()) is not None:
            self._enters, self.first = False, self.prepared.model.steps_before(self._passed - 1)
            return again[0]
        if self.lockstep is not None:
            return self._next_locked(self.lockstep)
        pending = self._next_pending()
        if (back := self._batch_again(pending)) is not None:
            return back
        taken = None if self._taken is None else self._taken.where
        new = taken is None or taken.step != pending.where.step
        opens = self.window.opens(pending.where, stepped=self._stepped)
        if new and (opens or not self._keeps_windows):
            self._begin_step()
        if taken is None or self._own_updates(taken) != self._own_updates(pending.where):
            self.whole += pending.whole
        self._pending, self._taken = None, pending
        self.calls.begin_batch()
        self._see(pending.where)
        self.gatherer.enter(Region.BEFORE, pending.where.step)
        self.gatherer.order = []
        self._count(pending.samples)
        return pending.data

    def _next_pending(self) -> Batch:
        """Return the batch that the engine gives next; StopIteration at the end of the present epoch."""
        calls = self.calls.of_batch
        while self._pending is None:
            if self._has_seen_all:
                self.calls.leave_out(calls)
                self._end_epoch()
            self.turns.ask(Ask.BATCH)
        self.calls.leave_out(calls)
        epoch = self._pending.where.epoch or 0
        if epoch > self._epoch:
            self._end_epoch()
        if epoch < self._epoch:
            raise ConfigurationError(
                f"the loop over the loader was left in epoch {epoch} before its end, and begun anew: go through all "
                "batches of an epoch, or return"
            )
        return self._pending

    def _count(self, samples: int) -> None:
        """Count a batch, whose step is yet to be taken."""
        self._stepped = False
        self.batches += 1
        self.samples += samples
        self.weight += samples
        self.calls.weight += samples
        self._batch_weight = float(samples)

    def _batch_again(self, pending: Batch) -> Any:
        """Return a batch that others have taken since their last step, where the loop enters after it; else None."""
        if self._enters and self.together:
            assert self.prepared is not None
            self._enters, back_to = False, self._go_back_to if self._keeps_windows else None
            self.first = self.window.go_back(back_to, pending.where, self.prepared.model)
        if not self.window.until:
            return None
        back = self.window.again(self.seed, self.rank)
        if back is None:
            self.window.until = 0
            return None
        if back.is_first:
            self._begin_step()
        self.whole += back.whole
        self._count(back.samples)
        return back.data

    def take_first(self) -> int:
        """Return how many batches of the epoch there are before the one that was taken; 0 for all but the first."""
        first, self.first = self.first, 0
        return first

    def _end_epoch(self) -> None:
        """Raise StopIteration: the epoch has no further batch."""
        locked = self.lockstep
        number = locked.number if locked is not None else max(self.at_step + 1, self._passed)
        if (self.gatherer.region, self.gatherer.number) != (Region.END, number):
            self.gatherer.enter(Region.END, number)
            self._boundary.mark("end")
            self.calls.end_epoch()
        raise StopIteration

    def _next_locked(self, lockstep: Lockstep) -> Any:
        """Return the next batch of a loop whose steps are not one for each batch."""
        if not lockstep.has_more(self.size):
            self._end_epoch()
        while self._pending is None and not lockstep.skip:
            self.turns.ask(Ask.BATCH)
        self._seed_for(lockstep.number + 1, 0)
        if self._enters:
            self._enters, self.first = False, lockstep.batches_before(self.size)
        self._begin_step()
        batch = lockstep.next_batch(self.rank, self.size)
        self._boundary.leave()
        self.gatherer.enter(Region.BEFORE, lockstep.number)
        self.gatherer.order = []
        self.batches += 1
        self._own_weight = None
        self.calls.weight += lockstep.samples or 0
        return self.prepared.model.on_device(batch) if self.prepared is not None else batch

    def weigh(self, weight: float) -> None:
        """Set the weight of the present batch, in place of its number of samples."""
        if self.sums:
            raise ConfigurationError(
                "steepest.weight() with steepest.prepare(..., reduction='sum'): sums are not weighed; leave one out"
            )
        if self.lockstep is not None:
            before = self._weight_of(self.lockstep) if self.lockstep.samples is not None else 0.0
            if self._own_weight is not None:
                before = self._own_weight
            self._own_weight = checked_weight(weight)
            self.calls.weight += self._own_weight - before
            return
        if self._taken is None and not self.window.goes_back:
            raise ConfigurationError(
                "steepest.weight() before the first batch: call it in the loop over the loader"
            )
        before, self._batch_weight = self._batch_weight, checked_weight(weight)
        self.weight += self._batch_weight - before
        self.calls.weight += self._batch_weight - before

    def _step_function(self, index: int) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None) -> Any:
            if closure is None:
                return self.step(index)
            with torch.enable_grad():
                loss = closure()
            self.step(index)
            return loss

        assert self.prepared is not None
        optimizer = self.prepared.optimizers[index]

        def found(*arguments: Any, **named: Any) -> Any:
            if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
                return with_hooks(optimizer, step, *arguments, **named)
            return step(*arguments, **named)

        vars(found)["_wrapped_by_lr_sched"] = True  # else a scheduler would warn, or wrap it
        return found

    def end_trial(self) -> None:
        """Note that no optimizer tries values any more, see `steepest.loop.closures.Trying`."""
        self.trying = None
        assert self.prepared is not None
        self.prepared.model.put_back()

    @property
    def present_weight(self) -> float:
        """What the present batch weighs."""
        return self._batch_weight if self.lockstep is None else self._weight_of(self.lockstep)

    def check_may_step(self) -> None:
        """Check that the loop is where it may take a step; else ConfigurationError."""
        if self.lockstep is None and (self._taken is None or self._stepped):
            raise ConfigurationError(
                "optimizer.step() was called "
                + ("before the first batch" if self._taken is None else "twice for one batch")
                + ": with one optimizer and a loader each step takes the next batch of that loader, unless "
                "steepest.prepare(..., any_steps=True) says that a batch may have any number of steps"
            )
        if self._epochs is None:
            raise ConfigurationError(
                "optimizer.step() outside of steepest.epochs(): write `for epoch in steepest.epochs(n)` around the "
                "loop, so that a worker that joins later knows where the job is"
            )

    def step(self, index: int = 0) -> None:
        """Push the gradients of an optimizer's parameters; return when the update is committed."""
        assert self.prepared is not None
        prepared = self.prepared
        optimizer, lockstep = prepared.optimizers[index], prepared.lockstep
        vars(optimizer)["_opt_called"] = True  # else a scheduler would warn
        if self._stand_in.step() or self.window.goes_back:
            return
        if lockstep is not None and lockstep.skip:
            self._skip_step(lockstep)
            return
        self.check_may_step()
        prepared.check_groups()
        if not _has_gradient(optimizer):
            raise ConfigurationError(
                "optimizer.step() was called, and no parameter has a gradient: call loss.backward() before it, and "
                "zero_grad() before that"
            )
        if lockstep is not None:
            while self._pending is None:
                self.turns.ask(Ask.BATCH)
            self._taken, self._pending = self._pending, None
            self.weight = self._weight_of(lockstep)
            self.samples = 1 if lockstep.samples is None else lockstep.samples
            self.whole = self.size if lockstep.samples is None else lockstep.whole
        if self.local and self._taken is not None:
            self._schedules.catch_up(self._own_updates(self._taken.where) - 1)
        changed = prepared.model.optimizer_spec.changed(prepared.groups)
        self.hyper, self._changed = changed if any(changed) else None, changed
        self.stepping = self._stepped_by[index]
        self._stepped = True
        self.turns.ask(Ask.COMMIT)
        self._after_step(lockstep)

    def _after_step(self, lockstep: Lockstep | None) -> None:
        """Note that a step is committed, and the loop goes on behind it."""
        self.weight, self.samples, self.whole, self.clip = 0.0, 0, 0, None
        self.losses.found = []
        if lockstep is not None:
            lockstep.taken += 1
            self._begin_step()
            self._seed_for(lockstep.number, lockstep.taken)
            self.gatherer.gatherings.drop_before(lockstep.number)
        else:
            self.gatherer.enter(Region.AFTER, self.at_step + 1)
        self._boundary.mark("" if lockstep is not None else "after")
        self._changed = None

    def _seed_for(self, number: int, taken: int) -> None:
        """Seed all generators for a batch, or round, after so many steps: a worker that joins draws the same there."""
        seed_everything(step_seed(step_seed(self.seed, number, self.rank), taken, 0))

    def _weight_of(self, lockstep: Lockstep) -> float:
        """Return what the present batch weighs in a step."""
        if self._own_weight is not None:
            return self._own_weight
        return 1.0 if lockstep.samples is None else float(lockstep.samples)

    def _skip_step(self, lockstep: Lockstep) -> None:
        """Pass over a step that was committed before this worker came; then take what the others have kept."""
        lockstep.skip -= 1
        lockstep.taken += 1
        self._seed_for(lockstep.number, lockstep.taken)
        self.losses.found, self.clip = [], None
        if not lockstep.skip and self._arriving is not None:
            self._take(self._arriving)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, which servers have, as the optimizer itself would."""
        if self.local:
            raise ConfigurationError(
                f'{type(optimizer).__name__}.state_dict() with strategy="local", where each worker has an optimizer '
                "with a state of its own: steepest.run(..., checkpoints=) keeps them all"
            )
        assert self.prepared is not None
        records = self.turns.ask(Errand(self._read_state))
        found: dict[str, Any] = self.prepared.model.state_of(optimizer, records)
        return found

    def _read_state(self) -> list[Record]:
        """Return what servers have of the optimizer's state; on the worker's thread."""
        assert self.read_state is not None
        return self.read_state()  # another one than before, where the job's processes have changed

    def clip_norm(self, parameters: Iterable[torch.Tensor], most: float) -> torch.Tensor:
        """Have the mean gradient of all workers clipped by its norm; return that of this worker's own."""
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        by_optimizer = [] if self.prepared is None else self.prepared.trained()
        if self.prepared is not None and self.prepared.closures:
            raise ConfigurationError(
                "steepest.clip_grad_norm_() with an optimizer whose step() needs a closure: it sees the mean gradient "
                "of all workers by itself; leave clipping out"
            )
        trained = [p for each in by_optimizer for p in each]
        of_one = [{id(p) for p in each} for each in by_optimizer]
        if given not in (*of_one, {id(p) for p in trained}):
            raise ConfigurationError(
                "steepest.clip_grad_norm_() was given a part of the parameters: the norm is that of the whole "
                "gradient; give model.parameters()"
            )
        self.clip = require_positive("max_norm", most)
        return torch.nn.utils.get_total_norm(
            [p.grad for p in trained if p.grad is not None and id(p) in given]
        )

    @property
    def averaged(self) -> int:
        """The number of samples of which a loss is to be the mean; 0 where it may be something else."""
        if self.sums or self.size == 1 or not self.has_entered or self._own_weight is not None:
            return 0
        if self.lockstep is not None:
            return self.lockstep.samples or 0
        return self._taken.samples if self._taken is not None and self.weight == self.samples else 0

    @property
    def averages(self) -> bool:
        """Whether an update is made of the mean of several workers' gradients."""
        return self.size > 1 and self.together and not self.local

    @property
    def factor(self) -> float:
        """By what the gradients of the step are multiplied, for their mean by samples over workers to be the sum."""
        return self.whole / self.samples if self.sums and self.samples else 1.0

    @property
    def at_step(self) -> int:
        """The number of the job's last step of which the loop has taken all batches; -1 before the first."""
        if self._taken is None:
            return self._passed - 1
        return self._taken.where.step - self._taken.where.has_more

    @property
    def at_update(self) -> int:
        """The number of the last update of which the loop has taken all batches, see `steepest.loop.ticks.Counts`."""
        if self.local and self._taken is not None and self._taken.where.has_more:
            return self._own_updates(self._taken.where, 1) - 1
        return (self.at_step + 1) * (self.local or 1) - 1

    def _own_updates(self, where: Where, more: int = 0) -> int:
        """Return how many updates there are before a batch, and so many batches more: steps', or a worker's own."""
        if not self.local:
            return where.step
        part, parts = where.part
        each = parts // self.size  # batches of a round
        return where.step * self.local + (part % each + more) * self.local // each

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values of the user's, for the driver."""
        if not self.counts:
            return
        found = checked_metrics({name: _number(value) for name, value in values.items()})
        self._reports.append(Reported(*self.calls.called(), found))
        self.fresh |= found


class SetBack(BaseException):
    """Ends a user's function, which begins anew if its job is set back; not an `Exception`, lest it is handled."""


def current() -> Session | None:
    """Return the session in whose function the calling thread is; None outside of any."""
    session: Session | None = getattr(_local, "session", None)
    return session


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Have the calling thread be in no session's function, in this context."""
    session, _local.session = current(), None
    try:
        yield
    finally:
        _local.session = session


def _losses_here() -> Losses | None:
    """Return the losses of the session in whose function the calling thread is."""
    session: Session | None = getattr(_local, "session", None)
    return None if session is None else session.losses


def _number(value: Any) -> Any:
    """Return a value of a report as a number, if it is one."""
    number = as_number(value)
    return value if number is None else number


def _has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any of an optimizer's parameters has a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                return True
    return False


def drop_gradients(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    """Do what torch's `zero_grad` does, which takes 0.1 ms for a profiler that mostly does not run."""
    if not set_to_none or torch._C._autograd._profiler_enabled():
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def with_hooks(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Take a step of an optimizer between its hooks, as `torch.optim.Optimizer` does; return what the step returns."""
    given: Any = (optimizer, *arguments)
    for before in tuple(optimizer._optimizer_step_pre_hooks.values()):
        if (others := before(optimizer, given, named)) is not None:
            given, named = others
    found = step(*given[1:], **named)
    for after in tuple(optimizer._optimizer_step_post_hooks.values()):
        after(optimizer, given, named)
    return found


def _refuse_state(name: str, *_: object, **__: object) -> None:
    raise ConfigurationError(
        f"{name}.load_state_dict() after steepest.prepare(), where its state lies in the job's processes, a part in "
        "each: load it before; steepest.run(..., checkpoints=) goes on with it when the same program is started again"
    )


def _refuse_group(name: str, *_: object, **__: object) -> None:
    raise ConfigurationError(
        f"{name}.add_param_group() after steepest.prepare(): give the optimizer all of its parameters before, frozen "
        "ones too (requires_grad_(False)), and unfreeze them in the loop"
    )
