"""A session: one worker's side of a user's own loop, between the user's thread and the engine's."""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steepest.core.data.sampler import step_seed
from steepest.core.engine.generators import HeldGenerators, seed_everything
from steepest.core.models.protocol import Where, checked_metrics, checked_weight
from steepest.core.models.scalars import as_number
from steepest.core.models.sums import summed_by
from steepest.core.optim.several import WHICH
from steepest.errors import ConfigurationError
from steepest.loop.closures import ByClosure
from steepest.loop.gathering import (
    Gathered,
    GatheringParts,
    GatheringPlace,
    Gatherings,
    Region,
    alone,
    joined,
    packed,
)
from steepest.loop.kept import Kept, pack, unpack
from steepest.loop.lockstep import Lockstep
from steepest.loop.turns import Ended, Turns
from steepest.loop.unseen import Unseen, noted
from steepest.validation import require_positive

_local = threading.local()
_watching: list[None] = []  # an element for each user's function that runs in this process
_torchs_backward: Any = torch.Tensor.backward


class Ask(enum.Enum):
    """What the user's thread asks for when it gives the turn to the worker's."""

    BEGIN = "the job, after prepare()"
    BATCH = "the next batch"
    COMMIT = "the commit of a step"
    PARTS = "what other workers gather"


@dataclass(frozen=True)
class Batch:
    """A batch that the engine has given, which the user's loop has yet to take."""

    data: Any
    where: Where
    samples: int
    whole: int  # samples of all workers


class Reported(NamedTuple):
    """The values of one call of `report` on one worker."""

    number: int  # of the worker's calls before
    samples: int  # of this worker since its call before
    values: Mapping[str, float]


