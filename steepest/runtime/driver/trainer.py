"""DistributedSGD: the trainer, which a user drives from one process, the driver."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from steepest.checkpoint.files import Checkpoints
from steepest.core.config.job import JobConfig
from steepest.core.config.run import RunConfig
from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job, ModelCreator
from steepest.core.engine.replicas import Replicas
from steepest.core.models.metric_states import MetricState
from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.errors import (
    ConfigurationError,
    PeerLostError,
    ShutdownError,
    UnfrozenError,
    folds_frames,
)
from steepest.observe.delivery import ending_of
from steepest.observe.history import History
from steepest.observe.page.document import chart_script
from steepest.observe.progress import Callback, EventFeed
from steepest.observe.results import EvaluationResult, ProcessInfo, Stats, StepResult
from steepest.observe.timeline.trace_file import check_target
from steepest.runtime import remote_functions
from steepest.runtime.cluster import Cluster
from steepest.runtime.deaths import persistently
from steepest.runtime.driver.background_evaluation import BackgroundEvaluation, summary_of
from steepest.runtime.driver.calls import Calls
from steepest.runtime.driver.checkpoint_manager import CheckpointManager
from steepest.runtime.driver.directory_lock import DirectoryLock
from steepest.runtime.driver.dropped_trainers import drop
from steepest.runtime.driver.fit_loop import Fit, FitArguments
from steepest.runtime.driver.job_page import JobPage, open_page
from steepest.runtime.driver.job_stats import job_stats
from steepest.runtime.driver.timeline import Timeline, recorded
from steepest.runtime.driver.training import Training
from steepest.runtime.process import WorkerView
from steepest.runtime.recovery.supervisor import Supervisor
from steepest.runtime.remote_functions import name_of
from steepest.runtime.room import worker_bundle
from steepest.runtime.state.row_descriptions import RowDescription, describe_rows
from steepest.runtime.state.table_export import export_table
from steepest.runtime.state.transfer import StateTransfer
from steepest.strategies.named import strategy_for
from steepest.tables.files.changed_rows import RowChange
from steepest.tables.files.exported_table import ExportedTable
from steepest.tables.files.table_moves import require_renames
from steepest.validation import (
    require_batch_size,
    require_choice,
    require_count,
    require_instance,
    require_model_creator,
    require_range,
)

T = TypeVar("T")


class DistributedSGD:
    """Train one model on many worker processes.

    The constructor starts the workers, on Ray where the program is connected to it or RAY_ADDRESS is
    set, else on this machine (`RunConfig.runtime`), builds the model on each and returns when all
    are up. Use the trainer as a context manager, or call `shutdown`. A trainer that is
    garbage-collected ends its processes with a warning, and does not write a last checkpoint.

    `step`, `fit`, `evaluate` and the other methods that need idle workers run one at a time;
    another thread waits. Only `weights`, `stats`, `log`, `export_table`, `set_learning_rate`,
    `resize` and `stop` may be called while workers train, from any thread or callback.

    Args:
        model_creator: called as ``model_creator(worker_index, device_index)`` for each replica, in
            the process of its worker; returns a `Model`, such as `TorchModel`. Random state is
            seeded alike before each call.
        num_workers: worker processes; or (min, max) for as many as the cluster has room for, at the
            beginning and later: `fit` and `step` take in new workers as nodes join the cluster, and
            continue without a dead worker when there is no room for its successor for
            `run_config.deadlines.start` seconds. Below `min` workers they wait for one.
        devices_per_worker: replicas in each worker.
        gpu: whether each replica is on a GPU of its own instead of the CPU; on one machine without Ray workers
            share GPUs if there are fewer.
        strategy: "ps", "allreduce", "local", "async", "ssp", "simple", or a strategy object.
        accumulate: batches whose gradients each replica adds up in a step, one after the other; a
            step covers ``num_workers * devices_per_worker * accumulate * batch_size`` samples.
        global_batch_size: samples that a step covers instead, however many workers there are; they
            are divided evenly over the replicas. A replica adds up as many batches as are needed
            for none to exceed the model's batch size, and at least `accumulate`. Under "local" it
            is one batch of all replicas together, of which a step has `sync_every`. Not for "async"
            and "ssp".
        seed: decides initial weights, order of samples and random state.
        run_config: how processes are run: failures, deadlines, resources, the log. None for the
            defaults.
        checkpoints: where `fit` keeps checkpoints, and how often. The newest whole checkpoint in
            that directory is restored, and `fit` leaves out as many steps as it has: the same
            program, started again, ends where it would have ended. None to keep none.
        extensions: attach to the workers, see `docs/explanation/extensions.md`; each is pickled. None for all that
            the library has (`steepest.extensions.EXTENSIONS`).

    Raises:
        ConfigurationError: an argument is wrong.
        CheckpointError: the checkpoints are of another model, optimizer or data set, or all are
            damaged; or another driver keeps checkpoints in that directory now.
        ModelError: the model breaks its protocol, or workers have built different ones.
        ModelRaisedError: building the model raised; the traceback is the cause.
        ResourcesError: the cluster cannot place the workers, ever or within
            `run_config.deadlines.start` seconds.
        DeadlineError, PeerLostError: the processes did not come up.

    Example:
        >>> with DistributedSGD(model_creator, num_workers=2) as sgd:      # doctest: +SKIP
        ...     sgd.fit(epochs=3)
        ...     print(sgd.evaluate(test_set))
    """

    @folds_frames
    def __init__(  # noqa: PLR0913 - keywords of a user, most of them optional
        self,
        model_creator: ModelCreator,
        num_workers: int | tuple[int, int] = 1,
        devices_per_worker: int = 1,
        gpu: bool = False,
        strategy: str | Strategy = "ps",
        *,
        accumulate: int = 1,
        global_batch_size: int | None = None,
        seed: int = 0,
        run_config: RunConfig | None = None,
        checkpoints: Checkpoints | None = None,
        extensions: Sequence[Extension] | None = None,
    ) -> None:
        require_model_creator(model_creator)
        if checkpoints is not None:
            require_instance("checkpoints", checkpoints, Checkpoints)
        run_config = RunConfig() if run_config is None else run_config
        require_instance("run_config", run_config, RunConfig)
        if run_config.page:
            chart_script()  # without it there is no page
        least, most = require_range("num_workers", num_workers)
        chosen = JobConfig(
            devices_per_worker=devices_per_worker,
            gpu=gpu,
            accumulate=accumulate,
            global_batch_size=global_batch_size,
            seed=seed,
            extensions=extensions,
        )
        config = strategy_for(strategy, least, chosen)
        most = chosen.most_of(most)
        # held by the thread whose call of step, fit, evaluate, save ... it is; never by the owner
        self._lock = system().lock()
        self._cluster: Cluster | None = None
        self._dropped: weakref.finalize[..., DistributedSGD] | None = None
        self._page: JobPage | None = None
        self._said_where = False
        self._timeline: Timeline | None = None
        with contextlib.ExitStack() as undo:
            lock = DirectoryLock(checkpoints)
            undo.callback(lock.release)
            undo.callback(self._end_start)
            persistently(
                lambda: self._start(
                    Cluster(chosen, run_config), model_creator, (least, most), config,
                    checkpoints, lock,
                ),
                run_config.failure.max_failures,
            )  # fmt: skip
            self._dropped = weakref.finalize(self, drop, self._live(), self._keeping, os.getpid())
            self._dropped.atexit = False  # all processes end then
            if run_config.page:
                self.page().announce()
            undo.pop_all()

    def _start(
        self,
        cluster: Cluster,
        model_creator: ModelCreator,
        bounds: tuple[int, int],
        strategy: Strategy,
        checkpoints: Checkpoints | None,
        lock: DirectoryLock,
    ) -> None:
        """Start the processes, and continue from the newest checkpoint."""
        self._end_start()
        self._cluster = cluster
        cluster.begin(model_creator, bounds, strategy)
        self._state = StateTransfer(cluster)
        self._supervisor = Supervisor(cluster, self._state, bounds)
        self._calls = Calls(cluster, self._supervisor)
        self._training = Training(cluster, self._supervisor)
        self._keeping = CheckpointManager(
            checkpoints, lock, self._training, self._state, self._calls
        )
        self._background = BackgroundEvaluation(
            cluster, self._state, self._calls, self._keeping.present, self.history.reports.asked
        )
        self._keeping.resume()
        self._events = EventFeed(cluster.events)
        self._supervisor.snapshots.ensure()
        if (lost := cluster.client.lost_peer) is not None:
            cluster.deaths.lost(lost, "its channel closed while the job started")
        self._supervisor.start()

    def _end_start(self) -> None:
        """End the processes of a failed start, if there are any."""
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None
        if self._dropped is not None:
            self._dropped.detach()

    @property
    def strategy(self) -> Strategy:
        """The present strategy."""
        return self._job.config

    @property
    def num_workers(self) -> int:
        """The present number of worker processes."""
        return self._training.cluster.job.num_workers

    @property
    def num_servers(self) -> int:
        """The present number of servers, in processes of their own or in the workers' processes."""
        return self._job.num_servers

    @property
    def devices_per_worker(self) -> int:
        """The number of replicas in each worker."""
        return self._job.devices_per_worker

    @property
    def accumulate(self) -> int:
        """The number of batches that each replica computes in a step."""
        return self._job.micro_batches

    @property
    def epoch(self) -> int | None:
        """The epoch of the next step, from 0; None when the data are streams."""
        return self._keeping.epoch

    @property
    def learning_rate(self) -> tuple[float, ...]:
        """The learning rate of each parameter group in the next step."""
        return self._training.learning_rate()

    @property
    def fit_began(self) -> int:
        """The number of steps before the present or last `fit`.

        Steps that `fit` left out, because the restored checkpoint has them, count as its own.
        """
        return self._keeping.begun

    @property
    def evaluations(self) -> tuple[EvaluationResult, ...]:
        """The evaluations of all calls of `fit`, those before a restored checkpoint too, in order."""
        return tuple(self._keeping.evaluations)

    @property
    def history(self) -> History:
        """The run so far: rows of steps, epochs, evaluations and events."""
        return self._training.history

    @property
    def _job(self) -> Job:
        return self._training.cluster.job

    # -- training ------------------------------------------------------------------------------

    @folds_frames
    def step(self, fetch_stats: bool = True) -> StepResult:
        """Take one step, and return its result when it is committed.

        A step is one batch, or `accumulate` batches, on every replica. Steps that a death has undone
        since the last call are taken again first.

        Args:
            fetch_stats: whether to compute and return loss, metrics and timings too.

        Raises:
            ConfigurationError: `fetch_stats` is not True or False.
            StepError: the step was not committed, for one of these causes.
            ModelRaisedError: the model or its data raised; or the optimizer did, in this step or in
                the one before it, and the job was set back as the message says. The traceback is
                the cause.
            ModelError: the model breaks its protocol: it writes to trained parameters, or a metric
                is no number.
            NonFiniteError: a gradient holds NaN or infinity.
            DeadlineError: the step was not committed within `run_config.deadlines.step` seconds.
            PeerLostError: a process died and cannot be replaced.
            ShutdownError: the trainer is shut down.
        """
        require_choice("fetch_stats", fetch_stats, (False, True))
        with self._idle("step"):
            results: list[StepResult] = []
            self._train(self._training.one_more(), fetch_stats, results.append)
            return results[-1]

    @folds_frames
    def fit(
        self,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool | str = True,
        validation: Any = None,
        evaluate_every: int | None = None,
        background: bool = False,
    ) -> StepResult:
        """Take many steps, which workers start by themselves without waiting for the driver.

        With `checkpoints`, the first steps that are asked for are those that the restored
        checkpoint has: they are left out, and no callback is called for them. Steps that `step`
        took are not left out.

        Args:
            steps, epochs: how many to train; give exactly one of the two. An epoch ends when each sample has
                been seen once; the first one may have begun before.
            callbacks: called for each step and event, and between epochs if they override
                `on_epoch_end`, or between steps if they override `after_step`.
            progress: what to show on standard error: "bar" (a live line), "lines" (a line every ten
                seconds); True for the one that suits it, False for nothing.
            validation: data that `evaluate` takes, evaluated while training pauses; results go to
                `Callback.on_evaluation` and `evaluations`.
            evaluate_every: steps from one evaluation to the next; None for the end of each epoch.
            background: evaluate a copy of the weights in a process of its own, on the CPU, while training goes on.
                The result has the step of the copy. Callbacks get it when workers pause next, at the next
                evaluation at the latest, for which training waits; so does the end of `fit`.

        Returns:
            The last step's result; that of the restored checkpoint if it has all steps that are
            asked for.

        Raises:
            StepError: as for `step`. The exception of a callback is raised, too. Steps that were committed
                before stay committed.
            CheckpointError: a checkpoint could not be written; raised when the next one is due, or
                at the end.
        """
        with self._idle("fit"), self._training.stoppable():
            self._supervisor.await_whole()
            asked = FitArguments(
                steps, epochs, callbacks, progress, validation, evaluate_every, background
            )
            keeping = self._keeping
            fit = Fit(
                self, keeping, self._events, self._train, self._evaluate, asked, self._first_line,
                self._background,
            )  # fmt: skip
            try:
                result = fit.run()
            except BaseException as error:
                self.history.ended = ending_of(error)
                raise
            self.history.ended = "finished"
            return result

    def _first_line(self) -> str:
        """Return, at the first call, a line on the model and the processes; "" later."""
        said, self._said_where = self._said_where, True
        return "" if said else self._training.cluster.in_words()

    def _train(
        self, end: Callable[[], int], stats: bool, on_step: Callable[[StepResult], None]
    ) -> None:
        self._live()
        while True:
            try:
                with self._keeping.watched():
                    self._training.take_steps(end, stats, on_step)
            except UnfrozenError:
                # after which what is unfrozen is trained; where a process dies meanwhile, the step says so again
                with contextlib.suppress(PeerLostError):
                    self._on_workers(self._calls.once, _look)
            else:
                return

    def stop(self) -> None:
        """End the present `fit` after the last committed step, with workers idle.

        Call it in a callback or on another thread; it returns at once, and without a `fit` it does
        nothing. Steps that are granted and not begun are taken back. The step that workers are
        computing is committed as a whole, or taken back as a whole and repeated by the next call of
        `fit` or `step`. Callbacks are called for each step that was committed, then `fit` returns
        normally: there is no evaluation and no `on_epoch_end` for a part of an epoch, and with
        `checkpoints` the state is written. The next `fit` continues after the last step.
        """
        self._training.stop()

    def set_learning_rate(self, rate: float | Sequence[float] | None) -> None:
        """Set the optimizer's learning rate from the next step on.

        Between steps, and in callbacks that are called between them, the next step has it. In
        `on_step`, or on another thread while workers train, they stop for a moment first, as for
        `stop`, and the next step that they begin has it; for a rate that depends only on the step,
        use `learning_rate=` or `lr_scheduler=` of the model. The rate is kept in checkpoints, and
        under another strategy; steps that are repeated after a death have the rates that they had.
        Under "local" it is that of the workers' own optimizers.

        Args:
            rate: for all parameter groups, or one for each, in the order of the optimizer's groups;
                it holds until it is set again, and overrides a schedule's learning rate. Other
                hyperparameters still follow the schedule. None for the schedule's rate at the
                present step, or the optimizer's own if there is no schedule.

        Raises:
            ConfigurationError: it is negative or not finite, there are not as many as groups, or
                the optimizer has no "lr"; nothing has changed.
        """
        self._training.set_learning_rate(rate)

    # -- looking -------------------------------------------------------------------------------

    @folds_frames
    def evaluate(self, data: Any, batch_size: int | None = None) -> EvaluationResult:
        """Return loss and metrics over a data set, with the last committed weights.

        The data set is divided among the workers.

        Args:
            data: anything that the model takes as training data, of known length.
            batch_size: samples in a batch; None for that of a DataLoader, else the model's own.

        Raises:
            ConfigurationError: there are no samples, the data are no data, or `batch_size` is no
                positive integer.
            ModelRaisedError: the model or the data raised; the traceback is the cause.
            DeadlineError: no answer came within `run_config.deadlines.call` seconds.
        """
        with self._idle("evaluate"):
            result = self._evaluate(data, batch_size)
            self.history.evaluated(result.step, result)
            return result

    def _evaluate(self, data: Any, batch_size: int | None = None) -> EvaluationResult:
        """Evaluate, without a row in the history."""
        require_batch_size(batch_size)
        cluster = self._live()

        def evaluate() -> EvaluationResult:
            arguments = data, batch_size, self.num_workers, self._state.merged_buffers()
            parts = cluster.workers.call(remote_functions.evaluate, *arguments, what="evaluate")
            step, epoch = self._keeping.present()
            summary = summary_of([part.result for part in parts], step, epoch)
            states = [part.states for part in parts]
            values = self._metric_values(states) if any(states) else {}
            return replace(summary, metrics={**summary.metrics, **values})

        return self._calls.surviving(evaluate)

    def _metric_values(self, parts: list[Mapping[str, MetricState]]) -> dict[str, float]:
        """Return metrics over what all workers have accumulated, computed by one of them that has had samples."""
        workers = [next(index for index, states in enumerate(parts) if states)]
        call = self._training.cluster.workers.call
        (values,) = call(
            remote_functions.metric_values, parts, workers=workers, what="compute metrics"
        )
        found: dict[str, float] = values
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Return CPU copies of all parameters by name, at one version.

        It may be called at any time, from any thread. While workers train it is the present version:
        in `Callback.on_step` that of a later step than the callback's, which is logged once as a
        warning. In `Callback.after_step` workers wait.

        Frozen parameters that the model itself changes (a momentum encoder's, say) are averaged
        over replicas, as buffers are. During training each replica sends its own between two of its
        steps, which may take as long as a step.
        """
        self._live()
        weights, step = self._calls.reading(self._state.weights)
        self._training.compare(step)
        return weights

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return CPU copies of all parameters, under each of their names, and of buffers.

        Running statistics, such as BatchNorm's, are averaged over replicas; other buffers are worker 0's, unless
        ``TorchModel(buffers=)`` says otherwise.

        The plain module takes it: ``module.load_state_dict(sgd.state_dict())``.
        """
        with self._idle("state_dict"):
            return self._calls.surviving(self._state.state_dict)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set all parameters and buffers of every replica.

        The optimizer's state and the position in the data stay.

        Args:
            state: by name, what `state_dict` of a trainer, or of the plain module, returned: no
                name more or less.

        Raises:
            ConfigurationError: `state` is no dict of tensors by name, a name is missing or unknown,
                or a tensor has another shape; nothing has changed.
        """
        with self._idle("load_state_dict"):
            self._calls.replacing(
                lambda: self._state.load_state_dict(state, self._training.version)
            )
            self._keeping.changed()

    @folds_frames
    def set_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set some parameters by name on all servers and workers.

        The others, and the optimizer's state, stay.

        Raises:
            ConfigurationError: `weights` is no dict of tensors by name, a name is unknown, or a
                tensor has another shape, or holds NaN or infinity; nothing has changed.
        """
        with self._idle("set_weights"):
            self._calls.replacing(lambda: self._state.set_weights(weights, self._training.version))
            self._keeping.changed()

    @folds_frames
    def foreach_worker(self, fn: Callable[[WorkerView], T]) -> list[T]:
        """Run a function in every worker process, between steps; return the results, by worker.

        Raises:
            ModelRaisedError: the function raised; its traceback is the cause.
            ConfigurationError: the function or a result cannot be pickled, or the function has
                written to trained parameters, or set a model's `batch_size` or `data`, which is
                undone: `set_weights` sets weights. Buffers and frozen parameters may be written.
            DeadlineError: no result came within `run_config.deadlines.call` seconds.
        """
        with self._idle("foreach_worker"):
            return self._on_workers(
                self._calls.once, fn, view=True, what=f"run the function {name_of(fn)}"
            )

    @folds_frames
    def foreach_model(self, fn: Callable[[Any], T]) -> list[T]:
        """Run a function on every replica, in its process, between steps; return the results.

        They are in the order of workers and devices. It raises as `foreach_worker` does.

        Args:
            fn: takes a model that `model_creator` has made.
        """
        with self._idle("foreach_model"):
            what = f"run the function {name_of(fn)}"
            parts = self._on_workers(self._calls.once, remote_functions.on_models, fn, what=what)
            return [result for part in parts for result in part]

    def _foreach_loop(self, fn: Callable[[Any], T], loop: str) -> list[T]:
        """Run a function on every replica, see `foreach_model`; again whenever a process dies meanwhile.

        It is for functions that give the same result when they are run again, see `steepest.loop.run`.

        Args:
            fn: continues a user's loop.
            loop: the name of the loop, for errors.
        """
        with self._idle("run"):
            again, on_models = self._calls.surviving, remote_functions.on_models
            parts = self._on_workers(again, on_models, fn, loop, what=f"run {loop}")
            return [result for part in parts for result in part]

    def _end_evaluations(self) -> Iterator[EvaluationResult]:
        """Keep and yield the results of all evaluations that users' loops have asked for."""
        while (
            result := next(self._background.results(), None) or self._background.collect()
        ) is not None:
            self._keeping.add(result)
            yield result

    @folds_frames
    def for_model(self, fn: Callable[[Any], T]) -> T:
        """Run a function on the first replica only, and return its result.

        It raises as `foreach_worker` does.

        Args:
            fn: takes the model that `model_creator` has made.
        """
        with self._idle("for_model"):
            what = f"run the function {name_of(fn)}"
            result: T
            (result,) = self._on_workers(
                self._calls.once, remote_functions.on_first_model, fn, workers=[0], what=what
            )
            return result

    @folds_frames
    def warmup(self) -> None:
        """Compute a gradient on every replica and discard it, so that the first step is fast."""
        with self._idle("warmup"):
            workers = self._live().workers
            self._calls.surviving(lambda: workers.call(Replicas.warmup, what="compute a gradient"))

    def stats(self) -> Stats:
        """Return the job's counters and events so far; any thread may ask."""
        return job_stats(self._live(), self._training, self._supervisor, self._calls)

    def processes(self) -> tuple[ProcessInfo, ...]:
        """Return the job's worker and server processes, and where they run; any thread may ask.

        Example: a process by its name.

            {process.name: process for process in sgd.processes()}["worker 1"].pid
        """
        places = self._live().places
        return tuple(
            ProcessInfo(peer.role, peer.index, place.node, place.host, place.pid)
            for peer, place in sorted(places.items())
        )

    def page(self, host: str = "127.0.0.1", port: int = 0) -> JobPage:
        """Serve the page of this job to a browser, until the trainer is shut down; any thread may ask.

        It shows curves, how each worker spends its time, changes of the job, processes, updated twice a
        second, and the stacks of all processes. It costs nothing while no browser shows it. Its `url` has a
        token, without which the page cannot be seen. A second call returns the same page.

        Args:
            host: the address at which it listens: by default this machine alone reaches it. With another
                one the token travels in plain text.
            port: 0 for a free one.

        Raises:
            ConfigurationError: plotly is not installed, or the port is in use.

        Example:
            >>> sgd.page().url                                              # doctest: +SKIP
            'http://127.0.0.1:40123/#token=...'
        """
        cluster = self._live()
        if self._page is None:
            self._page = open_page(cluster, self._training, self._keeping.folder, host, port)
        return self._page

    @contextlib.contextmanager
    def timeline(self, path: str | Path) -> Iterator[None]:
        """Record what each process does in a block, and write it to a file that https://ui.perfetto.dev opens.

        It has spans of workers (compute, load, push, wait, call), of servers and aggregators (stage, reduce, apply,
        wait) and of the driver, with steps, versions and chunks, and what travels between them, on one clock; see
        `docs/howto/timeline.md`. `steepest explain` says in words what it shows. The file is written when the
        block ends, also by an exception.

        Args:
            path: of the file, in Chrome's trace format; one that is there is replaced.

        Raises:
            ConfigurationError: it cannot be written, which is found before the block begins as far as that is possible;
                or a timeline is being recorded already.

        Example:
            >>> with sgd.timeline("trace.json"):                            # doctest: +SKIP
            ...     sgd.fit(steps=100)
        """
        cluster, target = self._live(), check_target(path)
        if self._timeline is not None:
            raise ConfigurationError("timeline() within timeline(): one is recorded at a time")
        self._timeline = Timeline(cluster, self._training, target)

        def release() -> None:
            self._timeline = None

        with recorded(self._timeline, release):
            yield

    def log(self) -> CommitLog:
        """Return every commit so far, with its pushes, their samples, and the versions they pulled.

        `steepest.testing.replay` applies the log serially, which gives the same weights.

        Raises:
            ConfigurationError: no log is kept; give ``RunConfig(keep_log=True)``.
        """
        self._live()
        return self._calls.reading(self._state.log)

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def best_checkpoint(self) -> Path | str | None:
        """The path or URL of the best evaluation's checkpoint, for `restore`; None if there is none.

        Returned when it is written, see `Checkpoints`.

        Raises:
            CheckpointError: it could not be written.
        """
        best = self._keeping.best()
        return best if best is None or isinstance(best, Path) else str(best)

    @folds_frames
    def save(self, path: str | Path) -> None:
        """Write a checkpoint: weights, optimizer state, buffers, and the position in the data.

        Args:
            path: a directory, or a URL such as ``s3://bucket/best``; a checkpoint in it is replaced
                when the new one is whole.

        Raises:
            CheckpointError: it cannot be written.
            ConfigurationError: a URL of a kind that is not known.
        """
        with self._idle("save"):
            self._keeping.save(path)

    @folds_frames
    def restore(
        self,
        path: str | Path,
        data: str = "continue",
        rename_tables: Mapping[str, str] | None = None,
        change_rows: RowChange | None = None,
    ) -> None:
        """Continue from a checkpoint, at any number of workers and servers, under any strategy.

        Training continues at exactly the sample after the last one. With the same global batch it
        takes the same steps, to rounding, at any number of workers.

        Data of the same length with another fingerprint are taken for the same data; a warning names
        the difference. Embedding tables that the checkpoint lacks begin without rows, and further ones
        in the checkpoint are left out; a warning names both.

        Args:
            path: a directory, or a URL such as ``s3://bucket/best``.
            data: "continue" for the position that the checkpoint has in its data; "new" to go on
                with other data, from epoch 0, without the samples that the checkpoint has not
                visited yet. Weights, optimizer state, rows of tables, buffers, learning-rate
                schedules and the number of steps continue.
            rename_tables: new names of embedding tables by those that they have in the checkpoint: their rows,
                slots and counts go on under the new name. First values of new rows follow from the name.
            change_rows: a function that servers' processes call with the name of a table that servers had and some of
                its rows, as `TableRows`, again and again until all rows were there. It returns rows by the name of the
                job's table that gets them; rows for no table of the job are left out. Counts of ids without rows, and
                gradients that workers had not pushed, begin anew. None to leave rows as they are.

        Raises:
            CheckpointError: it is missing, damaged, or of another model or optimizer, or of another
                number of samples and `data` is not "new"; nothing has changed.
            ConfigurationError: a URL of a kind that is not known; `data` or `rename_tables` is something else.
        """
        require_choice("data", data, ("continue", "new"))
        require_renames(rename_tables)
        if change_rows is not None and not callable(change_rows):
            raise ConfigurationError(f"change_rows={change_rows!r:.80}: give a function, or None")
        with self._idle("restore"):
            self._background.drop()
            self._keeping.restore(path, data, rename_tables, change_rows)

    def export_table(self, name: str, since: ExportedTable | str | None = None) -> ExportedTable:
        """Return the rows of an embedding table at one version, for serving.

        It may be called at any time, from any thread: training goes on meanwhile.

        Args:
            name: of the table.
            since: an earlier export of it, or its `cursor`: only the rows that have changed since then
                are returned, and the ids whose rows were removed, for `ExportedTable.updated` and
                `ServedTable.update`. All rows are returned of a table that workers hold, see `Table.replicate`,
                and if the changes are not known: after a restore, when servers have moved, and with a very old
                cursor. Servers keep no list of consumers: any number of them may have cursors of their own.

        Raises:
            ConfigurationError: there is no such table, or `since` is of another one, or no cursor.
        """
        self._live()
        weights = self._state.weights
        return self._calls.reading(
            lambda: export_table(self._training.cluster, name, since, weights)
        )

    def describe_rows(self, name: str, ids: Sequence[int]) -> list[RowDescription]:
        """Return the servers' records of some ids of an embedding table, for debugging.

        It may be called at any time, from any thread. The shards of these ids are read whole.

        Args:
            name: of the table.
            ids: integers from 0; ids without rows have a description, too.

        Returns:
            For each id its row's values and slots, how often it was seen, and the update that wrote it last.

        Raises:
            ConfigurationError: there is no such table, or the ids are no list of such integers.
        """
        self._live()
        return self._calls.reading(lambda: describe_rows(self._training.cluster, name, ids))

    def import_table(self, name: str, rows: ExportedTable | tuple[Any, Any]) -> None:
        """Give rows to ids of an embedding table: pretrained values, or another job's export.

        Ids that have rows get these values, others get new rows; their optimizer's slots begin anew. As after
        `restore`, `log` and counters begin anew.

        Args:
            name: of the table.
            rows: an `ExportedTable` of all its rows, whatever its name and optimizer; or (ids, values), (n,) integers
                and (n, dim) numbers, as tensors or arrays.

        Raises:
            ConfigurationError: there is no such table, it has no room for the rows, or they are of another dimension,
                not finite, or have an id twice; nothing has changed.
        """
        with self._idle("import_table"):
            self._calls.replacing(lambda: self._state.import_rows(name, rows))
            self._keeping.changed()

    def set_strategy(self, strategy: str | Strategy) -> None:
        """Continue under another strategy from the last committed step.

        The workers and their models stay.

        Weights, optimizer state, buffers and the position in the data are carried over exactly.

        Args:
            strategy: as for the constructor.

        Raises:
            ConfigurationError: there is no such strategy, its processes could not talk here, or it
                has no embedding tables, and the model has; nothing has changed.
        """
        with self._idle("set_strategy"):
            config = strategy_for(strategy, self.num_workers, self._live().chosen)
            self._supervisor.want(config)
            self._supervisor.await_whole(asked=True)
            self._keeping.changed()

    def resize(self, num_workers: int | None = None, num_servers: int | None = None) -> None:
        """Continue with another number of workers, or of servers, from the next step on.

        No update and no sample is lost or repeated.

        New processes start first. Between two steps this returns when they are part of the job.
        While training is under way (called by a callback, or from another thread) it returns at
        once; training goes on until they are up, and then stops for a moment. If they do not come
        up, a warning says so, and it goes on as it is. A step covers more samples with more
        workers, unless `global_batch_size` was given.

        Args:
            num_workers: worker processes; None for as many as now. Ends a range given as (min,
                max).
            num_servers: server processes, under a strategy that has them; None for as many as now.

        Raises:
            ConfigurationError: a number is no count, or the strategy has no server processes.
            ResourcesError: the cluster has no room for the new processes; nothing has changed. While
                training is under way only if it can never have room.
        """
        self._live()
        config, count = self._supervisor.wanted, self.num_workers
        if num_servers is not None:
            config = config.with_servers(num_servers)
        if num_workers is not None:
            count = require_count("num_workers", num_workers)
        config = strategy_for(config, count, self._live().chosen)
        self._supervisor.want(config, None if num_workers is None else count)
        if not self._training.is_telling and self._lock.acquire(blocking=False):
            try:
                self._supervisor.await_whole(asked=True)
            finally:
                self._lock.release()

    # -- life ----------------------------------------------------------------------------------

    @staticmethod
    def resources(
        num_workers: int = 1,
        devices_per_worker: int = 1,
        gpu: bool = False,
        cpus_per_worker: int = 1,
    ) -> Any:
        """Return the placement group that a Ray Tune trial must reserve for its trainer.

        Args:
            num_workers, devices_per_worker, gpu: as of the constructor.
            cpus_per_worker: as of `ResourceConfig`.

        Example:
            >>> tune.with_resources(trainable, DistributedSGD.resources(2))     # doctest: +SKIP
        """
        from ray.tune import PlacementGroupFactory

        bundle = worker_bundle(devices_per_worker, gpu, cpus_per_worker)
        return PlacementGroupFactory([{}, *[bundle] * require_count("num_workers", num_workers)])

    def shutdown(self) -> None:
        """End all processes of this job, and Ray if the trainer has started it.

        A second call does nothing.

        With `checkpoints`, one is written before, if steps were taken since the last one.

        Raises:
            CheckpointError: it could not be written; the processes have ended nevertheless.
        """
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        cluster = self._cluster
        if cluster is None:
            return
        try:
            self._keeping.close(error)
        finally:
            cluster.shutdown()
            self._cluster = None  # until then a call that was interrupted can be made again
            if self._dropped is not None:
                self._dropped.detach()

    def __enter__(self) -> DistributedSGD:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    # -- inside --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _idle(self, method: str) -> Iterator[None]:
        """Hold the trainer, with idle workers, for a block of one of its methods."""
        with self._lock:
            if self._training.is_telling:
                raise ConfigurationError(
                    f"{method}() was called by a callback while workers train, as in on_step: there "
                    "weights(), stats(), log(), export_table(), set_learning_rate(), resize() and "
                    f"stop() may be called; call {method}() in after_step, on_evaluation or "
                    "on_epoch_end, for which workers pause, or between steps of a loop of your own"
                )
            self._live()
            with (
                contextlib.nullcontext() if self._timeline is None else self._timeline.call(method)
            ):
                yield

    def _on_workers(
        self,
        within: Callable[
            [Callable[[], list[Any]]], list[Any]
        ],  # of `Calls`: what becomes of deaths
        function: Callable[..., Any],
        *arguments: Any,
        **how: Any,
    ) -> list[Any]:
        """Run a user's function on workers, see `WorkerCalls.call`, when no process is dead."""
        cluster = self._live()

        def run() -> list[Any]:
            results = cluster.workers.call(function, *arguments, **how)
            with cluster.owner.to_its_end():
                self._calls.train_unfrozen(self._state)
            return results

        unfrozen = cluster.unfrozen
        results = within(run)
        if cluster.unfrozen != unfrozen:
            self._keeping.changed()
        return results

    def _live(self) -> Cluster:
        if self._cluster is None:
            raise ShutdownError("this trainer is shut down: make another one")
        return self._cluster


def _look(replicas: Replicas) -> None:
    """Do nothing on a worker; unfrozen parameters are looked for after each call."""
