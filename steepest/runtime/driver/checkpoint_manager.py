"""Checkpoints that are kept while `fit` runs: when they are written, which stay, and which one a run resumes."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from steepest.checkpoint import files
from steepest.checkpoint.files import Checkpoints
from steepest.core.data.sampler import SamplePlan
from steepest.core.system import system
from steepest.data.storage.places import StoragePlace, place_of
from steepest.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ShutdownError,
    SteepestError,
)
from steepest.observe.delivery import ending_of
from steepest.observe.evaluations import best_of, value_of
from steepest.observe.results import EvaluationResult, StepResult
from steepest.runtime.driver.calls import Calls
from steepest.runtime.driver.checkpoint_writer import CheckpointKeeper
from steepest.runtime.driver.directory_lock import DirectoryLock
from steepest.runtime.driver.training import Training
from steepest.runtime.owner import Moment, owned
from steepest.runtime.state.row_read import RowRead, RowsAsTheyCome
from steepest.runtime.state.transfer import StateTransfer
from steepest.tables.files.changed_rows import RowChange

log = logging.getLogger(__name__)
_TRIES = 3


class CheckpointManager:
    """Keeps checkpoints for `DistributedSGD`, and counts the steps that were done before it began.

    Training pauses while the state is read, except the rows of embedding tables: servers send a snapshot
    of them while training goes on. A thread writes the state, see `CheckpointKeeper`.
    """

    def __init__(
        self,
        policy: Checkpoints | None,
        lock: DirectoryLock,
        training: Training,
        state: StateTransfer,
        calls: Calls,
        clock: Callable[[], float] | None = None,
    ) -> None:
        # the steps before the present or last `fit`; those that it left out are its own
        self.begun = 0
        self.evaluations: list[EvaluationResult] = []  # of all calls of `fit` in this state's past
        # steps done before this process began, which `fit` has not been asked for yet
        self._ahead = 0
        self._policy = policy
        self._training = training
        self._state = state
        self.owner = training.owner
        # where calls of `fit` began and were ended early, in order; and those before this process
        self._early: list[tuple[int, int]] = []
        self._early_before: deque[tuple[int, int]] = deque()
        self._calls = calls
        self._keeper = (
            None if policy is None else CheckpointKeeper(policy, lock, training.history, clock)
        )
        self._wrote()
        self._doubtful = False

    @property
    def folder(self) -> Path | None:
        """The directory of checkpoints; None if there is none on this machine."""
        place = None if self._policy is None else place_of(self._policy.path)
        return place if isinstance(place, Path) else None

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self._training.step

    @property
    def reached(self) -> int:
        """The number of committed steps, with those that a death has undone."""
        return self._training.reached

    @property
    def stopping(self) -> bool:
        """Whether the present `fit` is to end."""
        return self._training.stopping

    @property
    def plan(self) -> SamplePlan | None:
        """Which worker gets which samples; None when the data are streams."""
        return self._training.cluster.plan[0]

    @property
    def _place(self) -> tuple[int, int]:
        """Step and version; versions alone are counted anew when the number of workers changes."""
        return self._training.step, self._training.version

    def _wrote(self) -> None:
        """Note that the present state is on disk, or need not be."""
        if self._keeper is not None:
            self._keeper.written = self._place

    # -- going on ------------------------------------------------------------------------------

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, if there is any."""
        keeper, rows_kept = self._keeper, self._training.cluster.run_config.history_rows
        if keeper is None:
            return
        signature = self._state.signature()
        for path, newest in keeper.shelf.newest_first(files.read_apart):
            saved = files.with_renamed_tables(newest, keeper.policy.rename_tables)
            differs = bool(signature.other_data(saved))
            data = "new" if differs and keeper.policy.data == "new" else "continue"
            try:
                if data == "new":
                    signature.require_next_offsets(saved)
                self._state.place(saved, path, data)
                break
            except files.DamagedRowsError as error:
                keeper.shelf.pass_over(path, error)
        else:
            keeper.resume_history(0, {}, rows_kept)
            return
        self._ahead = self._training.step
        self._wrote()
        self._early = [(begin, end) for begin, end in saved.about.get("ended_early", ())]
        self._early_before = deque(self._early)
        if (result := saved.about.get("result")) is not None:
            rows = {key: tuple(result.get(key, ())) for key in ("staleness", "learning_rate")}
            self._training.last = StepResult(**result | rows)
        self.evaluations = _evaluations(saved)
        keeper.resume_history(self._ahead, saved.about, rows_kept)
        log.warning("going on from step %d, the checkpoint at %s", self._ahead, path)
        _tell_of(signature, saved, path, data)

    def ask(self, steps: int | None, epochs: int | None) -> Callable[[], int]:
        """Return a function of the number of committed steps at which so many more steps or epochs are done.

        Steps that were taken before this process began, and that no `fit` has asked for yet, are the
        first of them; a `fit` that was ended early then has no others. The end of an epoch moves if
        the number of samples in a step changes.
        """
        begin = self.reached - self._ahead
        self.begun = begin
        last = bisect_right(self._state.ends(), begin) + (epochs or 1) - 1
        ended: int | None = None
        if self._early_before and self._early_before[0][0] == begin:
            ended = self._early_before.popleft()[1]

        def end() -> int:
            if ended is not None:
                return ended
            return self.end_of(last) if steps is None else begin + steps

        def goal() -> int:
            self._training.goal = self.owner.call(end, Moment.WHOLE)
            return self._training.goal

        self._ahead = max(self.reached - goal(), 0)
        return goal

    def ended_early(self, goal: int) -> None:
        """Note, for a run that resumes, that the present `fit` ends before its goal."""
        if self._training.step < goal:
            self._early.append((self.begun, self._training.step))
            self.changed()

    @property
    @owned(Moment.WHOLE)
    def epoch(self) -> int | None:
        """The epoch of the next step; None when the data are streams."""
        return None if self.plan is None else self.plan.position(self.reached).epoch

    @owned(Moment.WHOLE)
    def end_of(self, epoch: int) -> int:
        """Return how many steps are committed at the end of an epoch, as the job is now."""
        assert self.plan is not None
        ends = self._state.ends()
        return ends[epoch] if epoch < len(ends) else self.plan.end_of(epoch)

    def result(self) -> StepResult:
        """Return the last step's result, also of a step taken before this process began."""
        return self._training.last or StepResult(self._training.step, None, float("nan"), {}, 0, ())

    # -- evaluations ---------------------------------------------------------------------------

    @property
    def evaluated(self) -> int:
        """The number of steps before the last evaluation."""
        return self.evaluations[-1].step if self.evaluations else 0

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Whether an epoch ended with the last step."""
        return self._training.step in self._state.ends()[-1:]  # none is beyond it

    def present(self) -> tuple[int, int | None]:
        """Return the step at which the job is, and the epoch of the last one."""
        step = self._training.step
        known = self.plan is not None and step > 0
        epoch = bisect_right(self._state.ends(), step - 1) if known else None
        return step, epoch

    def add(self, result: EvaluationResult) -> None:
        """Keep an evaluation, also as a row of the history."""
        if self._policy is not None and self._policy.best is not None:
            value_of(result, self._policy.best)
        self.evaluations.append(result)
        self._training.history.evaluated(result.step, result)

    @property
    def _best_step(self) -> int | None:
        """The number of steps before the best evaluation, if its checkpoint is to stay."""
        if self._policy is None or self._policy.best is None:
            return None
        best = best_of(self.evaluations, self._policy.best, self._policy.mode)
        return None if best is None else best.step

    def require_no_best(self, remedy: str) -> None:
        """Check that checkpoints watch no metric, for a `fit` without evaluations between two steps."""
        if self._policy is not None and self._policy.best is not None:
            raise ConfigurationError(f"Checkpoints(best={self._policy.best!r}): {remedy}")

    def keep_if_best(self) -> None:
        """Keep the state if no evaluation was better than that of this step."""
        if self._best_step == self._training.step:
            self._keep()

    def best(self) -> StoragePlace | None:
        """Return the path of the best evaluation's checkpoint, once it is written; None if there is none."""
        if self._keeper is None or (step := self._best_step) is None:
            return None
        self._keeper.require_written()
        return self._keeper.shelf.of_step(step)

    # -- keeping -------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the state, with the last step's result and the loggers' runs, which have all steps."""
        place = place_of(path)

        def write(captured: tuple[files.Checkpoint, RowRead]) -> None:
            saved, rows = captured
            with rows.given_up_on_error():
                saved = replace(self._with_history(saved), rows=RowsAsTheyCome(rows))
                files.write(place, saved)

        self._calls.surviving_here(self._state.collect, write)

    def _with_history(self, saved: files.Checkpoint) -> files.Checkpoint:
        """Return a checkpoint with the driver's own state added."""
        history = self._training.history
        history.flush()
        history_state = {
            "result": None if self._training.last is None else asdict(self._training.last),
            "runs": dict(history.runs),
            "behind": dict(history.behind),
            "evaluations": [asdict(each) for each in self.evaluations],
            "ended_early": self._early,
        }
        return replace(saved, about={**saved.about, **history_state})

    def next_due(self) -> int | None:
        """Return the number of committed steps at which the next checkpoint is due; None without any."""
        return None if self._policy is None else self.next_multiple(self._policy.every)

    def next_multiple(self, every: int) -> int:
        """Return the next number of committed steps that is a multiple of another."""
        return (self._training.step // every + 1) * every

    def keep_if_due(self) -> None:
        """Keep the state if a checkpoint is due at this step; called between two steps."""
        is_due = self._policy is not None and self._training.step % self._policy.every == 0
        if is_due and self._has_changed:
            self._keep()

    def restore(
        self,
        path: str | Path,
        data: str,
        rename_tables: Mapping[str, str] | None = None,
        change_rows: RowChange | None = None,
    ) -> None:
        """Continue from a checkpoint that the user chose: later steps will be done again."""
        saved = files.with_renamed_tables(files.read_apart(place_of(path)), rename_tables)
        saved = files.with_changed_rows(saved, change_rows)
        signature = self._state.signature()
        self._calls.replacing(lambda: self._state.place(saved, path, data))
        _tell_of(signature, saved, path, data)
        self._ahead, self._early = 0, []
        self._early_before.clear()
        self.evaluations = _evaluations(saved)
        self._training.history.resume(
            saved.about["step"],
            saved.about.get("runs") or {},
            behind=saved.about.get("behind"),
        )
        self.changed()

    def changed(self) -> None:
        """Note that the state has changed without a step."""
        if self._keeper is not None:
            self._keeper.written = None

    @property
    def _has_changed(self) -> bool:
        """Whether the state has to be written, as it is not on disk."""
        return self._keeper is not None and self._keeper.written != self._place

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take steps in a block; note whether an error in it may leave processes dead or silent.

        Then no state is read from them at the end.
        """
        try:
            yield
        except BaseException as error:
            self._doubtful = _is_doubtful(error)
            raise
        self._doubtful = False

    @contextlib.contextmanager
    def at_end(self) -> Iterator[None]:
        """Write the state to disk when a block ends, also by an error.

        After an error that may leave processes dead or silent no state is read.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, CheckpointError) and not _is_doubtful(error):
                self._finish_quietly()
            raise
        self._finish()

    def close(self, error: BaseException | None) -> None:
        """Write the last state, if it is not on disk, and release the directory."""
        try:
            self._training.history.close(None if error is None else ending_of(error))
            if self.owner.has_ended and self._has_changed:
                log.error("the last state is not kept: its processes are gone")
            mute = self._doubtful or self._training.running or self.owner.has_ended
            if error is not None or mute:
                self._finish_quietly(ask=not (_is_doubtful(error) or mute))
            else:
                self._finish()
        finally:
            self.drop()

    def drop(self) -> None:
        """Write nothing more, end the runs of loggers, and release the directory when no write is going on."""
        self._training.history.close("killed")  # but `close` has ended them
        if self._keeper is not None:
            self._keeper.end()

    def _finish(self, ask: bool = True) -> None:
        """Wait for what is being written, then write the state, if it is not on disk."""
        if (keeper := self._keeper) is None:
            return
        keeper.require_written()
        if ask and self._has_changed:
            for _ in range(_TRIES):  # servers may die while they send rows
                self._keep()
                keeper.require_written()
                if not self._has_changed:
                    return
            raise CheckpointError("the last state is not kept: servers died while they sent it")
        keeper.start_history()  # such as a last evaluation
        keeper.require_written()

    def _finish_quietly(self, ask: bool = True) -> None:
        """Call `_finish`, and log its error, because another error is being raised."""
        try:
            self._finish(ask)
        except SteepestError as error:
            log.error("the last state is not kept: %s", error)

    def _keep(self) -> None:
        """Read the state and begin to write it, unless the write before it hangs."""
        keeper, began, step = self._keeper, system().now(), self._training.step
        assert keeper is not None
        if not keeper.await_write():
            hangs = keeper.where()
            log.warning("the checkpoint of step %d is not kept, training goes on: %s", step, hangs)
            return
        saved, rows = self._calls.surviving(lambda: self._state.collect(keeper.since))
        keeper.start(self._with_history(saved), rows, self._place, began, self._best_step)


