"""Evaluates copies of the weights in a process of its own, while training goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from steepest.core.engine.replicas import WorkerResult
from steepest.core.messages.means import Measured
from steepest.core.system import system
from steepest.errors import ConfigurationError, PeerLostError
from steepest.observe.results import EvaluationResult
from steepest.runtime.calls import drop_calls, last_line, raise_remote, travelling
from steepest.runtime.cluster import Cluster
from steepest.runtime.driver.calls import Calls
from steepest.runtime.job_runtime import CallRaisedError, ProcessDiedError, runtime
from steepest.runtime.owner import Moment, owned
from steepest.runtime.remote_functions import copy_to_evaluate
from steepest.runtime.state.transfer import StateTransfer

log = logging.getLogger(__name__)
_WHAT = "evaluate"
_FETCH_SECONDS = 0.05  # between two looks at what loops have asked for meanwhile
_IN_WORKERS = "fit(..., background=False) has the workers evaluate"
_IN_LOOP = "a call of the function itself, in the loop, has the workers evaluate"


def summary_of(results: Collection[WorkerResult], step: int, epoch: int | None) -> EvaluationResult:
    """Return the result over a data set from those of its parts; ConfigurationError: there are no samples."""
    if not any(result.weight for result in results):
        raise ConfigurationError("evaluate() was given no samples")
    summary = EvaluationResult.mean_of(
        [(Measured(r.metrics, r.weight, r.weights), r.loss, r.samples) for r in results]
    )
    return replace(summary, step=step, epoch=epoch)


@dataclass(frozen=True)
class _Evaluated:
    """What is evaluated, after a step: a method of a process, and its arguments."""

    step: int
    epoch: int | None
    method: str
    arguments: tuple[Any, ...]
    instead: str  # of background evaluation, in words


class BackgroundEvaluation:
    """Evaluates one snapshot of a job at a time, in a process that is no member of the job.

    The snapshot is kept until its result is here: if the process dies, another one evaluates it again. Deaths,
    changes and the end of a call of `fit` leave it alone.

    Args:
        cluster: the job's processes.
        state: the job's.
        calls: run what needs a job that is whole.
        present: returns the step at which the job is, and the epoch of the last one.
        asked: the number and step of each evaluation that users' loops have asked for.

    Attributes:
        step: of the newest snapshot.
    """

    def __init__(
        self,
        cluster: Cluster,
        state: StateTransfer,
        calls: Calls,
        present: Callable[[], tuple[int, int | None]],
        asked: list[tuple[int, int]],
    ) -> None:
        self.owner = cluster.owner
        self.step = 0
        self._cluster, self._state, self._calls, self._present = cluster, state, calls, present
        self._asked = asked
        self._fetched: list[_Evaluated] = []  # that loops have asked for, and are not begun
        self._process: Any = None
        self._deaths = 0  # of processes, in the evaluation of one snapshot
        self._snapshot: _Evaluated | None = None
        self._call: Any = None  # that evaluates it
        self._sent: tuple[Any, Any] = (None, None)  # data, and what stands for them in calls
        cluster.ending.append(self._end)

    @property
    def is_under_way(self) -> bool:
        """Whether a snapshot has no result yet that was collected."""
        return self._snapshot is not None

    @property
    def is_done(self) -> bool:
        """Whether the result of a snapshot, or the error, can be collected without a wait."""
        call = self._call
        return call is not None and call.done()

    def begin(self, data: Any) -> None:
        """Begin to evaluate data with the last committed weights; no other evaluation may be under way.

        Raises:
            ConfigurationError: the data cannot be sent; the model has embedding tables.
        """
        assert not self.is_under_way
        if self._cluster.job.description.opaque is not None:
            raise ConfigurationError(
                "background=True with embedding tables, of which the servers have the rows: leave it out, and "
                "workers evaluate between two steps"
            )

        def take() -> _Evaluated:
            weights, _ = self._state.weights()
            buffers, cluster = self._state.merged_buffers(), self._cluster
            arguments = cluster.creator, cluster.job, weights, buffers, self._sent[1]
            return _Evaluated(*self._present(), "evaluate_snapshot", arguments, _IN_WORKERS)

        if self._sent[0] is not data:
            self._sent = data, travelling("the data of an evaluation", data)
        self._begin(self._calls.surviving(take))

    def _begin(self, snapshot: _Evaluated) -> None:
        self.step, self._deaths = snapshot.step, 0
        self._snapshot = snapshot
        self._ask()

    @owned(Moment.WHOLE)
    def _fetch(self, number: int, step: int) -> None:
        """Fetch what a loop has asked to be evaluated, if the worker that has copied it lives."""
        copies = self._cluster.workers.ask(copy_to_evaluate, number)
        copy = next((each for each in copies if each is not None), None)
        if copy is None:
            log.warning(
                "steepest.evaluate() after step %d is left out: worker 0 died with its copy", step
            )
            return
        copied = _Evaluated(copy.step, copy.epoch, "evaluate_copy", (copy,), _IN_LOOP)
        self._fetched.append(copied)

    def results(self) -> Iterator[EvaluationResult]:
        """Yield the results that are here, and begin what loops have asked for; these are evaluated one by one.

        It may be called while workers train, whose copies are fetched at once, also during its waits. It raises as
        `collect` does.
        """
        awaited: Any = None
        future: Any = None
        while self._asked or self._fetched or self.is_done:
            while self._asked:
                self._fetch(*self._asked.pop(0))
            if not self.is_under_way:
                if self._fetched:
                    self._begin(self._fetched.pop(0))
                continue
            if self._call is not None:
                if awaited is not self._call:
                    awaited, future = self._call, self._call.future()
                with contextlib.suppress(Exception):  # raised by `collect`
                    system().result(future, _FETCH_SECONDS)
            if (result := self.collect(waits=False)) is not None:
                yield result

    @owned(Moment.WHOLE)
    def _ask(self) -> None:
        """Have a process evaluate the snapshot; start one if there is none."""
        cluster, snapshot = self._cluster, self._snapshot
        assert snapshot is not None
        if self._process is None:
            seats = cluster.placement.order
            cpus = cluster.run_config.resources.cpus_per_worker
            seat = seats[-1 - self._deaths % len(seats)]
            self._process = cluster.start_process("evaluation", seat, 0, 0, cpus)
        self._call = runtime().call(self._process, snapshot.method, *snapshot.arguments)

    def collect(self, *, waits: bool = True) -> EvaluationResult | None:
        """Return the result of the snapshot; None if there is none, or not yet and the caller does not wait.

        Raises:
            ModelRaisedError: the model or the data raised; the traceback is the cause.
            PeerLostError: the process died, as did more successors than `FailureConfig.max_failures`.
            DeadlineError: no result came within `DeadlineConfig.call` seconds of waiting.
        """
        while self._snapshot is not None:
            if self._call is None:  # the caller was interrupted before it asked
                self._ask()
            if not self.is_done:
                if not waits:
                    return None
                self._calls.surviving(self._await)
            call, snapshot = self._call, self._snapshot
            try:
                result: WorkerResult = call.get()
            except ProcessDiedError as error:
                self._lose(last_line(error))
                continue
            except CallRaisedError as error:
                self._snapshot = self._call = None
                raise_remote(error, "the process that evaluates", _WHAT)
            self._snapshot = self._call = None
            return summary_of([result], snapshot.step, snapshot.epoch)
        return None

    def _await(self) -> None:
        """Return when the call has ended."""
        seconds = self._cluster.run_config.deadlines.call

        def late(_: object) -> tuple[str, str]:
            assert self._snapshot is not None
            words = f"the evaluation after step {self._snapshot.step} in a process of its own"
            return words, f"{words} did not end within {seconds:g} s of waiting"

        for _ in self._cluster.ended([self._call], seconds, late):
            pass

    def _lose(self, why: str) -> None:
        """Have another process evaluate the snapshot, because one has died."""
        assert self._snapshot is not None
        self._process = self._call = None
        self._deaths += 1
        allowed = self._cluster.run_config.failure.max_failures
        words = (
            f"the process that evaluated the weights after step {self._snapshot.step} died ({why})"
        )
        if self._deaths > allowed:
            instead, self._snapshot = self._snapshot.instead, None
            raise PeerLostError(
                f"{words}: FailureConfig(max_failures={allowed}) allows no more; {instead}"
            )
        log.warning("%s: another one evaluates them again", words)
        self._ask()

    def drop(self) -> None:
        """Give up a snapshot that has no result, because the job goes on from another state."""
        self.step = 0
        if self._snapshot is not None:
            self._end()

    def _end(self) -> None:
        """End the process, and what it evaluates."""
        process, self._process = self._process, None
        call, self._call = self._call, None
        self._snapshot = None
        self._fetched.clear()
        if call is not None:
            drop_calls([call])
        if process is not None:
            runtime().end(process)
