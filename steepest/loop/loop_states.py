"""The states of a user's own loop: what another worker needs to go on from the loop's place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from steepest.loop.closures import ByClosure
from steepest.loop.gathering import Region
from steepest.loop.job_view import JobView
from steepest.loop.kept import Kept, pack, unpack
from steepest.loop.prepared import NOTHING, Ask
from steepest.loop.script_settings import ScriptSettings

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


@dataclass(frozen=True)
class BegunRound:
    """A round of own updates that a loop has begun.

    Attributes:
        number: of the rounds that the worker had begun before; 0 where a step is a round.
        step: of the job.
        state: of the loop where it takes the first batch, as `pack` returns it.
        buffers: of the model there.
        said: the number of reports that the pushes of earlier rounds have carried.
    """

    number: int
    step: int
    state: torch.Tensor
    buffers: dict[str, torch.Tensor]
    said: int = 0


class Rounds:
    """The rounds of own updates of a loop: the last one, and the one before while it may have to be undone.

    Attributes:
        begun: the rounds that are not known to be decided on.
        said: the number of reports that the last push has carried.
    """

    def __init__(self) -> None:
        self.begun: list[BegunRound] = []
        self.said = 0
        self._present = 0  # that the engine has begun, where workers do not wait for each other
        self._given_up: int | None = None

    def begin(self, number: int, given_up: int | None) -> None:
        """Note that the engine begins a round; `given_up`: the first that the loop is to undo before, or None."""
        self._present = number
        if given_up is not None:
            self._given_up = given_up if self._given_up is None else min(given_up, self._given_up)

    def decided_before(self, number: int) -> None:
        """Note that all rounds before one are decided on."""
        self.begun = [each for each in self.begun if each.number >= number]

    @property
    def is_given_up(self) -> bool:
        """Whether the loop has to undo rounds, if it has begun them."""
        return self._given_up is not None

    def given_up_is_begun(self) -> bool:
        """Return whether the loop has begun what it has to undo."""
        return any(each.number >= (self._given_up or 0) for each in self.begun)

    def take_given_up(self) -> BegunRound | None:
        """Return the first round that the loop has to undo, if it has begun any, and forget these."""
        number, self._given_up = self._given_up, None
        return None if number is None else self.take(lambda each: each.number >= number)

    def take_step(self, step: int) -> BegunRound | None:
        """Return the round that is a step of the job, if the loop has begun it, and forget it and later ones."""
        return self.take(lambda each: each.step >= step)

    def take(self, is_undone: Callable[[BegunRound], bool]) -> BegunRound | None:
        """Return the first of the rounds that are undone, and forget them; None if there are none."""
        first = next((each for each in self.begun if is_undone(each)), None)
        self.begun = [each for each in self.begun if not is_undone(each)]
        return first

    def opens(self) -> bool:
        """Return whether a batch that the loop takes is the first of the engine's present round."""
        return not self.begun or self.begun[-1].number != self._present

    def open(
        self, step: int, state: torch.Tensor, buffers: dict[str, torch.Tensor], *, ahead: bool
    ) -> None:
        """Note that the loop begins a round; `ahead`: before the one before is decided on."""
        begun = BegunRound(self._present, step, state, buffers, self.said)
        self.begun = [*(self.begun[-1:] if ahead else ()), begun]


