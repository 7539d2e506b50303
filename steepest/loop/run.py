"""`run`: a user's function with a loop of its own, on many workers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from steepest.checkpoint.files import Checkpoints
from steepest.core.config.run import FailureConfig, RunConfig
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ConfigurationError, folds_frames
from steepest.loop.job_view import LoopKind
from steepest.loop.model import LoopCreator, LoopModel
from steepest.loop.prepared import Progress
from steepest.loop.user_loop import current
from steepest.observe.display import ENDLESS
from steepest.observe.history import History
from steepest.observe.progress import Callback
from steepest.observe.results import StepResult
from steepest.observe.timeline.trace_file import check_target
from steepest.runtime.driver.trainer import DistributedSGD
from steepest.strategies.named import as_strategy
from steepest.validation import require_function

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunResult:
    """The result of `run`.

    Attributes:
        metrics: the last values given to `steepest.report`, as means over workers, by name.
        reports: the values of each call of `report`, in order.
        history: rows of steps, epochs and events.
        state_dict: parameters, under each of their names, and buffers, as the plain module takes them.
    """

    metrics: dict[str, float]
    reports: list[dict[str, float]]
    history: History
    state_dict: dict[str, torch.Tensor]


class _StopsAtTheEnd(Callback):
    """Ends a `fit` when every worker's function has returned: the step then has no samples."""

    def on_step(self, sgd: Any, result: StepResult) -> None:
        """Stop after a step without samples."""
        if not result.samples:
            sgd.stop()


@folds_frames
def run(  # noqa: PLR0913 - keywords of a user, most of them optional
    function: Callable[[], Any],
    *,
    num_workers: int | tuple[int, int] = 1,
    strategy: str | Strategy = "ps",
    gpu: bool = False,
    global_batch_size: int | None = None,
    seed: int = 0,
    run_config: RunConfig | None = None,
    checkpoints: Checkpoints | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | str = True,
    timeline: str | Path | None = None,
) -> RunResult:
    """Run a function with a training loop of your own on many workers, as one training.

    Args:
        function: called without arguments in each worker's process. It makes model, optimizer and loader, gives
            them to `steepest.prepare`, and loops over `steepest.epochs` and the loader. The replacement of a dead
            worker runs it from its beginning, and enters `epochs` where the job is. A spare process has done so
            beforehand up to `prepare`, or up to `steepest.rank()`, see `FailureConfig`.
        num_workers: worker processes, or (min, max), as of `DistributedSGD`.
        strategy: as of `DistributedSGD`.
        gpu: whether each worker has a GPU, as of `DistributedSGD`.
        global_batch_size: samples of a step of all workers together. None for the loader's batch size on each
            worker.
        seed: as of `DistributedSGD`.
        run_config: as of `DistributedSGD`. None for the defaults, but that a step waits for the replacement of a
            dead worker (``FailureConfig(patience=math.inf)``), so that all workers stay in their loops.
        checkpoints: where checkpoints are kept. The same program, started again, goes on where it was.
        callbacks: as of `DistributedSGD.fit`.
        progress: as of `DistributedSGD.fit`.
        timeline: the file of a timeline of the whole run, see `DistributedSGD.timeline`; None for none.

    Raises:
        ConfigurationError: an argument is wrong, or `prepare` was given something that cannot be shared.
        ModelRaisedError: the function raised; its traceback is the cause.
        StepError: as `DistributedSGD.fit`.

    Example:
        >>> result = steepest.run(train, num_workers=4, strategy="ps")       # doctest: +SKIP
        >>> result.metrics["loss"]                                           # doctest: +SKIP
        0.031
    """
    if current() is not None:
        raise ConfigurationError(
            "steepest.run() was called in a worker of a run: start a script that calls it by `python`; for `steepest "
            "run`, `compare` and `plan` the script calls its function in place of steepest.run(function, ...)"
        )
    require_function(function)
    if run_config is not None and run_config.audit:
        raise ConfigurationError(
            f"audit={run_config.audit} with a loop of your own, in which no worker can take another one's step: leave "
            "audit= out, or train with DistributedSGD(model_creator).fit()"
        )
    if timeline is not None:
        check_target(timeline)
    chosen = as_strategy(strategy)
    local = chosen.updates if chosen.local else 0
    paced = chosen.local and chosen.updates_of_share < chosen.updates
    ahead = chosen.local and chosen.delay > 0
    creator = LoopCreator(function, LoopKind(seed, chosen.rule, local, paced, ahead))
    with contextlib.ExitStack() as whole:
        sgd = whole.enter_context(
            DistributedSGD(
                creator,
                num_workers,
                gpu=gpu,
                strategy=strategy,
                global_batch_size=global_batch_size,
                seed=seed,
                run_config=run_config or RunConfig(failure=FailureConfig(patience=math.inf)),
                checkpoints=checkpoints,
            )
        )
        if timeline is not None:
            whole.enter_context(sgd.timeline(timeline))
        reports = sgd.history.reports
        numbers = itertools.count()
        ends = _StopsAtTheEnd()
        begun = 0  # epochs that `fit` was asked for; those of a checkpoint are the first of them
        while (wanted := _advance(sgd, next(numbers), creator.name)) is not None:
            if wanted.sees_all_batches:
                shown = "lines" if progress is True and not wanted.steps else progress
                sgd.fit(steps=wanted.steps or ENDLESS, callbacks=[ends, *callbacks], progress=shown)
                continue
            epochs = max(wanted.epochs - begun, 1)
            begun += epochs
            sgd.fit(epochs=epochs, callbacks=[ends, *callbacks], progress=progress)
        for result in sgd._end_evaluations():
            for callback in callbacks:
                callback.on_evaluation(sgd, result)
        weights = sgd.state_dict()  # beside a death, after steps that are taken again
        sgd.history.end()
        if left := reports.behind_the_last_step():
            sgd.history.reported(left)
        return RunResult(reports.last(), reports.rows(), sgd.history, weights)


@dataclass(frozen=True)
class _LoopNeeds:
    """The needs of the workers' functions: a number of epochs in all, or steps that they count themselves."""

    epochs: int
    sees_all_batches: bool
    steps: int | None


def _advance(sgd: DistributedSGD, number: int, loop: str) -> _LoopNeeds | None:
    """Let all functions go on up to where they need batches; return what they want, or None if all have ended."""
    epoch = sgd.epoch or 0
    answers = sgd._foreach_loop(_Advance(epoch, number), loop)
    if not number and answers[0].resumed:
        log.warning("going on with the script's own settings: %s", answers[0].resumed)
    for worker, progress in enumerate(answers):
        sgd.history.reports.add(worker, progress.reports, sgd._training.step)
    going_on = [progress for progress in answers if not progress.ended]
    if not going_on:
        return None
    wanted = {progress.epochs for progress in going_on if progress.epochs is not None}
    return _LoopNeeds(
        max(max(wanted, default=0), epoch + 1),
        any(progress.sees_all_batches for progress in going_on),
        max(progress.steps or 0 for progress in going_on),
    )


@dataclass(frozen=True)
class _Advance:
    """The function that is run on each worker's model between two calls of `fit`."""

    epoch: int
    number: int  # of such calls before that were answered

    def __call__(self, model: LoopModel) -> Progress:
        """Let the user's function go on."""
        return model.advance(self.epoch, self.number)
