"""The runs of a verification of a `DistributedSGD` job, as its driver sees them after each step."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepest.checkpoint.files import Checkpoints
from steepest.core.config.run import DeadlineConfig, FailureConfig, RunConfig
from steepest.errors import SteepestError
from steepest.observe.progress import Callback
from steepest.observe.results import StepResult
from steepest.runtime.driver.trainer import DistributedSGD
from steepest.testing.verification.records import Facts, FunctionLife, Run, StepRecord
from steepest.testing.verification.runs import StoppedError
from steepest.testing.verification.summaries import summary_of


@dataclass
class _Notes(Callback):
    """Notes a job's state after each step; kills a worker after a step, or stops the program."""

    life: FunctionLife
    kill: tuple[int, int] | None = None
    stops_at: int | None = None

    def after_step(self, sgd: Any, result: StepResult) -> None:
        """Note a step."""
        weights = {name: summary_of(value) for name, value in sgd.weights().items()}
        rates = [{"lr": rate} for rate in result.learning_rate]
        self.life.steps.append(
            StepRecord(
                step=result.step,
                optimizer=0,
                epoch=0,
                line="",
                samples=[],
                batches=1,
                weight=None,
                losses=[result.loss],
                settings=rates,
                gradients={},
                left_over=False,
                edited=False,
                drew=False,
                variables={},
                lines={},
                gathered=[],
                weights=weights,
            )
        )
        if self.kill is not None and result.step == self.kill[1]:
            worker, self.kill = self.kill[0], None
            os.kill(sgd.foreach_worker(_pid)[worker], signal.SIGKILL)
        if result.step == self.stops_at:
            raise StoppedError


def _pid(worker: Any) -> int:
    pid: int = worker.pid
    return pid


@dataclass
class JobRuns:
    """Makes the runs of one verification of a job.

    Attributes:
        creator: of the job's models.
        steps, strategy, seed: of each run.
        folder: for checkpoints.
        deadline: seconds that a step may last.
        chosen: further arguments of `DistributedSGD`.
    """

    creator: Callable[[int, int], Any]
    steps: int
    strategy: Any
    seed: int
    folder: Path
    deadline: float
    chosen: dict[str, Any] = field(default_factory=dict)

    def job(
        self,
        what: str,
        workers: int,
        *,
        samples: int | None = None,
        kill: tuple[int, int] | None = None,
        stops_at: int | None = None,
    ) -> Run:
        """Run the job undisturbed, with a worker killed, or stopped and resumed."""
        life = FunctionLife(0, workers, time.time_ns())
        run = Run(what, [life])
        checkpoints = None
        if stops_at is not None:
            checkpoints = Checkpoints(self.folder / what.replace(" ", "-"), every=1)
        try:
            with contextlib.suppress(StoppedError):
                self._fit(_Notes(life, kill, stops_at), workers, samples, checkpoints)
            if stops_at is not None:
                self._fit(_Notes(life), workers, samples, checkpoints)
        except SteepestError as error:
            run.error = f"{type(error).__name__}: {error}"
        return run

    def _fit(
        self, notes: _Notes, workers: int, samples: int | None, checkpoints: Checkpoints | None
    ) -> None:
        config = RunConfig(
            runtime="processes",
            failure=FailureConfig(patience=float("inf"), spares=0),
            deadlines=DeadlineConfig(step=self.deadline, call=4 * self.deadline),
        )
        with DistributedSGD(
            self.creator,
            workers,
            strategy=self.strategy,
            seed=self.seed,
            global_batch_size=samples,
            run_config=config,
            checkpoints=checkpoints,
            **self.chosen,
        ) as sgd:
            if not notes.life.first:
                notes.life.first = {name: summary_of(v) for name, v in sgd.weights().items()}
                notes.life.facts = Facts(
                    sgd.for_model(_batch_size), True, [], [], [], low_precision=False, line=""
                )
            sgd.fit(steps=self.steps, callbacks=[notes], progress=False)


def _batch_size(model: Any) -> int:
    size: int = model.batch_size
    return size
