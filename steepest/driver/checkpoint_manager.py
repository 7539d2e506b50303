"""Checkpoints that are kept while `fit` runs: when, which stay, and which one a run resumes."""

from __future__ import annotations

import contextlib
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from steepest.checkpoint import files
from steepest.checkpoint.directory import CheckpointDirectory
from steepest.checkpoint.files import Checkpoints
from steepest.data.sampler import SamplePlan
from steepest.driver.calls import Calls
from steepest.driver.checkpoint_writer import Writer
from steepest.driver.directory_lock import DirectoryLock
from steepest.driver.training import Training
from steepest.errors import (
    CheckpointError,
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ShutdownError,
    SteepestError,
)
from steepest.messages.snapshots import Bases
from steepest.observe.evaluations import best_of, value_of
from steepest.observe.history_file import history_file
from steepest.observe.results import EvaluationResult, StepResult
from steepest.runtime.owner import Moment, Owner, owned
from steepest.state.job_state import JobState
from steepest.state.row_read import RowRead, RowsAsTheyCome
from steepest.storage.blocks import Progress
from steepest.storage.places import Place, place_of

log = logging.getLogger(__name__)
_TRIES = 3
_PAUSE_SECONDS = (
    0.1  # after each block of 4 MB, where there are rows of tables: they may be many GB
)


class _Chain(NamedTuple):
    """The checkpoint that the next one continues."""

    link: files.Link
    place: Bases  # the instant of its rows
    increments: int  # since the last whole one


class Goal:
    """The number of committed steps with which a `fit` ends, as the job is then."""

    def __init__(self, end: Callable[[], int], owner: Owner) -> None:
        self._end, self._owner = end, owner
        self.at = self()  # as it was when it was last asked for

    def __call__(self) -> int:
        """Return it for the job as it is now."""
        self.at = self._owner.call(self._end, Moment.WHOLE)
        return self.at