@dataclass(frozen=True)
class Progress:
    """How far a worker's function has come, for the driver.

    Attributes:
        ended: whether it has returned.
        epochs: that it wants in all; None where it has not entered `epochs` yet.
        in_lockstep: whether its steps are not one for each batch, so that it counts epochs itself.
        reports: since this was asked for the last time.
    """

    ended: bool
    epochs: int | None
    in_lockstep: bool
    reports: list[Reported] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """What a user has given to `prepare`.

    Attributes:
        model: made of it, for the worker; a `steepest.core.models.protocol.Model`.
        optimizers: that the function steps.
        schedulers: that it steps too.
        lockstep: where the loop is, if its steps are not one for each batch.
        closures: by number, those of the optimizers of which `optimizers` has what servers have in their place.
        sums: whether losses add up samples; their gradients over workers are to be added up too.
    """

    model: Any
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[LRScheduler | ReduceLROnPlateau]
    lockstep: Lockstep | None = None
    closures: Mapping[int, ByClosure] = field(default_factory=dict)
    sums: bool = False

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        if len(self.optimizers) == 1:
            return self.optimizers[0].param_groups
        several = enumerate(self.optimizers)
        return [{**group, WHICH: i} for i, each in several for group in each.param_groups]

    def set_groups(self, changed: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer's groups the hyperparameters that they were made with, but for the changed ones."""
        spec = self.model.optimizer_spec
        groups = [group for each in self.optimizers for group in each.param_groups]
        for (_, own), now, group in zip(spec.groups, changed, groups, strict=True):
            group.update({k: v for k, v in {**own, **now}.items() if k != WHICH or k in group})

    def check_groups(self) -> None:
        """Check that the optimizer has the parameters that it had, and trains the same; else ConfigurationError."""
        spec, groups = self.model.optimizer_spec, self.groups
        if [len(group["params"]) for group in groups] != [len(names) for names, _ in spec.groups]:
            raise ConfigurationError(
                "the optimizer has got other parameters since steepest.prepare(): give it all of them before, frozen "
                "ones too"
            )


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
    """

    def __init__(
        self,
        function: Callable[[], Any],
        rank: int,
        size: int,
        seed: int = 0,
        together: bool = True,
    ) -> None:
        self.rank, self.size, self.seed, self.together = rank, size, seed, together
        self.unseen = Unseen()  # writes to gradients that torch does not count
        self.prepared: Prepared | None = None
        self._function = function
        self._arriving: dict[str, Any] | None = None  # a state, until the loop is entered
        self._report_count = 0
        self._reports: list[Reported] = []
        self._ticks: list[_Ticks] = []
        self.trying: ByClosure | None = None  # whose step is under way
        self._batch_weight = 0.0  # of the present batch, where each step has its own
        self.gatherings = Gatherings()
        self.gathers_among_batches = (
            False  # whether the loop has gathered elsewhere than at an epoch's end
        )
        self._handed: tuple[int, list[Reported]] = (-1, [])  # reports of the last call of `advance`
        self._reset()

    def _reset(self) -> None:
        """Begin with a function that has not run yet."""
        self._turns = Turns(self._run, f"steepest loop {self.rank}")
        self.gatherings.end(False)
        # of the last step, by parameter group: what differs from the optimizer as it was given to `prepare`
        self.hyper: list[dict[str, Any]] | None = None
        self.weight = 0.0  # of the batches of the last step, or of the step in progress
        self.samples = 0  # likewise
        self.whole = 0  # of all workers, likewise
        # of the last step, or of that in progress: the losses whose backward() was called, and the greatest norm
        self.losses: list[torch.Tensor] = []
        self.clip: float | None = None
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
        self._own_weight: float | None = None  # of the present batch, as the user says it
        self._looked_for_sums = False
        self._since_report = 0  # samples
        self._kept: Kept | None = None
        self._before: dict[str, Any] = {"kept": {}}  # see `_begin_step`
        # of the state that was taken, see `_Ticks`
        self._ticked: list[int | None] = []
        self._unticked: list[int | None] = []
        self._committed = 0  # steps of the job that are known to be
        self._passed = 0  # steps of the job of which the loop has seen the end
        self._wanted: GatheringParts | None = None  # what the loop waits for that gathers
        self._held: HeldGenerators | None = None  # as they were when it began to wait in vain
        self._region, self._number, self._gathered = Region.BEFORE, 0, 0
        # the state from which another worker takes part in what is gathered here, see `_mark`
        self._boundary: torch.Tensor | dict[str, Any] | None = None
        # of a worker that joins while others gather: it sees one batch more, whose steps and reports do not count
        self._standing_in, self._stand_in_given = "", False
        self.order: list[list[int]] = []  # by rank, the samples of the present evaluation so far

    # -- for the worker's thread ---------------------------------------------------------------

    @property
    def is_prepared(self) -> bool:
        """Whether the function has called `prepare` since it began."""
        return self._asked is not None

    @property
    def has_ended(self) -> bool:
        """Whether the function has returned."""
        return self._turns.ended is not None

    @property
    def sees_all_steps(self) -> bool:
        """Whether the loop goes through a step in which the worker has no samples, with others that do not count."""
        # one that has not begun has to come to the end of that epoch
        known = self.gathers_among_batches or self.gatherings.among_batches
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
        taken = None if self._taken is None else self._taken.where
        again = self._region is Region.BEFORE and taken == batch.where and not self.in_lockstep
        if self._asked is Ask.COMMIT and taken == batch.where:
            return True
        if not (self._asked is Ask.PARTS and again):
            self._pending, self.hyper = batch, None
        if not self.in_lockstep:
            self.gatherings.drop_before(batch.where.step)
        self._go_on()
        self._raise_error()
        return self._asked is Ask.COMMIT

    @property
    def in_lockstep(self) -> bool:
        """Whether the loop's steps are not one for each batch."""
        return self.prepared is not None and self.prepared.lockstep is not None

    @property
    def leaves_early(self) -> bool:
        """Whether gradients may leave during the backward pass."""
        closures = self.prepared is not None and bool(self.prepared.closures)
        return not (self.in_lockstep or self.sums or closures)

    def is_undone(self, where: Where) -> bool:
        """Return whether the loop has to begin anew: the step that it awaits was dealt out in another way."""
        taken = None if self._taken is None else self._taken.where
        if self._wanted is not None and self._wanted.who != (self.rank, self.size):
            return True
        return taken is not None and taken != where and not where.follows(taken)

    def pass_by(self, where: Where) -> None:
        """Note that the worker has no samples in the job's next step."""
        self._passed = max(self._passed, where.step + 1)
        self._committed = max(self._committed, where.step)
        self._see(where)
        if self.together:
            self.gatherings.miss(where.step)

    def committed(self, steps: int) -> None:
        """Let the loop go on where it awaits the commit of a step that is one of so many, or the end of an epoch.

        What the function raises meanwhile is raised by the next `compute` or `advance`.
        """
        awaited = self._taken is not None and self._taken.where.step < steps
        self._committed = max(self._committed, steps)
        over = self._asked is Ask.BATCH and self._is_over and self._passed <= steps
        if (self._asked is Ask.COMMIT and awaited) or over or self._asked is Ask.PARTS:
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
            self._reports = self._handed[1] + self._reports
            self._handed = (-1, [])
        self._next_epoch = max(self._next_epoch, epoch)
        while self._asked is not None and not self._waits_for_the_job:
            if self._wanted is not None and self.gatherings.who not in (None, self._wanted.who):
                self.rank, self.size = self.gatherings.who or (self.rank, self.size)
                self.begin_anew(self.state())
            self._go_on()
        self._raise_error()
        reports, self._reports = self._reports, []
        self._handed = number, reports
        locked = self.prepared is not None and self.prepared.lockstep is not None
        return Progress(self.has_ended, self._epochs, locked, reports)

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
        inside = self._region is Region.BEFORE and not self.in_lockstep
        boundary = self._boundary
        if self._asked is not Ask.PARTS or inside or boundary is None:
            state = self._state()
            if self._is_in_step:  # its batch is taken again
                kept = state["kept"] | self._before["kept"]
                state |= {**self._before, "kept": kept}
            return state
        if isinstance(boundary, torch.Tensor):
            return unpack(boundary)
        kept = {} if self._kept is None else self._kept.state()
        return {**boundary, "kept": kept | boundary["kept"]}

    @property
    def _is_in_step(self) -> bool:
        """Whether the loop has begun a step that is not committed."""
        lockstep = None if self.prepared is None else self.prepared.lockstep
        if lockstep is not None:
            return lockstep.inside and self._asked in (Ask.COMMIT, Ask.BATCH, Ask.PARTS)
        in_batch = self._asked is Ask.PARTS and self._region is Region.BEFORE
        return self._asked is Ask.COMMIT or in_batch

    def _begin_step(self) -> None:
        """Note what is the state of a worker that takes the step from here on that the loop begins now."""
        numbers = {} if self._kept is None else self._kept.numbers()
        self._before = {
            "reports": self._report_count,
            "since": self._since_report,
            "kept": numbers,
        }

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
            "reports": self._report_count,
            "since": self._since_report,
            "kept": kept,
            "at": at,
            "epoch": self._epoch,
            "ticked": [ticks.at if ticks.by_step else None for ticks in self._ticks],
            "unticked": [ticks.unticked for ticks in self._ticks],
            "gathers": self.gathers_among_batches,
            "lockstep": None
            if self.prepared is None or self.prepared.lockstep is None
            else self.prepared.lockstep.state(),
            "frozen": None if self.prepared is None else self.prepared.model.frozen,
            "closures": self._of_closures() if objects else [],
            **self._scheduled(),
        }

    def _of_closures(self) -> list[Any]:
        """Return the states of the optimizers that step in the workers."""
        closures = {} if self.prepared is None else self.prepared.closures
        return [each.state() for each in closures.values()]

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state: a function that stands elsewhere in the job is begun anew.

        Args:
            state: as `state` returned it in this or another worker.
        """
        self.gathers_among_batches |= state["gathers"]
        if self._asked is not Ask.BEGIN:
            if state["step"] == self._steps:
                return
            self.begin_anew(state)
        self._arriving = state

    def begin_anew(self, state: dict[str, Any]) -> None:
        """End the function where it is, and run it again up to `prepare`, to go on from a state."""
        self._turns.end(SetBack())
        self._reset()
        self._arriving = state
        self._reports = [each for each in self._reports if each.number < state["reports"]]
        self.begin()

    @property
    def _steps(self) -> int:
        """The number of the job's steps after which the loop is, with all that it does after a step."""
        if self._taken is None:
            return self._passed
        taken = self._taken.where.step
        before = self._asked is Ask.PARTS and self._region is Region.BEFORE and not self.in_lockstep
        if self._asked is Ask.COMMIT or before:
            return taken
        return max(self.at_step + 1, min(self._passed, self._committed))

    def _scheduled(self) -> dict[str, Any]:
        """Return the states of schedulers, and what they have set."""
        if self.prepared is None:
            return {"schedulers": [], "groups": []}
        groups = self.prepared.groups
        return {
            "schedulers": [each.state_dict() for each in self.prepared.schedulers],
            "groups": self.prepared.model.optimizer_spec.changed(groups),
        }

    def end(self) -> None:
        """End the function where it stands."""
        self._turns.end(SetBack())

    def _go_on(self, waits: bool = True) -> None:
        """Give the turn to the function, until it asks for something or has ended.

        Args:
            waits: for other workers, where it gathers; otherwise it stays there unless all parts are here.
        """
        while True:
            given = None
            if self._wanted is not None:
                given = self._parts(self._wanted, waits)
                if given is None:
                    return
                self._wanted = None
            asked = self._turns.resume(given)
            if isinstance(asked, GatheringParts):
                self._asked, self._wanted = Ask.PARTS, asked
                self.gatherings.put(asked)
                continue
            if isinstance(asked, Ended):
                self.gatherings.end()
                self._asked = self._pending = None
                self._error = self._error or asked.error
            else:
                self._asked = asked
            return

    def _parts(self, wanted: GatheringParts, waits: bool) -> list[torch.Tensor] | None:
        """Return the parts of all workers that gather; None where some are missing."""
        if waits and self.gatherings.found(wanted) is None:
            try:
                self._turns.show()  # also where the wait is given up, until the function goes on
                self.gatherings.wait(wanted)
            except BaseException:
                self._held = self._held or HeldGenerators()
                raise
        found = self.gatherings.found(wanted)
        if found is not None and self._held is not None:
            self._held.go_on()
            self._held = None
        return found

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # -- for the user's thread -----------------------------------------------------------------

    def _run(self) -> Any:
        _local.session = self
        try:
            with _watched_losses(), noted(self.unseen):
                return self._function()
        finally:
            _local.session = None

    def prepare(self, prepared: Prepared) -> None:
        """Take what the user has prepared, and wait for the job."""
        if self.prepared is not None and self._arriving is not None:  # the function has begun anew
            self.prepared.model.adopt(prepared.model)
            prepared = replace(prepared, model=self.prepared.model)
        self.prepared = prepared
        for index, each in enumerate(prepared.optimizers):
            optimizer: Any = each
            if index in prepared.closures:
                user: Any = prepared.closures[index].optimizer
                user.step = self._step_by_closure(index)
                continue
            optimizer.step = self._step_function(index)
            optimizer.state_dict = optimizer.load_state_dict = partial(
                _refuse_state, type(optimizer).__name__
            )
        # all workers take part in each evaluation
        self.gathers_among_batches |= bool(prepared.closures)
        self._ticks = [_Ticks(self, scheduler) for scheduler in prepared.schedulers]
        self._turns.ask(Ask.BEGIN)

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
            self._stand_in(self._arriving)
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
            self._tell_schedulers()
            if (where := self._arriving["lockstep"]) is not None:
                lockstep.load(where)
            if self._arriving["at"] == "end":
                self._stand_in(self._arriving)
            elif not lockstep.skip:
                self._take(self._arriving)
        if not self._standing_in:
            self._epoch = lockstep.first_epoch(self.size)
        while self._epoch < count:
            lockstep.begin(self._epoch, self.size)
            self._enter(Region.BEFORE, lockstep.number)
            self._boundary = None
            self.batches += 1
            self._own_weight = None
            self._seed_for(lockstep.number, 0)
            self._begin_step()
            yield self._epoch
            self._epoch += 1

    def _take(self, state: Mapping[str, Any]) -> None:
        """Set what has arrived, now that all is there of which it is the state."""
        self._arriving = None
        self._passed, self._report_count = state["step"], state["reports"]
        self._committed = max(self._committed, state["step"])
        self._since_report = state["since"]
        self.batches = state["batches"]
        assert self.prepared is not None
        prepared = self.prepared
        if state["groups"]:
            for scheduler, own in zip(prepared.schedulers, state["schedulers"], strict=True):
                scheduler.load_state_dict(own)
            prepared.set_groups(state["groups"])
        if state.get("frozen") is not None:  # not in checkpoints of before
            prepared.model.freeze(state["frozen"])
        for each, own in zip(prepared.closures.values(), state.get("closures", ()), strict=False):
            each.optimizer.load_state_dict(own)
        self._ticked, self._unticked = state["ticked"], state.get("unticked", [])
        if self._kept is not None:
            self._kept.load(state["kept"])

    def _begin_ticks(self, step: int) -> None:
        """Have schedulers count after a step of the job; those of the worker whose state was taken may be behind."""
        self._tell_schedulers()
        none: list[int | None] = [None] * len(self._ticks)
        found = self._ticked if self.together and self._ticked else none
        unticked = self._unticked or none
        for ticks, at, batches in zip(self._ticks, found, unticked, strict=True):
            ticks.begin(step, 0 if at is None else step - at, batches)

    def _tell_schedulers(self) -> None:
        """Have torch's schedulers know that optimizers have stepped, in another worker: they would warn."""
        for optimizer in self.prepared.optimizers if self.prepared is not None else ():
            vars(optimizer)["_opt_called"] = True

    def _stand_in(self, state: Mapping[str, Any]) -> None:
        """Go to the end of a step, or of an epoch, where other workers gather; `state` is taken there."""
        self._standing_in, self._stand_in_given = state["at"], False
        self._epoch, self._passed = state["epoch"], state["step"]
        self._committed = max(self._committed, state["step"])

    def _end_stand_in(self) -> None:
        """Take the state of the others that gather, now that all is done that they have done before."""
        at, self._standing_in = self._standing_in, ""
        assert self._arriving is not None
        self._take(self._arriving)
        self._begin_ticks(self._passed - 1 - (at == "after"))
        self.losses, self.clip = [], None

    def _enter(self, region: Region, number: int) -> None:
        """Note in which part of the loop gatherings are from now on."""
        if (region, number) != (self._region, self._number):
            self._region, self._number, self._gathered = region, number, 0

    def _mark(self, at: str) -> None:
        """Keep the state from which a worker that joins takes part in what is gathered from now on."""
        self._boundary = None
        if self.size > 1 and self.together:
            # objects may be large: their state is kept from before only where the loop is known to gather
            whole = at == "end" or self.gathers_among_batches
            step = max(self.at_step + 1, self._passed)
            state = {**self._state(at, whole), "step": step}
            self._boundary = pack(state, self.batches) if whole else state

    def on_device(self, batch: Any) -> Any:
        """Return a batch on the device of the model."""
        return batch if self.prepared is None else self.prepared.model.on_device(batch)

    def gather(self, value: Any) -> Any:
        """Return the values of all workers, see `steepest.gather`."""
        if self._epochs is None:
            raise ConfigurationError(
                "steepest.gather() before steepest.epochs(): call it in the loop, or after it, so that a worker that "
                "joins later knows which values are meant"
            )
        if not self.together:
            raise ConfigurationError(
                "steepest.gather() where workers do not wait for each other: report() gives the driver means over "
                'them; or give strategy="ps" or "allreduce"'
            )
        if self.size == 1 or self._standing_in:
            return alone(value)
        locked = None if self.prepared is None else self.prepared.lockstep
        self.gathers_among_batches |= self._region is not Region.END
        place = GatheringPlace(self._number, self._region, self._gathered)
        self._gathered += 1
        before = self._region is Region.BEFORE
        none = before and (self._taken is not None and not self._taken.samples)
        if locked is not None:
            none = before and locked.samples == 0
        own = packed(value, counts=not none)
        parts = self._turns.ask(GatheringParts(place, own, (self.rank, self.size)))

        def follow(leaf: torch.Tensor, whole: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            back = place._replace(nth=self._gathered)
            self._gathered += 1
            found: torch.Tensor = Gathered.apply(leaf, whole, rows, partial(self._summed, back))  # type: ignore[no-untyped-call]
            return found

        return joined(value, parts, self.order, self.rank, follow)

    def _summed(self, place: GatheringPlace, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of all workers' gradients of what was gathered, by what their losses weigh in the mean."""
        weight = 1.0 if self.sums else self._present_weight
        own = gradient * weight if weight else torch.zeros_like(gradient)
        parts = self._turns.ask(
            GatheringParts(place, pack({"leaves": [own]}), (self.rank, self.size))
        )
        found = [unpack(part)["leaves"][0] for part in parts]
        total = torch.stack([each for each in found if each.shape == gradient.shape]).sum(dim=0)
        return (total / weight if weight else total).to(gradient)

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
            self._next_epoch = max(self._next_epoch, where.epoch + where.is_last)

    def next_batch(self) -> Any:
        """Return the next batch of the present epoch; StopIteration at its end."""
        if self._epochs is None:
            raise ConfigurationError(
                "the loader was iterated over outside of steepest.epochs(): write `for epoch in steepest.epochs(n)` "
                "around the loop, so that a worker that joins later knows where the job is"
            )
        lockstep = None if self.prepared is None else self.prepared.lockstep
        if self._standing_in and not self._stand_in_given:
            self._stand_in_given = True
            assert self.prepared is not None
            return self.prepared.model.batch_before(self._passed)
        if self._standing_in:
            self._end_stand_in()
        if lockstep is not None:
            return self._next_locked(lockstep)
        while self._pending is None:
            if self._has_seen_all:
                self._end_epoch()
            self._turns.ask(Ask.BATCH)
        pending = self._pending
        epoch = pending.where.epoch or 0
        if epoch > self._epoch:
            self._end_epoch()
        if epoch < self._epoch:
            raise ConfigurationError(
                f"the loop over the loader was left in epoch {epoch} before its end, and begun anew: go through all "
                "batches of an epoch, or return"
            )
        if self._taken is None or self._taken.where.step != pending.where.step:
            self._begin_step()
            self.whole += pending.whole
        self._pending, self._taken, self._stepped = None, pending, False
        self._see(pending.where)
        self._enter(Region.BEFORE, pending.where.step)
        self.order = []
        self.batches += 1
        self.samples += pending.samples
        self.weight += pending.samples
        self._batch_weight = float(pending.samples)
        self._since_report += pending.samples
        return pending.data

    def _end_epoch(self) -> None:
        """Raise StopIteration: the epoch has no further batch."""
        locked = None if self.prepared is None else self.prepared.lockstep
        number = locked.number if locked is not None else max(self.at_step + 1, self._passed)
        if (self._region, self._number) != (Region.END, number):
            self._enter(Region.END, number)
            self._mark("end")
        raise StopIteration

    def _next_locked(self, lockstep: Lockstep) -> Any:
        """Return the next batch of a loop whose steps are not one for each batch."""
        if not lockstep.has_more(self.size):
            self._end_epoch()
        while self._pending is None and not lockstep.skip:
            self._turns.ask(Ask.BATCH)
        self._seed_for(lockstep.number + 1, 0)
        self._begin_step()
        batch = lockstep.next_batch(self.rank, self.size)
        self._boundary = None
        self._enter(Region.BEFORE, lockstep.number)
        self.order = []
        self.batches += 1
        self._own_weight = None
        self._since_report += lockstep.samples or 0
        return self.prepared.model.on_device(batch) if self.prepared is not None else batch

    def weigh(self, weight: float) -> None:
        """Set the weight of the present batch, in place of its number of samples."""
        if self.sums:
            raise ConfigurationError(
                "steepest.weight() with steepest.prepare(..., reduction='sum'): sums are not weighed; leave one out"
            )
        if self.prepared is not None and self.prepared.lockstep is not None:
            self._own_weight = checked_weight(weight)
            return
        if self._taken is None:
            raise ConfigurationError(
                "steepest.weight() before the first batch: call it in the loop over the loader"
            )
        self._batch_weight = checked_weight(weight)
        self.weight += self._batch_weight - self._taken.samples

    def _step_function(self, index: int) -> Callable[..., Any]:
        def step(closure: Callable[[], Any] | None = None) -> Any:
            if closure is None:
                return self.step(index)
            with torch.enable_grad():
                loss = closure()
            self.step(index)
            return loss

        step.__dict__["_wrapped_by_lr_sched"] = True  # else a scheduler would warn, or wrap it
        return step

    def _step_by_closure(self, index: int) -> Callable[..., Any]:
        def step(closure: Callable[[], Any]) -> Any:
            assert self.prepared is not None
            by, lockstep = self.prepared.closures[index], self.prepared.lockstep
            vars(by.optimizer)["_opt_called"] = True  # else a scheduler would warn
            if self._standing_in or (lockstep is not None and lockstep.skip):
                with torch.enable_grad():
                    loss = closure()
                self.step(index)
                return loss
            self._check_may_step(lockstep)
            self.trying = by
            loss = by.step(partial(self._evaluated, by, closure), self._end_trial)
            self.losses = self.losses[:1]
            self.step(index)
            by.end_step()
            return loss

        step.__dict__["_wrapped_by_lr_sched"] = True  # else a scheduler would warn, or wrap it
        return step

    def _end_trial(self) -> None:
        self.trying = None
        assert self.prepared is not None
        self.prepared.model.put_back()

    def _evaluated(self, by: ByClosure, closure: Callable[[], Any]) -> torch.Tensor:
        """Evaluate the loss; return its mean over the workers by weight, and leave the gradients' means."""
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).detach()
        place, weight = (
            GatheringPlace(self._number, self._region, self._gathered),
            self._present_weight,
        )
        self._gathered += 1
        if self.size == 1:
            return loss
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in by.parameters]
        own = [torch.stack([loss.double().cpu(), torch.tensor(weight).double()]), *gradients]
        parts = self._turns.ask(
            GatheringParts(place, pack({"leaves": own}), (self.rank, self.size))
        )
        found = [unpack(part)["leaves"] for part in parts]
        found = [leaves for leaves in found if len(leaves[0]) and leaves[0][1]]
        total = sum(float(leaves[0][1]) for leaves in found)
        for at, parameter in enumerate(by.parameters, 1):
            mean = sum(leaves[at] * (float(leaves[0][1]) / total) for leaves in found)
            if isinstance(mean, torch.Tensor):
                parameter.grad = mean.to(parameter)
        losses = [leaves[0][0] * (leaves[0][1] / total) for leaves in found]
        return torch.stack(losses).sum().to(loss) if losses else loss

    @property
    def _present_weight(self) -> float:
        """What the present batch weighs."""
        locked = None if self.prepared is None else self.prepared.lockstep
        return self._batch_weight if locked is None else self._weight_of(locked)

    def _check_may_step(self, lockstep: Lockstep | None) -> None:
        """Check that the loop is where it may take a step; else ConfigurationError."""
        if lockstep is None and (self._taken is None or self._stepped):
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
        if self._standing_in:
            if self._standing_in != "end":
                self._end_stand_in()
                self._enter(Region.AFTER, self._passed)
            return
        if lockstep is not None and lockstep.skip:
            self._skip_step(lockstep)
            return
        self._check_may_step(lockstep)
        prepared.check_groups()
        if all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            raise ConfigurationError(
                "optimizer.step() was called, and no parameter has a gradient: call loss.backward() before it, and "
                "zero_grad() before that"
            )
        if lockstep is not None:
            while self._pending is None:
                self._turns.ask(Ask.BATCH)
            self._taken, self._pending = self._pending, None
            self.weight = self._weight_of(lockstep)
            self.samples = 1 if lockstep.samples is None else lockstep.samples
            self.whole = self.size if lockstep.samples is None else lockstep.whole
        changed = prepared.model.optimizer_spec.changed(prepared.groups)
        self.hyper = changed if any(changed) else None
        self.stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._stepped = True
        self._turns.ask(Ask.COMMIT)
        self._after_step(lockstep)

    def _after_step(self, lockstep: Lockstep | None) -> None:
        """Note that a step is committed, and the loop goes on behind it."""
        self.weight, self.samples, self.whole, self.losses, self.clip = 0.0, 0, 0, [], None
        if lockstep is not None:
            lockstep.taken += 1
            self._begin_step()
            self._seed_for(lockstep.number, lockstep.taken)
            self.gatherings.drop_before(lockstep.number)
        else:
            self._enter(Region.AFTER, self.at_step + 1)
        self._mark("" if lockstep is not None else "after")

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
        self.losses, self.clip = [], None
        if not lockstep.skip and self._arriving is not None:
            self._take(self._arriving)

    def clip_norm(self, parameters: Iterable[torch.Tensor], most: float) -> torch.Tensor:
        """Have the mean gradient of all workers clipped by its norm; return that of this worker's own."""
        given = {id(parameter) for parameter in parameters if parameter.requires_grad}
        optimizers = () if self.prepared is None else self.prepared.optimizers
        if self.prepared is not None and self.prepared.closures:
            raise ConfigurationError(
                "steepest.clip_grad_norm_() with an optimizer whose step() needs a closure: it sees the mean gradient "
                "of all workers by itself; leave clipping out"
            )
        groups = [group for each in optimizers for group in each.param_groups]
        trained = [p for group in groups for p in group["params"] if p.requires_grad]
        of_one = [
            {id(p) for group in each.param_groups for p in group["params"] if p.requires_grad}
            for each in optimizers
        ]
        if given not in (*of_one, {id(parameter) for parameter in trained}):
            raise ConfigurationError(
                "steepest.clip_grad_norm_() was given a part of the parameters: the norm is that of the whole "
                "gradient; give model.parameters()"
            )
        self.clip = require_positive("max_norm", most)
        return torch.nn.utils.get_total_norm(
            [p.grad for p in trained if p.grad is not None and id(p) in given]
        )

    def look_for_sums(self, loss: torch.Tensor) -> None:
        """Check once, where several workers make an update, that a loss is a mean; ConfigurationError: it is a sum."""
        if self._looked_for_sums or self.sums or self.size == 1 or self._epochs is None:
            return
        lockstep = None if self.prepared is None else self.prepared.lockstep
        taken = 0 if self._taken is None else self._taken.samples
        samples = taken if lockstep is None else lockstep.samples or 0
        said = self._own_weight is not None or (lockstep is None and self.weight != self.samples)
        if samples < 2 or said:
            return
        self._looked_for_sums = True
        if (found := summed_by(loss, samples)) is not None and found[1]:
            raise ConfigurationError(
                f"the loss adds up the samples of its batch ({found[0]}) and is taken for their mean, with which the "
                "updates of two workers would be half as large as those of one: give steepest.prepare(..., "
                "reduction='sum'), or take the mean"
            )

    @property
    def sums(self) -> bool:
        """Whether losses add up samples."""
        return self.prepared is not None and self.prepared.sums

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

    def report(self, values: Mapping[str, Any]) -> None:
        """Take values of the user's, for the driver."""
        lockstep = None if self.prepared is None else self.prepared.lockstep
        if self._standing_in or (lockstep is not None and lockstep.skip):
            return
        found = checked_metrics({name: _number(value) for name, value in values.items()})
        self._reports.append(Reported(self._report_count, self._since_report, found))
        self._report_count += 1
        self._since_report = 0
        self.fresh |= found