def _evaluations(saved: files.Checkpoint) -> list[EvaluationResult]:
    return [EvaluationResult(**row) for row in saved.about.get("evaluations", ())]


def _tell_of(
    signature: files.JobSignature, saved: files.Checkpoint, path: object, data: str
) -> None:
    """Log in what data, tables and batches differ from those of a checkpoint that was restored."""
    if differences := signature.other_data(saved):
        what = (
            "epochs begin anew"
            if data == "new"
            else "they are continued at the checkpoint's position; data='new' begins epochs anew"
        )
        log.warning(
            "the training data are not those of the checkpoint at %s: %s: %s",
            path, "; ".join(differences[:8]), what,
        )  # fmt: skip
    if differences := signature.other_tables(saved):
        log.warning(
            "the embedding tables are not those of the checkpoint at %s: %s",
            path,
            "; ".join(differences),
        )
    if differences := signature.other_batches(saved):
        log.warning(
            "the batch size is not that of the checkpoint at %s: %s: the epoch goes on after its last "
            "sample, schedules count steps; global_batch_size=%d keeps the steps as they were",
            path, ", ".join(differences), saved.about["batch"][1],
        )  # fmt: skip


def _is_doubtful(error: BaseException | None) -> bool:
    """Return whether processes may be dead or silent after an error, so that waiting is useless."""
    return isinstance(error, (PeerLostError, DeadlineError, ShutdownError))