class CheckpointManager:
    """Keeps checkpoints for `DistributedSGD`, and counts the steps that were done before it began.

    Training pauses while the state is read, but for the rows of embedding tables: servers send them as
    they were then, while it goes on. A thread writes it. When the next checkpoint is due
    before that is written, training waits for it: so memory holds one state at most, and a disk
    that is too slow is noticed.
    """

    def __init__(
        self,
        policy: Checkpoints | None,
        lock: DirectoryLock,
        training: Training,
        state: JobState,
        calls: Calls,
        clock: Callable[[], float] | None = None,
    ) -> None:
        # the steps before the present or last `fit`; those that it left out are its own
        self.begun = 0
        self.evaluations: list[EvaluationResult] = []  # of all calls of `fit` in this state's past
        # steps done before this process began, which `fit` has not been asked for yet
        self._ahead = 0
        self._policy = policy
        self._lock = lock
        self._training = training
        self._state = state
        self.owner = training.owner
        # where calls of `fit` began and were ended early, in order; and those before this process
        self._early: list[tuple[int, int]] = []
        self._early_before: deque[tuple[int, int]] = deque()
        self._calls = calls
        self._rows: RowRead | None = None  # those of the checkpoint that is being written
        self._shelf = (
            CheckpointDirectory(place_of(policy.path), policy.keep) if policy is not None else None
        )
        self._writer = (
            Writer(place_of(policy.path), policy.write_timeout, clock)
            if policy is not None
            else None
        )
        self._file = history_file(place_of(policy.path)) if policy is not None else None
        self._written: tuple[int, int] | None = self._place  # what is on disk, or need not be
        self._chain: _Chain | None = None
        self._doubtful = False

    @property
    def step(self) -> int:
        """The number of committed steps."""
        return self._training.step

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

    # -- going on ------------------------------------------------------------------------------

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, if there is any."""
        if self._shelf is None:
            return
        if (found := self._shelf.newest()) is None:
            self._resume_history(0, {})
            return
        path, saved = found
        assert self._policy is not None
        signature = self._state.signature()
        differs = bool(signature.other_data(saved))
        data = "new" if differs and self._policy.data == "new" else "continue"
        self._state.place(saved, path, data)
        self._ahead, self._written = self._training.step, self._place
        self._early = [(begin, end) for begin, end in saved.about.get("ended_early", ())]
        self._early_before = deque(self._early)
        if (result := saved.about.get("result")) is not None:
            rows = {key: tuple(result.get(key, ())) for key in ("staleness", "learning_rate")}
            self._training.last = StepResult(**result | rows)
        self.evaluations = _evaluations(saved)
        self._resume_history(self._ahead, saved.about.get("runs") or {})
        log.warning("going on from step %d, the checkpoint at %s", self._ahead, path)
        _tell_of(signature, saved, path, data)

    def _resume_history(self, step: int, runs: Mapping[str, str]) -> None:
        assert self._file is not None
        try:
            rows = self._file.resume(step, self._training.cluster.run_config.history_rows)
        except OSError as error:
            raise CheckpointError(f"cannot continue {self._file.path}: {error}") from error
        self._training.history.resume(step, runs, rows)

    def ask(self, steps: int | None, epochs: int | None) -> Goal:
        """Return with which committed step so many steps or epochs more are done.

        Steps that were taken before this process began, and were not asked for yet, are the first
        of them; a `fit` that was ended early then has no others. The end of an epoch moves when a
        step covers another number of samples.
        """
        begin = self._training.step - self._ahead
        self.begun = begin
        last = bisect_right(self._state.ends(), begin) + (epochs or 1) - 1

        ended: int | None = None
        if self._early_before and self._early_before[0][0] == begin:
            ended = self._early_before.popleft()[1]

        def end() -> int:
            if ended is not None:
                return ended
            return self.end_of(last) if steps is None else begin + steps

        goal = Goal(end, self.owner)
        self._ahead = max(self._training.step - goal.at, 0)
        return goal

    def ended_early(self, goal: int) -> None:
        """Note, for whoever resumes, that the present `fit` ends before its goal."""
        if self._training.step < goal:
            self._early.append((self.begun, self._training.step))
            self.changed()

    @property
    @owned(Moment.WHOLE)
    def epoch(self) -> int | None:
        """The epoch of the next step; None when the data are streams."""
        return None if self.plan is None else self.plan.position(self._training.step).epoch

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

    def require_no_best(self) -> None:
        """Check that no metric is to be watched, for a `fit` without evaluations."""
        if self._policy is not None and self._policy.best is not None:
            raise ConfigurationError(
                f"Checkpoints(best={self._policy.best!r}) needs fit(..., validation=data)"
            )

    def keep_if_best(self) -> None:
        """Keep the state if no evaluation was better than that of this step."""
        if self._best_step == self._training.step:
            self._keep()

    def best(self) -> Place | None:
        """Return the path of the best evaluation's checkpoint, once it is written; None if there is none."""
        if self._shelf is None or (step := self._best_step) is None:
            return None
        self._settle_or_raise()
        return self._shelf.of_step(step)

    # -- keeping -------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the state, with the last step's result and the loggers' runs, which have all steps."""
        place = place_of(path)

        def write(found: tuple[files.Checkpoint, RowRead]) -> None:
            saved, rows = found
            with rows.given_up_on_error():
                saved = replace(self._with_history(saved), rows=RowsAsTheyCome(rows))
                files.write(place, saved)

        self._calls.surviving_here(self._state.collect, write)

    def _with_history(self, saved: files.Checkpoint) -> files.Checkpoint:
        """Return a checkpoint with what is known on the driver's side."""
        history = self._training.history
        history.flush()
        result = None if self._training.last is None else asdict(self._training.last)
        evaluations = [asdict(each) for each in self.evaluations]
        about = {
            **saved.about,
            "result": result,
            "runs": dict(history.runs),
            "evaluations": evaluations,
            "ended_early": self._early,
        }
        return replace(saved, about=about)

    def next_due(self) -> int | None:
        """Return the number of committed steps at which the next checkpoint is due; None without any."""
        return None if self._policy is None else self.next_multiple(self._policy.every)

    def next_multiple(self, every: int) -> int:
        """Return the next number of committed steps that is a multiple of another."""
        return (self._training.step // every + 1) * every

    def keep_if_due(self) -> None:
        """Keep the state if a checkpoint is due at this step; called between two steps."""
        due = self._policy is not None and self._training.step % self._policy.every == 0
        if due and self._written != self._place:
            self._keep()

    def restore(
        self,
        path: str | Path,
        data: str = "continue",
    ) -> None:
        """Continue from a checkpoint that the user chose: later steps are to be done again."""
        saved = files.read(place_of(path))
        signature = self._state.signature()
        self._calls.replacing(lambda: self._state.place(saved, path, data))
        _tell_of(signature, saved, path, data)
        self._ahead, self._early = 0, []
        self._early_before.clear()
        self.evaluations = _evaluations(saved)
        self._training.history.resume(saved.about["step"], saved.about.get("runs") or {})
        self.changed()

    def changed(self) -> None:
        """Note that the state has changed without a step."""
        self._written = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take steps in a block; note whether an error in it leaves processes dead or mute.

        Such processes are not asked for their state at the end.
        """
        try:
            yield
        except BaseException as error:
            self._doubtful = _is_doubtful(error)
            raise
        self._doubtful = False

    @contextlib.contextmanager
    def at_end(self) -> Iterator[None]:
        """Have the state on disk when a block ends, also by an error.

        After an error that leaves processes dead or mute no state is read.
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
            self._training.history.close()
            if self.owner.has_ended and self._writer is not None and self._place != self._written:
                log.error("the last state is not kept: its processes are gone")
            mute = self._doubtful or self._training.running or self.owner.has_ended
            if error is not None or mute:
                self._finish_quietly(ask=not (_is_doubtful(error) or mute))
            else:
                self._finish()
        finally:
            self.drop()

    def drop(self) -> None:
        """Write nothing more, and release the directory when no write is going on."""
        if self._writer is not None:
            self._writer.end(self._lock.release)  # what hangs may yet write there
        else:
            self._lock.release()

    def _finish(self, ask: bool = True) -> None:
        """Wait for what is being written, then write the state, if it is not on disk."""
        self._settle_or_raise()
        if self._writer is None:
            return
        if ask and self._place != self._written:
            for _ in range(_TRIES):  # servers may die while they send rows
                self._keep()
                self._settle_or_raise()
                if self._place == self._written:
                    return
            raise CheckpointError("the last state is not kept: servers died while they sent it")
        if (rows := self._training.history.unwritten())[0]:  # such as a last evaluation
            self._writer.start(lambda progress: self._write_history(rows, self._held(progress)))
        self._settle_or_raise()

    def _finish_quietly(self, ask: bool = True) -> None:
        """Do as `_finish`, and log its error, because another error is being raised."""
        try:
            self._finish(ask)
        except SteepestError as error:
            log.error("the last state is not kept: %s", error)

    def _keep(self) -> None:
        """Read the state and begin to write it, unless the write before it hangs."""
        assert self._writer is not None
        began, step = time.monotonic(), self._training.step
        if not self._settled():
            log.warning(
                "the checkpoint of step %d is not kept, training goes on: %s",
                step,
                self._writer.where(),
            )
            return
        since = () if self._chain is None else self._chain.place
        saved, rows = self._calls.surviving(lambda: self._state.collect(since))
        self._rows = rows
        saved, history = self._with_history(saved), self._training.history.unwritten()
        self._written, paused = self._place, time.monotonic() - began
        best = self._best_step
        self._writer.start(
            lambda progress: self._write(saved, rows, history, paused, best, progress)
        )

    def _write_history(self, rows: tuple[list[dict[str, Any]], int], progress: Progress) -> None:
        """Append rows to the file of the history, on the writer's thread."""
        assert self._file is not None
        progress(self._file.path)
        try:
            self._file.append(rows[0])
        except OSError as error:
            raise CheckpointError(f"cannot write {self._file.path}: {error}") from error
        self._training.history.wrote(rows[1])

    def _write(
        self,
        saved: files.Checkpoint,
        rows: RowRead,
        history: tuple[list[dict[str, Any]], int],
        paused: float,
        best: int | None,
        progress: Progress,
    ) -> None:
        """Write a checkpoint, on the writer's thread; log how long it took."""
        assert self._shelf is not None
        step, began = saved.about["step"], time.monotonic()
        base = None if self._chain is None else self._chain.link
        try:
            with rows.given_up_on_error():
                held = self._held(progress)
                self._write_history(history, held)  # before, so that no row is missing
                found = RowsAsTheyCome(rows, lambda: self._is_awaited(held), base)
                paced = held if rows.snapshot is None else self._paced(held)
                path, link = self._shelf.put(replace(saved, rows=found), paced, best)
            self._chain = self._next_link(link, found)
        except (PeerLostError, ShutdownError, DeadlineError) as error:  # of servers that send rows
            self._written = None
            log.warning("the checkpoint of step %d is not kept, training goes on: %s", step, error)
            return
        except BaseException as error:
            log.error("the checkpoint of step %d is not kept: %s", step, error)
            raise
        log.info(
            "%s: training paused for %.3f s, written in %.3f s",
            path,
            paused,
            time.monotonic() - began,
        )

    def _is_awaited(self, progress: Progress) -> bool:
        """Note progress; return whether the trainer waits for what is being written."""
        assert self._writer is not None
        assert self._policy is not None
        progress(self._policy.path)
        return self._writer.pause(0.0)

    def _held(self, progress: Progress) -> Progress:
        """Return a function that notes progress, and ends a write when the lease is lost."""

        def held(file: object) -> None:
            progress(file)
            self._lock.check()

        return held

    def _paced(self, progress: Progress) -> Progress:
        """Return a function that notes progress and leaves training the processor for a while."""

        def paced(file: object) -> None:
            assert self._writer is not None
            progress(file)
            self._writer.pause(_PAUSE_SECONDS)

        return paced

    def _next_link(self, link: files.Link, found: RowsAsTheyCome) -> _Chain | None:
        """Return what the next checkpoint continues; None if it is to be whole."""
        increments = self._chain.increments + 1 if self._chain and found.changes else 0
        if not found.place or self._policy is None or increments >= self._policy.increments:
            return None
        return _Chain(link, found.place, increments)

    def _settled(self) -> bool:
        """Wait for what is being written, and raise its error; return whether nothing hangs."""
        settled = False
        try:
            settled = self._writer is None or self._writer.settled()
        finally:
            if not settled:
                self._written = None
                if self._rows is not None:
                    self._rows.give_up()
        return settled

    def _settle_or_raise(self) -> None:
        if not self._settled():
            assert self._writer is not None
            raise CheckpointError(f"the last state is not kept: {self._writer.where()}")


def _evaluations(saved: files.Checkpoint) -> list[EvaluationResult]:
    return [EvaluationResult(**row) for row in saved.about.get("evaluations", ())]


def _tell_of(
    signature: files.JobSignature, saved: files.Checkpoint, path: object, data: str
) -> None:
    """Log in what data and batches differ from those of a checkpoint that was restored."""
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
    if differences := signature.other_batches(saved):
        log.warning(
            "the batch size is not that of the checkpoint at %s: %s: the epoch goes on after its last "
            "sample, schedules count steps; global_batch_size=%d keeps the steps as they were",
            path, ", ".join(differences), saved.about["batch"][1],
        )  # fmt: skip


def _is_doubtful(error: BaseException | None) -> bool:
    """Return whether processes may be dead or mute after an error, so that waiting is of no use."""
    return isinstance(error, (PeerLostError, DeadlineError, ShutdownError))