class LoopStates:
    """The states of one loop; either side asks for them, while the other waits.

    Args:
        loop: whose states they are.
        job: what is known of the job.

    Attributes:
        tops: by epoch, what the loop had when it entered that, see `open_epoch`; of the epochs in which a worker
            may have to begin.
        kept: the objects that the user keeps; None if there are none.
        settings: the script's settings of optimizers and schedulers; None before `prepare`.
        rounds: where the loop is in rounds of own updates.
    """

    def __init__(self, loop: UserLoop, job: JobView) -> None:
        self._loop, self._job = loop, job
        self._before: dict[str, Any] = {"kept": {}}  # see `begin_step`
        # where the loop began the first batch of the present sum of gradients, and where
        # it began the present batch
        self._entries: list[dict[str, Any]] = [{}, {}]
        self.tops: dict[int, dict[str, Any]] = {}
        self._objects: torch.Tensor | None = None  # see `hold_objects`
        self.rounds = Rounds()
        self.kept: Kept | None = None
        self.settings: ScriptSettings | None = None
        self._end: torch.Tensor | None = None  # see `hold_end`

    def state(self) -> dict[str, Any]:
        """Return the state with which the loop goes on elsewhere, see `load`."""
        begun = self.begun
        if self._loop.entry.arriving is not None:
            return self._loop.entry.arriving if begun is None else unpack(begun.state)
        if self._is_at_top and not self._is_amid_sum:
            top = self.tops[self._loop.batches.epoch]
            present = self._present()
            return {**present, **top["set"], "kept": {**present["kept"], **kept_at(top)}}
        ends = self._loop.gatherer.region is Region.END and self._loop.prepared.cursor is None
        if ends and self._job.asked is Ask.PARTS and self._end is not None:
            # what it has reported since then is not reported again
            return {**unpack(self._end), "reported": self._loop.next_report}
        if begun is not None:
            return unpack(begun.state)
        state = self._present()
        if self.is_in_step:  # its batch is taken again
            kept = state["kept"] | self._before["kept"]
            state |= {**self._before, "kept": kept}
        if self._job.asked is Ask.PARTS and self._objects is not None:
            state["kept"] |= unpack(self._objects)
            state["reported"] = (
                self._loop.next_report
            )  # what it has reported since then is not reported again
        return state

    def hold_objects(self) -> None:
        """Keep the user's objects as they are here, for workers that take part in what is gathered next.

        They may be large: only where the loop is known to gather among its batches, and at an epoch's last batch.
        """
        loop, self._objects = self._loop, None
        if loop.job.size > 1 and self.kept is not None:
            self._objects = pack(self.kept.states())

    def hold_end(self) -> None:
        """Keep the state at an epoch's end, for workers that join and take part in what is gathered there."""
        loop, self._end = self._loop, None
        if loop.job.size > 1 and loop.job.kind.together:
            self._end = pack(self.state_at("end", objects=True), loop.batches.count)

    def let_objects_go(self) -> None:
        """Keep no objects as they were from now on."""
        self._objects = None

    def state_at(self, at: str, *, objects: bool) -> dict[str, Any]:
        """Return the state where a round of own updates begins, or at the end of an epoch."""
        return {**self._present(at, objects), "step": max(self._loop.at_step + 1, self._job.passed)}

    @property
    def is_in_step(self) -> bool:
        """Whether the loop is amid a batch, or awaits a commit: what follows its last step there is done again."""
        cursor = self._loop.prepared.cursor
        if cursor is not None:
            return cursor.place.inside or self._is_amid_sum
        in_batch = self._job.asked is Ask.PARTS and self._loop.gatherer.region is Region.BEFORE
        return self._job.asked is Ask.COMMIT or in_batch

    @property
    def _is_amid_sum(self) -> bool:
        """Whether the loop is between two batches of one sum of gradients."""
        cursor = self._loop.prepared.cursor
        if cursor is None or cursor.place.inside or not cursor.place.batch:
            return False
        waits = self._job.asked is Ask.BATCH or self._is_at_top
        held, is_first = self._loop.steps.held, cursor.has_loader and not self._loop.steps.stepping
        return waits and (held.holds or ((held.adds_up or is_first) and not cursor.place.step))

    @property
    def begun(self) -> BegunRound | None:
        """The first round of own updates that the loop has begun and that is not committed; None if there is none."""
        begun, taken = self.rounds.begun, self._loop.batches.taken
        if not begun or not self._job.asked:
            return None
        if not self._loop.job.kind.together:
            return begun[0]
        for each in begun[:-1]:
            if each.step >= self._job.committed:
                return each
        last = taken is not None and taken.where.step == begun[-1].step
        amid = taken is not None and (taken.where.has_more or self._job.asked is Ask.COMMIT)
        if not last:  # the loop begins it anew
            return begun[-1] if begun[-1].step >= self._job.committed else None
        return begun[-1] if amid else None

    def begin_step(self) -> None:
        """Note what is the state of a worker that takes the step from here on that the loop begins now."""
        self._before = self._set_here()
        for each in self._in_workers if self._loop.prepared.cursor is not None else ():
            each.note()
        if self._loop.prepared is not NOTHING:
            self._loop.prepared.model.note_buffers()

    @property
    def _is_at_top(self) -> bool:
        """Whether the loop is between entering an epoch and its first pass over the loader."""
        cursor = self._loop.prepared.cursor
        at_top = self._loop.gatherer.region is Region.TOP and self._job.asked is not None
        return at_top and cursor is not None and not cursor.place.passes

    def open_epoch(self) -> None:
        """Keep the state at an epoch's beginning, for a loop that enters later and runs the code before the batches.

        Where the loop enters later itself, it gets what the others had.
        """
        loop, gathered = self._loop, list[torch.Tensor]()
        assert loop.prepared.cursor is not None
        loop.gatherer.gathered_at_top = gathered
        if loop.entry.arriving is not None or loop.batches.epoch in self.tops:
            if (top := self.tops.get(loop.batches.epoch)) is not None:
                gathered.extend(top["gathered"])
                self.tops[loop.batches.epoch] = {**top, "gathered": gathered}
            return
        objects = {} if self.kept is None else self.kept.states()
        top = {"set": self._set_here(), "objects": pack(objects) if objects else None}
        first = loop.prepared.cursor.first_epoch if loop.steps.held.holds else loop.batches.epoch
        self.tops = {epoch: each for epoch, each in self.tops.items() if epoch >= first}
        self.tops[loop.batches.epoch] = {**top, "gathered": gathered}

    def close_top(self) -> None:
        """Note that the loop comes to the epoch's first batch: values that have not changed by then are kept once."""
        top = self.tops.get(self._loop.batches.epoch)
        if top is None or top["objects"] is None or self.kept is None:
            return
        if torch.equal(top["objects"], pack(self.kept.states())):
            top["objects"] = None

    def begin_sum(self) -> None:
        """Note that the gradients of the batch, or round, which begins are added to none of batches before."""
        self.begin_step()
        self._entries = [self._before, self._before]

    def begin_batch(self) -> None:
        """Note that the gradients of the batch, or round, which begins are added to those of batches before."""
        self._entries = [self._entries[0], self._set_here()]

    def forget_before(self) -> None:
        """Note that no gradients of batches before are part of a later step."""
        self._entries = [self._entries[1], self._entries[1]]

    def _set_here(self) -> dict[str, Any]:
        """Return the part of the state that a loop sets by hand, which may change before the next step."""
        loop = self._loop
        state = {
            "reports": loop.next_report,
            "since": dict(loop.reports.since),
            "kept": {} if self.kept is None else self.kept.state(objects=False),
        }
        if loop.prepared.cursor is not None:
            state["weights"] = loop.weights.sum.state()
        if loop.prepared.cursor is not None:  # what is between two steps of a batch is done again
            state |= self._scheduled()
        elif loop.prepared is not NOTHING:  # so is what the loop sets before the step
            state["groups"] = loop.prepared.model.optimizer_spec.changed(loop.prepared.groups)
        return state

    def begin_round(self, step: int) -> None:
        """Note the state for a worker that takes a round of own updates, of a step of the job, from here on."""
        if self._loop.job.kind.ahead and self.rounds.begun:  # the round before that is decided on
            self._loop.reports.note_before(self.rounds.begun[-1].said)
        state = pack(self.state_at("", objects=True))
        self.rounds.open(
            step, state, self._loop.prepared.model.own_buffers(), ahead=self._loop.job.kind.ahead
        )

    def _present(self, at: str = "", objects: bool = True) -> dict[str, Any]:
        """Return the present state.

        Args:
            at: "after" a step, or at the "end" of an epoch, where others gather.
            objects: whether to ask the objects that are kept for their state.
        """
        kept = {} if self.kept is None else self.kept.state(objects)
        return {
            "step": self.steps,
            "batches": self._loop.batches.count,
            "reports": self._loop.next_report,
            "since": dict(self._loop.reports.since),
            "kept": kept,
            "at": at,
            "epoch": self._loop.batches.epoch,
            **self._loop.steps.schedules.state(),
            "gathers": self._loop.gatherer.among_batches,
            "local": self._loop.job.kind.local,
            "settings": None if self.settings is None else self.settings.state,
            "cursor": self._place(),
            "frozen": None if self._loop.prepared is NOTHING else self._loop.prepared.model.frozen,
            "closures": self._of_closures() if objects else [],
            "entries": self._entries if self._loop.prepared.cursor is not None else [],
            "weights": self._loop.weights.sum.state(),
            "tops": {str(epoch): top for epoch, top in self.tops.items()},
            **self._scheduled(),
        }

    def _place(self) -> dict[str, Any] | None:
        """Return where the loop is; None where workers have shares of their own."""
        if self._loop.prepared.cursor is None:
            return None
        return self._loop.prepared.cursor.state(amid_sum=self._is_amid_sum)

    @property
    def _in_workers(self) -> list[ByClosure]:
        """The optimizers that step in the workers."""
        return [each for _, each in self._loop.prepared.closures]

    def _of_closures(self) -> list[Any]:
        """Return the states of the optimizers that step in the workers."""
        noted = self.is_in_step and self._loop.prepared.cursor is not None
        return [each.state(noted=noted) for each in self._in_workers]

    @property
    def steps(self) -> int:
        """The number of the job's steps after which the loop is, with all that it does after a step."""
        if self._loop.batches.taken is None:
            return self._job.passed
        taken = self._loop.batches.taken.where.step
        before = (
            self._job.asked is Ask.PARTS
            and self._loop.gatherer.region is Region.BEFORE
            and self._loop.prepared.cursor is None
        )
        if self._job.asked is Ask.COMMIT or before:
            return taken
        return max(self._loop.at_step + 1, min(self._job.passed, self._job.committed))

    def _scheduled(self) -> dict[str, Any]:
        """Return the states of schedulers, and what they have set."""
        if self._loop.prepared is NOTHING:
            return {"schedulers": [], "groups": []}
        changed = self._loop.steps.changed
        if changed is None:
            changed = self._loop.prepared.model.optimizer_spec.changed(self._loop.prepared.groups)
        # what a scheduler has in lists it goes on to change
        schedulers = [copy.deepcopy(s.state_dict()) for s in self._loop.prepared.schedulers]
        return {"schedulers": schedulers, "groups": changed}


def kept_at(top: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's kept objects as they were when a loop entered an epoch, see `LoopStates.open_epoch`."""
    objects = {} if top["objects"] is None else unpack(top["objects"])
    return {**objects, **top["set"]["kept"]}
