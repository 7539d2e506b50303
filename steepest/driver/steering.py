"""The methods of a trainer that steer a `fit` under way, and that write checkpoints or continue from them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from steepest.core.system import Lock
from steepest.driver.checkpoint_manager import CheckpointManager
from steepest.driver.training import Training
from steepest.observe.results import EvaluationResult
from steepest.recovery.supervisor import Supervisor
from steepest.runtime.cluster import Cluster
from steepest.strategies.named import strategy_for
from steepest.validation import require_choice, require_count


class Steering:
    """Part of `DistributedSGD`; what is before its checkpoints may be used while workers train."""

    _training: Training
    _keeping: CheckpointManager
    _supervisor: Supervisor
    _lock: Lock  # held by the thread whose call takes steps

    def _live(self) -> Cluster:
        raise NotImplementedError

    def _idle(self, method: str) -> AbstractContextManager[None]:
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """The present number of worker processes."""
        return self._training.cluster.job.num_workers

    @property
    def learning_rate(self) -> tuple[float, ...]:
        """The learning rate of each parameter group in the next step."""
        return self._training.learning_rate()

    @property
    def evaluations(self) -> tuple[EvaluationResult, ...]:
        """The evaluations of all calls of `fit`, those before a restored checkpoint too, in order."""
        return tuple(self._keeping.evaluations)

    @property
    def fit_began(self) -> int:
        """The number of steps before the present or last `fit`.

        Steps that `fit` left out, because the restored checkpoint has them, count as its own.
        """
        return self._keeping.begun

    def stop(self) -> None:
        """End the present `fit` after the last committed step, with workers idle.

        It is called by a callback or on another thread, and returns at once; without a `fit` it
        does nothing. Steps that are granted and not begun are taken back. The step that workers compute
        just then is committed as a whole, or taken back as a whole and taken again by the next call
        of `fit` or `step`. Callbacks are called for each step that was committed, then `fit`
        returns normally: there is no evaluation and no `on_epoch_end` for a part of an epoch, and
        with `checkpoints` the state is written. The next `fit` continues after the last step.
        """
        self._training.stop()

    def set_learning_rate(self, rate: float | Sequence[float] | None) -> None:
        """Set the optimizer's learning rate from the next step on.

        Between steps, and in callbacks that are called between them, the next step has it. In
        `on_step`, or on another thread while workers train, they stop for a moment first, as for
        `stop`, and the next step that they begin has it; what depends on the step alone is better
        given as `learning_rate=` or `lr_scheduler=` of the model. The rate is kept in checkpoints,
        and under another strategy; steps that are taken again after a death have the rates that
        they had. Under "local" it is that of the workers' own optimizers.

        Args:
            rate: for all parameter groups, or one for each, in the order of the optimizer's groups;
                it holds until it is set again, whatever a schedule says of the learning rate. Other
                hyperparameters that the schedule sets go on. None for the schedule's rate in the
                step that it has come to, or the optimizer's own if there is no schedule.

        Raises:
            ConfigurationError: it is negative or not finite, there are not as many as groups, or
                the optimizer has no "lr"; nothing has changed.
        """
        self._training.set_learning_rate(rate)

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
                self._supervisor.settle(asked=True)
            finally:
                self._lock.release()

    # -- checkpoints ---------------------------------------------------------------------------

    @property
    def best_checkpoint(self) -> Path | str | None:
        """The path or URL of the best evaluation's checkpoint, for `restore`; None if there is none.

        Returned when it is written, see `Checkpoints`.

        Raises:
            CheckpointError: it could not be written.
        """
        found = self._keeping.best()
        return found if found is None or isinstance(found, Path) else str(found)

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

    def restore(self, path: str | Path, data: str = "continue") -> None:
        """Continue from a checkpoint, at any number of workers and servers, under any strategy.

        Training continues at exactly the sample after the last one. With the same global batch it
        takes the same steps, to rounding, at any number of workers.

        Data of as many samples whose fingerprint is another one are taken for the same data; a
        warning says in what they differ.

        Args:
            path: a directory, or a URL such as ``s3://bucket/best``.
            data: "continue" for the position that the checkpoint has in its data; "new" to go on
                with other data: they are begun with epoch 0, of which the samples that the
                checkpoint has not visited are no part. Weights, optimizer state, rows of tables,
                buffers, learning-rate schedules and the number of steps go on.

        Raises:
            CheckpointError: it is missing, damaged, or of another model or optimizer, or of another
                number of samples and `data` is not "new"; nothing has changed.
            ConfigurationError: a URL of a kind that is not known; `data` is something else.
        """
        require_choice("data", data, ("continue", "new"))
        with self._idle("restore"):
            self._keeping.restore(path, data)