class SetBack(BaseException):
    """Ends a user's function, which begins anew if its job is set back; not an `Exception`, lest it is handled."""


class _Ticks:
    """A scheduler's steps, which follow those of the job: a worker without samples in a step misses none.

    A scheduler that is stepped once after each step of the optimizer counts the steps of the job; one that was ever
    stepped after several, as at the end of an epoch, counts calls, also at the end of an epoch of one step.
    """

    def __init__(self, session: Session, scheduler: LRScheduler | ReduceLROnPlateau) -> None:
        self._session = session
        own = type(scheduler)
        self._step: Callable[..., None] = partial(own.step, scheduler)
        self.at, self._batches = -1, 0  # at its last step: the job's, and the worker's batches
        self.by_step = False  # whether that was after a step of the optimizer
        self._counts_calls = False
        # an attribute of the scheduler's own would be part of its state_dict()
        ticking = {"step": lambda _, *arguments, **named: self.tick(*arguments, **named)}
        scheduler.__class__ = type(own.__name__, (own,), ticking)

    @property
    def unticked(self) -> int | None:
        """The worker's batches since the scheduler's last step, if that counts calls; else None."""
        since = self._session.batches - self._batches
        return since if self._counts_calls or since > 1 else None

    def begin(self, step: int, behind: int = 0, unticked: int | None = None) -> None:
        """Begin to count after a step of the job.

        Args:
            step: its number.
            behind: steps that the scheduler has yet to make.
            unticked: of the scheduler whose state this one has.
        """
        for _ in range(behind):
            self._step()
        self._counts_calls = unticked is not None
        self.at, self._batches = step, self._session.batches - (unticked or 0)

    def tick(self, *arguments: Any, **named: Any) -> None:
        """Step the scheduler as often as the job has stepped, if it is stepped by step."""
        now, batches = self._session.at_step, self._session.batches
        prepared = self._session.prepared
        if prepared is None or prepared.lockstep is not None:
            self._step(*arguments, **named)
            return
        since = batches - self._batches
        self._counts_calls |= since > 1
        by_step = since == 1 and not (self._counts_calls or arguments or named)
        times = max(now - self.at, 0) if by_step else 1
        self.at, self._batches, self.by_step = now, batches, by_step
        for _ in range(times):
            self._step(*arguments, **named)


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


@contextlib.contextmanager
def _watched_losses() -> Iterator[None]:
    """Have sessions see the losses whose backward pass runs, for the job's history, while any function runs."""
    _watching.append(None)
    if len(_watching) == 1:
        setattr(torch.Tensor, "backward", _backward)  # noqa: B010 - a type checker would refuse it
    try:
        yield
    finally:
        _watching.pop()
        if not _watching:
            setattr(torch.Tensor, "backward", _torchs_backward)  # noqa: B010


@functools.wraps(_torchs_backward)
def _backward(loss: torch.Tensor, *arguments: Any, **named: Any) -> Any:
    session = current()
    if session is not None and loss.dim() == 0:
        session.look_for_sums(loss)
        session.losses.append(loss.detach())
    return _torchs_backward(loss, *arguments, **named)


def _number(value: Any) -> Any:
    """Return a value of a report as a number, if it is one."""
    number = as_number(value)
    return value if number is None else number


def _refuse_state(name: str, *_: object, **__: object) -> None:
    raise ConfigurationError(
        f"the state of {name} lies on the job's servers after steepest.prepare(): load it before, and keep it by "
        "steepest.run(..., checkpoints=)"
    )
