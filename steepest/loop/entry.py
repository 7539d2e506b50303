"""How a worker's loop enters a job in which other workers are, or that goes on from a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from steepest.errors import ConfigurationError
from steepest.loop import counting
from steepest.loop.cursor import Cursor, LoopPlace
from steepest.loop.kept_values import finder
from steepest.loop.loop_states import kept_at
from steepest.observe.reports import CALLS_OF_PLACE

if TYPE_CHECKING:
    from steepest.loop.user_loop import UserLoop


class LoopEntry:
    """The way of a loop from the beginning of its function to the place of a state.

    Where workers have shares of their own, one that joins while others gather behind a step or an epoch goes
    through its last batch again, whose steps and reports do not count: it stands in.

    Args:
        loop: that enters.

    Attributes:
        arriving: the state, until the loop is where it is of; None without one.
        resumed: a description of the script's settings that differ from the checkpoint's.
        passed_by: the number of batches that the loop has passed by, entering a pass behind them.
        amid_pass: the number of the pass that it has entered in the middle; 0 for none, or if that was told.
        stands_in: whether it goes through a batch that does not count.
    """

    def __init__(self, loop: UserLoop) -> None:
        self._loop = loop
        self.arriving: dict[str, Any] | None = None
        self.resumed = ""
        self.passed_by = self.amid_pass = 0
        self.stands_in = False
        self._is_first = True  # whether the loop has yet to take a batch of the worker's own shares

    def arrive(self, state: dict[str, Any]) -> None:
        """Go on from a state once the function comes to its epochs."""
        loop = self._loop
        self.arriving = state
        of, unsent = state["unsent"]
        if of == loop.job.rank:  # else they are another worker's, which sends them
            loop.reports.take_over(unsent)
        size, gathered = state["gathered"]
        if size == loop.job.size:
            loop.gatherer.gatherings.restore(gathered)

    def pass_by(self, batches: int) -> None:
        """Note that the loop enters a pass behind a number of its batches."""
        self.passed_by += batches
        counting.end(self._loop)

    # -- where all workers go through the same batches -----------------------------------------

    def enter_epoch(self, cursor: Cursor, state: dict[str, Any], first: int) -> None:
        """Go to the epoch of the other workers, and set the values that they had at its beginning.

        Args:
            cursor: of the loop.
            state: that has arrived.
            first: the number of the job's first epoch, as the user counts.
        """
        loop, where = self._loop, state.get("cursor")
        if where is None:
            raise ConfigurationError(
                "the state to go on from is that of a loop of an older version, or of a strategy under which workers "
                "do not wait for each other: begin with its weights, by model.load_state_dict(), and other checkpoints"
            )
        loop.prepared.tell_schedulers()
        loop.prepared.enter(first + LoopPlace(*where["place"]).epoch)  # a stream may be read
        is_whole = cursor.load(where, loop.job.size)
        if not is_whole and (where["is_sure"] or where["amid_sum"]):
            loop.tell_of_other_size()
        self.arriving = {**state, "entry": state["entries"][0 if is_whole else 1]}
        loop.states.tops = {int(epoch): top for epoch, top in state["tops"].items()}
        if not cursor.is_amid_epoch:
            self.come_to_place(cursor)
        elif (top := loop.states.tops.get(cursor.place.epoch)) is not None:
            self._set_by_hand({**top["set"], "kept": kept_at(top)}, settings=state["settings"])

    def come_to_place(self, cursor: Cursor) -> None:
        """Set the other workers' values, now that the loop has come to their batch."""
        assert self.arriving is not None
        if cursor.skip:
            self._set_by_hand(self.arriving["entry"], settings=self.arriving["settings"])
        else:
            self.take(self.arriving)

    # -- where each worker has shares of its own -----------------------------------------------

    def begin_to_stand_in(self, state: Mapping[str, Any]) -> None:
        """Go to the end of a step, or of an epoch, where other workers gather, and take their state there."""
        self.stands_in = True
        self._loop.batches.epoch = state["epoch"]
        self._loop.job.arrive(state["step"])

    def batch_again(self) -> tuple[Any] | None:
        """Return the batch with which the loop stands in, in a tuple; None where it is to take one that counts.

        Once the loop has gone through the batch, it is where the others are, and takes their state.
        """
        loop = self._loop
        if not self.stands_in:
            return None
        if self._is_first:
            self._is_first = False
            batch = loop.prepared.model.batch_before(loop.job.passed)
            loop.seed_for(loop.job.passed - 1)
            self.pass_by(loop.prepared.model.steps_before(loop.job.passed - 1))
            return (batch,)
        self.stands_in = False
        assert self.arriving is not None
        self.take(self.arriving)
        loop.begin_ticks(loop.job.passed - 1)
        loop.weights.losses.found = []
        loop.steps.clips.clear()
        return None

    def take_batch(self, step: int) -> None:
        """Note that the loop takes a batch, of a step of the job: the first one may be amid an epoch."""
        if self._is_first:
            self._is_first = False
            loop = self._loop
            together = loop.job.kind.together
            self.pass_by(loop.prepared.model.steps_before(step) if together else 0)

    # -- states --------------------------------------------------------------------------------

    def take(self, state: Mapping[str, Any]) -> None:
        """Set the state that has arrived, now that all objects are there."""
        loop, prepared = self._loop, self._loop.prepared
        self.arriving = None
        loop.steps.lacks_batches = True
        loop.job.arrive(state["step"])
        loop.reports.go_on(state["since"], self._first_report(state))
        loop.batches.count = state["batches"]
        if state["settings"]["epochs"] is None:
            # of a function that had yet to set what this one has
            prepared.model.keep_buffers()
            return
        prepared.model.restore_buffers()
        self._set_by_hand(state, settings=state["settings"], kept=False)
        if state.get("frozen") is not None:  # not in checkpoints of before
            prepared.model.freeze(state["frozen"])
        for (_, each), own in zip(prepared.closures, state.get("closures", ()), strict=False):
            each.optimizer.load_state_dict(own)
        if (
            state.get("local", 0) == loop.job.kind.local
        ):  # else schedulers have counted another thing
            loop.steps.schedules.restore(state)
        if loop.states.kept is not None:
            loop.states.kept.load(state["kept"], finder(loop.function))

    def _first_report(self, state: Mapping[str, Any]) -> int:
        """Return the number of the first report that counts of a loop which goes on from a state."""
        reported: int = state.get("reported", 0)
        rank = self._loop.job.rank
        of, _ = state.get("unsent", (rank, ()))
        # another worker may have had calls of its own at that place
        return reported if of == rank else reported - reported % CALLS_OF_PLACE

    def _set_by_hand(
        self, state: Mapping[str, Any], *, settings: Mapping[str, Any], kept: bool = True
    ) -> None:
        """Set the values that loops set by hand: those of optimizers' groups and schedulers, and what is `kept`.

        Args:
            state: with these.
            settings: of the script of which it is.
            kept: whether to set that too.
        """
        loop = self._loop
        if (weights := state.get("weights")) is not None:
            loop.weights.sum.load(weights)
        if state["groups"]:
            assert loop.states.settings is not None
            self.resumed = loop.states.settings.go_on(settings, state, loop.steps.schedules.steps)
        if kept and loop.states.kept is not None:
            loop.states.kept.load(state["kept"], finder(loop.function))
