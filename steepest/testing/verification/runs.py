"""The runs of a verification, each in processes of this machine: the plain script, and the job on some workers."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from steepest.checkpoint.files import Checkpoints
from steepest.core.config.run import DeadlineConfig, FailureConfig, RunConfig
from steepest.errors import RemoteTraceback, SteepestError
from steepest.loop.run import run
from steepest.observe.progress import Callback
from steepest.observe.results import StepResult
from steepest.runtime.holders import Holder, hold, let_go
from steepest.runtime.job_runtime import CallError, LateError, runtime
from steepest.testing.verification.alone import PlainScript
from steepest.testing.verification.probe import WatchedFunction
from steepest.testing.verification.records import Run, read_lives

#: Seconds that any step may take, a start of a successor on a busy machine included; later more, where steps are long.
_LEAST_DEADLINE = 120.0


class StoppedError(Exception):
    """Stops a run from within."""


class _ReadsTables(Callback):
    """Reads the rows of all embedding tables at the end.

    Attributes:
        found: the ids and rows of each table.
    """

    def __init__(self) -> None:
        self.found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_fit_end(self, sgd: Any) -> None:
        """Read them."""
        for name in sgd.for_model(_names_of_tables):
            table = sgd.export_table(name)
            self.found[name] = (table.ids, table.values)


def _names_of_tables(model: Any) -> list[str]:
    return [table.name for table in model.tables]


class _Stops(Callback):
    """Stops a run when a step is committed."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, sgd: Any, result: StepResult) -> None:
        """Stop it."""
        if result.step >= self._step:
            raise StoppedError


@dataclass
class Runs:
    """Makes the runs of one verification.

    Attributes:
        function: the user's.
        steps: of each run, at most.
        strategy, seed: as of `steepest.run`.
        folder: of their files.
        tell: called with a description of each run as it begins.
        by_sample: whether all runs draw random numbers by sample.
        tables: whether rows of embedding tables are read at the end of each run.
        deadline: seconds that a step may last.
    """

    function: Callable[[], Any]
    steps: int
    strategy: Any
    seed: int
    folder: Path
    tell: Callable[[str], object]
    by_sample: bool = False
    tables: bool = False
    deadline: float = _LEAST_DEADLINE
    _count: int = 0

    def learn(self, run: Run) -> None:
        """Learn from a run how long a step may last."""
        longest = max((s.seconds for life in run.lives for s in life.steps), default=0.0)
        self.deadline = max(_LEAST_DEADLINE, 20 * longest)

    def _watched(self, what: str, **more: Any) -> WatchedFunction:
        self._count += 1
        self.tell(what)
        folder = self.folder / str(self._count)
        folder.mkdir()
        return WatchedFunction(
            self.function, str(folder), self.steps, by_sample=self.by_sample, **more
        )

    def plain(self, what: str, feed: Run | None = None, aside: bool = False) -> Run:
        """Run the plain script, with the batches that a run of one worker had."""
        watched = self._watched(what, aside=aside, feed="" if feed is None else feed.folder)
        if feed is not None:  # which counts batches, where the loop steps after several
            watched = replace(watched, steps=len(feed.in_order(0)))
        group = runtime().ask([{"CPU": 1.0}], "PACK")
        try:
            process = runtime().start(PlainScript, ("plain script",), (group, 0), calls=1, gpus=0)
            call = runtime().call(process, "run", watched, self.seed)
            error: str = runtime().get([call], self.deadline + self.steps * self.deadline / 10)[0]
        except LateError:
            error = "it has not come to its last step in time"
        except CallError as raised:
            error = str(raised)
        finally:
            runtime().give_back(group)
        return Run(what, read_lives(Path(watched.folder)), error=error, folder=watched.folder)

    def job(
        self,
        what: str,
        workers: int,
        *,
        stops_at: int | None = None,
        **more: Any,
    ) -> Run:
        """Run the job.

        Args:
            what: for people.
            workers: their number.
            stops_at: the step behind which the program is stopped, and started again.
            more: of `WatchedFunction`.
        """
        watched = self._watched(what, **more)
        rows = _ReadsTables()
        reads: list[Callback] = [rows] if self.tables else []
        chosen: dict[str, Any] = {"callbacks": reads}
        if stops_at is not None:
            chosen["checkpoints"] = Checkpoints(Path(watched.folder) / "checkpoints", every=1)
            chosen["callbacks"] = [_Stops(stops_at)]
        run = Run(what, [], folder=watched.folder, killed=watched.kills)
        try:
            with contextlib.suppress(StoppedError):
                run.reports = self._run(watched, workers, chosen)
            if stops_at is not None:
                chosen["callbacks"] = reads
                run.reports = self._run(watched, workers, chosen)
        except SteepestError as error:
            cause = error.__cause__
            more_text = f"\n{cause.text.rstrip()}" if isinstance(cause, RemoteTraceback) else ""
            run.error = f"{type(error).__name__}: {error}{more_text}"
        run.lives, run.tables = read_lives(Path(watched.folder)), rows.found
        return run

    def _run(
        self, watched: WatchedFunction, workers: int, chosen: dict[str, Any]
    ) -> list[dict[str, float]]:
        deadlines = DeadlineConfig(step=self.deadline, call=4 * self.deadline)
        failure = FailureConfig(patience=math.inf, spares=0)
        result = run(
            watched,
            num_workers=workers,
            strategy=self.strategy,
            seed=self.seed,
            run_config=RunConfig(runtime="processes", failure=failure, deadlines=deadlines),
            progress=False,
            **chosen,
        )
        return result.reports


@contextlib.contextmanager
def runs_of(
    function: Callable[[], Any], steps: int, strategy: Any, seed: int, **chosen: Any
) -> Iterator[Runs]:
    """Make runs in this context: their processes share one start, and what they have noted goes with them."""
    log = logging.getLogger("steepest")
    level = log.level
    log.setLevel(logging.ERROR)  # deaths are meant here
    folder = Path(tempfile.mkdtemp(prefix="steepest-verify-"))
    holder = Holder("steepest verify")
    try:
        hold(holder, "processes")
        yield Runs(function, steps, strategy, seed, folder, **chosen)
    finally:
        let_go(holder)
        log.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)
