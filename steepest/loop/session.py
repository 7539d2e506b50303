"""A session: the worker's side of a user's own loop, which lets the user's function go on.

The function's side is `steepest.loop.user_loop`; what both know of the job is `steepest.loop.job_view`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from steepest.core.engine.generators import HeldGenerators, seed_everything
from steepest.core.models.protocol import Where
from steepest.core.models.step_size import making_models, step_size
from steepest.errors import ConfigurationError
from steepest.loop.gathering import GatheringParts, Region
from steepest.loop.job_view import JobView, LoopKind
from steepest.loop.loop_states import Rounds
from steepest.loop.prepared import NOTHING, Ask, Batch, Progress
from steepest.loop.table_rows import Errand
from steepest.loop.turns import Ended, Turns
from steepest.loop.user_loop import UserLoop

#: One gradient of every worker makes an update.
_EVERYONE = LoopKind()


class Session:
    """One worker's run of a user's function, which calls `steepest.prepare` and trains by itself.

    Its methods are called by the worker's thread, those of `loop` by the user's function on its own
    thread; only one of the two runs at any time. Each side writes its own fields alone.

    Args:
        function: the user's.
        rank: number of the worker; None if it is not known yet, see `run_ahead`.
        size: number of workers.
        kind: how they train.

    Attributes:
        job: what both sides know of the job.
        loop: the function's side.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        rank: int | None,
        size: int,
        kind: LoopKind = _EVERYONE,
    ) -> None:
        self._error: BaseException | None = None  # that it has raised, or with which it has ended
        self._errand: Errand | None = None  # that the loop awaits
        self._held: HeldGenerators | None = None  # as the function has left them in `prepare`
        self._step_size = step_size()  # what the function may ask for where it begins anew
        self._is_ahead = False  # whether it has run, and waits for its number or the job
        self.job = JobView(self._turns(), rank, size, kind)
        self.loop = UserLoop(function, self.job)

    def _turns(self) -> Turns:
        """Return the turns of a function that has not run yet."""
        return Turns(lambda: self.loop.run(), "steepest loop")

    @property
    def has_ended(self) -> bool:
        """Whether the function has returned."""
        return self.job.turns.ended is not None

    def run_ahead(self) -> bool:
        """Run the function up to `prepare`, or to where it needs its worker's number; return whether it waits there."""
        seed_everything(self.job.kind.seed)
        self._go_on()
        self._held, self._is_ahead = HeldGenerators(), True
        return not self.has_ended

    def begin(self) -> Any:
        """Run the function up to `prepare`, from where it has run ahead to; return the model that was made there.

        Raises:
            ConfigurationError: it has returned without that. What the function raises is raised too.
        """
        if not self._is_ahead:
            seed_everything(self.job.kind.seed)  # as at the first beginning
        if not self._is_ahead or self.job.asked is Ask.SEAT:
            self._go_on()
            self._held = HeldGenerators()
        self._is_ahead = False
        self._raise_error()
        if self.job.asked is not Ask.BEGIN or self.loop.prepared is NOTHING:
            raise ConfigurationError(
                "the function that trains returned without calling steepest.prepare(model, optimizer, loader): "
                "call it before the loop"
            )
        model = self.loop.prepared.model
        model.session = self
        return model

    def compute(self, batch: Batch) -> bool:
        """Let the loop go on with a batch; return whether it has taken a step of the optimizer.

        It has not where it asks for another batch before, or has ended. What the function raises is raised. If the
        batch is that of the step that the loop awaits, its gradients serve again.
        """
        taken = self.loop.batches.taken
        here = taken is not None and taken.where == batch.where
        in_order = self.job.kind.together and not self.job.kind.ahead
        if in_order and taken is not None and taken.where.step < batch.where.step:
            self.loop.reports.note_before(self.loop.states.rounds.said)  # that step is committed
        if here and self.job.asked is Ask.COMMIT:
            return True
        amid = here and self.job.asked is Ask.PARTS and self.loop.gatherer.region is Region.BEFORE
        if not amid or self.loop.prepared.cursor is not None:
            self.loop.batches.pending = batch
        if self.loop.prepared.cursor is None:
            where = (
                batch.where
            )  # an epoch's end has the number of that where steps come in any order
            before = where.step if self.job.kind.together else where.epoch or 0
            self.loop.gatherer.gatherings.drop_before(before)
        self._go_on()
        if self.loop.gatherer.gatherings.parts:
            self.loop.gatherer.gatherings.answer()  # others may gather where the loop went on
        self._raise_error()
        self.loop.states.rounds.said = self.loop.next_report
        return self.job.asked is Ask.COMMIT

    def awaits(self, where: Where) -> bool:
        """Whether the loop awaits the commit of the step of a batch."""
        return (
            self.job.asked is Ask.COMMIT
            and self.loop.batches.taken is not None
            and self.loop.batches.taken.where == where
        )

    def is_undone(self, where: Where) -> bool:
        """Return whether the loop has to begin anew: the step that it awaits was dealt out in another way."""
        if (rounds := self.loop.states.rounds).is_given_up:
            return rounds.given_up_is_begun()
        taken = None if self.loop.batches.taken is None else self.loop.batches.taken.where
        in_batch = (
            taken == where
            if self.loop.prepared.cursor is None
            else self.loop.prepared.cursor.place.inside
        )
        if self.loop.gatherer.has_lost_its_seat(in_batch=in_batch):
            return True
        if self.job.kind.local and taken == where and self.job.asked is not Ask.COMMIT:
            return True  # the batch was seen, and made no update
        return taken is not None and taken != where and not where.follows(taken)

    def pass_by(self, where: Where) -> None:
        """Note that the worker has no samples in the job's next step."""
        self.job.pass_by(where, all_before=not self.job.kind.ahead)

    def committed(self, steps: int, *, waits: bool = False) -> None:
        """Let the loop go on where it awaits the commit of a step that is one of so many, or the end of an epoch.

        It `waits` for other workers where it gathers, or stays there unless all parts are here. What the function
        raises meanwhile is raised by the next `compute` or `advance`.
        """
        awaited = self.loop.batches.taken is not None and self.loop.batches.taken.where.step < steps
        self.job.committed = max(self.job.committed, steps)
        if awaited:
            self.loop.reports.note_before(self.loop.states.rounds.said)
        over = self.job.asked is Ask.BATCH and self.loop.is_over and self.job.passed <= steps
        if (self.job.asked is Ask.COMMIT and awaited) or over or self.job.asked is Ask.PARTS:
            self._go_on(waits=waits)

    def updated(self) -> None:
        """Let the loop go on where it awaits an update that is the worker's own, and not the last of its round."""
        if (
            self.job.asked is Ask.COMMIT
            and self.loop.batches.taken is not None
            and self.loop.batches.taken.where.has_more
        ):
            self._go_on(waits=False)

    def begin_round(self, number: int, given_up: int | None) -> None:
        """Note that a round of own updates begins, see `steepest.core.models.protocol.Model`."""
        self.loop.states.rounds.begin(number, given_up)

    def decided_before(self, number: int) -> None:
        """Note that all rounds of own updates before one are decided on."""
        self.loop.states.rounds.decided_before(number)

    def end_round(self, epoch: int | None) -> None:
        """Let the loop go on behind a round of own updates that was decided on, and into the epoch of the job."""
        self.loop.states.rounds.begun = []
        self.loop.reports.note()
        self.job.next_epoch = max(self.job.next_epoch, epoch or 0)
        if self.job.asked is Ask.COMMIT or (self.job.asked is Ask.BATCH and self.loop.is_over):
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
        self.loop.reports.give_back(number)
        self.job.next_epoch = max(self.job.next_epoch, epoch)
        now = self.loop.gatherer.gatherings.seat
        amid = self.loop.prepared.cursor is not None and self.loop.prepared.cursor.place.inside
        if now is not None and self.loop.gatherer.has_lost_its_seat(in_batch=amid, now=now):
            self.job.take_seat(now.rank, now.size)
            self.begin_anew(self.loop.states.state())
        while self.job.asked is not None and not self._waits_for_the_job:
            self._go_on()
        self._raise_error()
        reports = self.loop.reports.hand_over(number)
        return Progress(
            self.has_ended,
            self.loop.batches.wanted,
            self.loop.sees_all_batches,
            reports,
            steps=self.loop.steps_left,
            resumed=self.loop.entry.resumed,
        )

    @property
    def _waits_for_the_job(self) -> bool:
        """Whether the loop needs a further batch, or the commit of a step that the job has yet to take again."""
        if (
            self.job.asked is Ask.COMMIT
            and self.job.kind.together
            and self.loop.batches.taken is not None
        ):
            return self.loop.batches.taken.where.step >= self.job.committed
        return self.job.asked is Ask.BATCH and not self.loop.has_seen_all

    def load(self, state: dict[str, Any]) -> bool:
        """Go on from a state; a function at another place of the job begins anew.

        Args:
            state: as `state` returned it in this or another worker.

        Returns:
            False if the function is at that place already, and goes on with its own values.
        """
        self.loop.gatherer.among_batches |= state["gathers"]
        if self.job.asked is not Ask.BEGIN:
            # where workers do not wait for each other, a loop may take several shares of a step
            counts = self.job.kind.local and not self.job.kind.together
            elsewhere = counts and state["batches"] != self.loop.batches.count
            if state["step"] == self.loop.states.steps and not elsewhere:
                return False
            self.loop.gatherer.gatherings.drop()
            self.begin_anew(state)
        self.loop.entry.arrive(state)
        return True

    def begin_anew(self, state: dict[str, Any], rounds: Rounds | None = None) -> None:
        """End the function where it is, and run it again up to `prepare`, to go on from a state.

        `rounds` are those of own updates in which it stands then; None for none.
        """
        self.job.turns.end(SetBack())
        self._error = self._errand = None
        with making_models(replace(self._step_size, batches=self.job.size)):
            self.job.begin_anew(self._turns())
        self.loop.begin_anew(state, rounds)
        self.begin()

    def end(self) -> None:
        """End the function where it is."""
        self.job.turns.end(SetBack())

    def _go_on(self, waits: bool = True) -> None:
        """Give the turn to the function, until it asks for something or has ended.

        Args:
            waits: for other workers, where it gathers; otherwise it stays there unless all parts are here.
        """
        if self._held is not None:
            held, self._held = self._held, None
            held.go_on()
        while True:
            answer = None
            if self._errand is not None:
                if not waits:
                    return  # between two steps nothing can be received
                self.job.turns.show()
                answer, self._errand = self._errand.run(), None
            elif self.loop.gatherer.wanted is not None:
                answer = self.loop.gatherer.gathered(waits=waits)
                if answer is None:
                    return
            asked = self.job.turns.resume(answer)
            if isinstance(asked, Errand):
                self.job.asked, self._errand = Ask.PARTS, asked
                continue
            if isinstance(asked, GatheringParts):
                self.job.asked = Ask.PARTS
                self.loop.gatherer.put(asked)
                continue
            if isinstance(asked, Ended):
                self.loop.gatherer.gatherings.end()
                self.job.asked = None
                self.loop.batches.pending = None
                self._error = self._error or asked.error
            else:
                self.job.asked = asked
            return

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


class SetBack(BaseException):
    """Ends a user's function, which begins anew if its job is set back; not an `Exception`, lest it is handled."""
