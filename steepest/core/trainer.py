"""The driver of a job of plain processes: steps, the state, and what becomes of a death."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from steepest.core.crew import Crew
from steepest.core.data.sampler import Remaining, SamplePlan
from steepest.core.engine.client import Client
from steepest.core.engine.extension import Extension
from steepest.core.engine.hosting import host_client, host_coordinator, host_server
from steepest.core.engine.job import Description, Job, ModelCreator, check_agreement
from steepest.core.engine.replica_states import merged_states
from steepest.core.engine.step_errors import raise_step_error
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import COORDINATOR, Peer, server_peer, worker_peer
from steepest.core.models.step_size import StepSize
from steepest.core.optim.arriving import ArrivingState
from steepest.core.processes import ProcessRuntime
from steepest.core.runtime import Runtime
from steepest.core.settings import Settings, strategy_for
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.dtypes import Tensors
from steepest.core.transport.loopback import HOST, require_loopback
from steepest.core.transport.router import Router
from steepest.core.worker_process import make_transport
from steepest.errors import (
    ConfigurationError,
    PeerLostError,
    ShutdownError,
    described_by,
    raised_by_user,
)
from steepest.validation import require_count, require_model_creator

T = TypeVar("T")
log = logging.getLogger(__name__)

_MOST_ATTEMPTS = 3  # to go on after deaths, with no step committed in between
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True)
class _KeptState:
    """What a job continues from, with any number of workers."""

    step: int  # number of steps committed
    weights: torch.Tensor  # the flat vector
    records: list[Any] | None = None  # optimizer state; None for that with which it arrives
    coordinator: dict[str, Any] | None = None  # its counters and schedule
    remaining: Remaining = Remaining()  # noqa: RUF009 - frozen
    buffers: Tensors | None = None  # of the models; None for those with which they are made


class Trainer:
    """Trains a dense model with plain processes of this machine.

    Each worker is a process with a copy of the model. The coordinator lives in this process, and so
    do the servers, unless the strategy puts them into the workers (allreduce). What dies with what:

    - a worker under "ps", "async" and "ssp" holds nothing that others need: the job goes on with
      the weights and optimizer state of the last commit;
    - a worker under "allreduce" holds a slice of the optimizer's state: the job goes back to the
      last copy (`Settings.snapshot_every`), and takes the steps since then again;
    - this process holds everything else: when it dies, all workers end.

    In both cases the weights are made of every sample exactly once in each epoch. While a successor
    starts, the other workers wait.

    Methods are called on one thread. All waits have deadlines.

    Args:
        model_creator: a function, importable by other processes, of a worker's and a device's index,
            which returns a `Model`; devices have the index 0.
        num_workers: number of worker processes.
        strategy: "ps", "async", "ssp", "allreduce", or a `Strategy` of these kinds.
        seed: of initial weights, of the order of samples, and of random state.
        settings: see `Settings`.
        runtime: starts the processes; by default a `ProcessRuntime`. The trainer closes it.
        extensions: what attaches to the workers, see `docs/extensions.md`; each can be pickled.

    Attributes:
        step: number of steps committed.

    Raises:
        ConfigurationError: an argument is wrong, or the model needs what plain processes lack.
        ModelRaisedError: `model_creator` raised; its traceback is the cause.
        PeerLostError, DeadlineError: a process died, or is late, while the job starts.
    """

    def __init__(
        self,
        model_creator: ModelCreator,
        *,
        num_workers: int = 1,
        strategy: str | Strategy = "ps",
        seed: int = 0,
        settings: Settings | None = None,
        runtime: Runtime | None = None,
        extensions: Sequence[Extension] = (),
    ) -> None:
        require_model_creator(model_creator)
        self._strategy = strategy_for(strategy, require_count("num_workers", num_workers))
        self._settings = settings or Settings()
        self._creator, self._seed = model_creator, seed
        self._num_workers = num_workers  # as it begins
        self._token = secrets.token_bytes(32)
        self.step = 0
        self._attempts = 0  # to go on after deaths since the last step
        self._pending: _KeptState | None = None  # to continue from, while the job is formed anew
        self._survives = False  # whether deaths are handled by a caller
        self._late: list[Result] = []  # of steps that were committed when a process had died
        self._closed = False
        self._router = Router()
        self._client: Client | None = None
        self._news: Future[None] = Future()  # done when the client has another outcome
        if runtime is None:
            require_loopback()
        self._runtime = runtime or ProcessRuntime()
        self._crew = Crew(
            self._runtime,
            (self._token, self._settings.threads, tuple(extensions), self._settings.device),
            self._settings.start_timeout,
            lambda: f"after step {self.step}",
        )
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- for the user --------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self._job.num_workers

    @property
    def pids(self) -> list[int]:
        """The number of each worker's process, for the operating system."""
        return self._crew.pids

    def fit(
        self,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        on_step: Callable[[Result], object] | None = None,
    ) -> list[Result]:
        """Train; return the result of each step that is part of the weights, in order.

        Args:
            epochs: to the end of so many epochs, a begun one included.
            steps: so many steps; exactly one of the two is given.
            on_step: called with each result as it comes, also of steps that are taken again.

        Raises:
            ModelRaisedError, ModelError, NonFiniteError: of a step, nothing of which was applied;
                the trainer can be used further.
            DeadlineError: a step was not committed in time; names the workers that are late.
            PeerLostError: a process died, and the job cannot go on.
            ShutdownError: after `close`.
        """
        if (epochs is None) == (steps is None):
            raise ConfigurationError(
                f"epochs={epochs!r}, steps={steps!r}: give exactly one of them"
            )
        count = require_count("epochs" if steps is None else "steps", steps or epochs)
        begin, results = self.step, list[Result]()
        self._late.clear()
        epoch = self._plan.position(begin).epoch

        def goal() -> int:
            return self._plan.end_of(epoch + count - 1) if steps is None else begin + count

        while self.step < goal() or self._late:
            self._surviving(lambda: self._train(goal() - self.step, results, on_step))
        return results

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the weights of the last commit, and the mean of the models' buffers, by name."""

        def read() -> dict[str, torch.Tensor]:
            found = self._asked(lambda: self._of_job.read("weights"), "send the weights")
            return found.named(self._job.description.layout) | (self._buffers() or {})

        return self._surviving(read)

    def close(self) -> None:
        """End all processes; may be called twice."""
        self._closed = True
        try:
            self._disconnect()
        finally:
            self._runtime.close()

    # -- forming a job -------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the processes, have them make their models, and form the job of them."""
        self._described = self._make_models(range(self._num_workers))
        if self._described.layout.opaque_chunks:
            raise ConfigurationError(
                "the model has embedding tables, which plain processes do not exchange: use "
                "DistributedSGD, or torch.nn.Embedding"
            )
        self._job = self._job_of(self._num_workers)
        if self._job.plan() is None:
            raise ConfigurationError(
                "the training data are a stream: give arrays or a map-style dataset, whose samples "
                "have numbers, so that each is visited once also after a death"
            )
        ((weights, buffers, arriving),) = self._crew.ask(
            "send its weights", "initial", {0: [self._job]}
        )
        self._arriving: ArrivingState | None = arriving
        flat = torch.frombuffer(bytearray(weights), dtype=torch.uint8)
        self._kept = _KeptState(0, flat, buffers=buffers)
        self._form(self._kept)

    def _make_models(self, workers: Sequence[int]) -> Description:
        """Start the processes of some workers; return what their models are like, which agree."""
        self._crew.start(workers)
        size = StepSize(self._num_workers)
        rest = self._seed, self._strategy.cut, size
        building = {worker: (self._creator, worker, *rest) for worker in workers}
        described: list[Description] = self._crew.ask("make its model", "build", building)
        first = getattr(self, "_described", described[0])
        for worker, other in zip(workers, described, strict=True):
            check_agreement(first, other, "the first worker", f"worker {worker}")
        return first

    def _job_of(self, num_workers: int) -> Job:
        strategy = self._strategy
        servers = strategy.servers_for(1, num_workers)
        timeout = self._settings.step_timeout
        return Job(self._described, strategy, num_workers, 1, servers, self._seed, timeout)

    def _form(self, state: _KeptState) -> None:
        """Give this process and the workers their roles, and continue from a state."""
        self._disconnect()
        job = self._job = self._job_of(len(self._crew))
        plan = job.plan(state.step, state.remaining)
        assert plan is not None
        self._plan: SamplePlan = plan
        fresh, in_workers = state.records is None, job.strategy.in_workers
        self._router = Router()
        servers = () if in_workers else tuple(map(server_peer, range(job.num_servers)))
        peers = (COORDINATOR, Peer("client", 0), *servers)
        transport = make_transport(self._token, peers, self._router)
        host_coordinator(self._router, job)
        flat = job.description.layout.allocate()
        for server in servers:
            arriving = self._arriving if fresh else None
            host_server(self._router, job, server.index, flat, arriving=arriving)
        self._client = client = host_client(self._router, job, 0)
        client.on_outcome = self._note
        here = transport.listen(HOST)
        self._router.start("steepest driver", self._runtime.start_thread)
        ask, workers = self._crew.ask, range(job.num_workers)
        opening = {i: (job, i, self._crew.life(i), plan, state.buffers, fresh) for i in workers}
        listening = ask("take its roles", "open", opening)
        earlier = {i: listening[:i] if in_workers else [] for i in workers}
        seconds = self._settings.start_timeout
        ask("connect", "connect", {i: ([here, *to], seconds) for i, to in earlier.items()})
        ask("join", "join", dict.fromkeys(workers, ()))
        parts = job.version_of(state.step), state.weights, state.records, state.coordinator
        self._asked(lambda: client.install(*parts), "take the weights")
        self.step = state.step

    def _disconnect(self) -> None:
        """End the roles of this process."""
        self._router.stop(_CLOSE_SECONDS)
        if self._router.transport is not None:
            self._router.transport.close()
        if self._client is not None:
            self._client.close()

    # -- training ------------------------------------------------------------------------------

    @property
    def _of_job(self) -> Client:
        """The client, whose methods are called on the router's thread."""
        if self._closed or self._client is None:
            raise ShutdownError("the trainer is closed")
        return self._client

    @property
    def _keeps(self) -> bool:
        """Whether the driver keeps copies of the state, because workers alone hold parts of it."""
        return self._job.strategy.in_workers or self._described.changing

    def _train(self, most: int, results: list[Result], on_step: Any) -> None:
        """Take steps: at most so many, and no more than until the next copy of the state."""
        while results and results[-1].step > self.step:  # they are taken again
            del results[-1]
        count = min(most, self._settings.snapshot_every) if self._keeps else most
        client = self._of_job
        if count:
            self._on_router(lambda: client.ask(count, True))
        try:
            while self._late or count:
                result = self._late.pop(0) if self._late else self._next_result()
                if result.step > self.step:
                    self.step, self._attempts, count = result.step, 0, count - 1
                results.append(result)
                if on_step is not None:
                    on_step(result)
        except PeerLostError:
            raise
        except BaseException:
            self._revoke()
            raise
        if self._keeps:
            self._kept = self._read(self._buffers())

    def _next_result(self) -> Result:
        """Return the result of the next step, or raise why it failed."""
        outcomes = self._of_job.outcomes
        if outcomes.empty():
            self._news = news = Future[None]()
            if outcomes.empty():
                # the coordinator gives up a late step, and says for whom it waited
                seconds = 2 * self._settings.step_timeout
                who = [str(worker_peer(worker)) for worker in self._crew.workers]
                self._crew.wait(news, f"commit step {self.step + 1}", who, seconds)
        outcome = outcomes.get_nowait()
        if isinstance(outcome, PeerLostError):
            raise outcome
        if isinstance(outcome, Failure):
            self._raise_failure(outcome)
        assert isinstance(outcome, Result)  # WORKER_LOST is for jobs that wait for successors
        return outcome

    def _raise_failure(self, failure: Failure) -> NoReturn:
        if failure.reason == "lost":
            raise PeerLostError(f"{failure.peer}: {failure.why}")
        if failure.reason == "optimizer":
            self.close()
            raise raised_by_user(
                f"{failure.peer}: the optimizer raised in step {failure.step + 1}: {failure.error}; "
                "parts of the model had the update by then and others not: the trainer is closed",
                described_by(failure),
            )
        raise_step_error(failure, {})

    def _revoke(self) -> None:
        """Take back the steps that are asked for and not committed."""
        if self._closed:
            return
        client = self._of_job
        position = self._asked(client.revoke, "stop")
        while not client.outcomes.empty():
            if isinstance(outcome := client.outcomes.get_nowait(), Result):
                self._late.append(outcome)
        self.step = self._job.step_of(position.version)

    # -- the state -----------------------------------------------------------------------------

    def _read(self, buffers: Tensors | None) -> _KeptState:
        """Return the servers' state, with these buffers; no step is granted."""
        job, client = self._job, self._of_job
        counters = self._asked(client.counters, "count")
        found = self._asked(lambda: client.read("state"), "send the state")
        assert found.weights is not None
        done = counters.following, counters.returned
        remaining = self._plan.remaining(*done, job.shares, job.parts)
        kept = {name: found.state[name] for name in found.state if name in ("history", "schedule")}
        step = job.step_of(found.version)
        return _KeptState(step, found.weights, found.records, kept, remaining, buffers)

    def _buffers(self) -> Tensors | None:
        """Return the buffers that stand for the living workers'; None if models have none, or no worker lives."""
        if not self._described.changing or not self._crew:
            return None
        asked = dict.fromkeys(self._crew.workers, ())
        states = self._crew.ask("send its buffers", "states", asked)
        each = [state for part in states for state in part]
        return merged_states(each, self._described)

    # -- deaths --------------------------------------------------------------------------------

    def _surviving(self, function: Callable[[], T]) -> T:
        """Return what a function returns; when a process dies, form the job anew and call it again.

        Within such a function, as in a callback of `fit`, the death is raised: the outer one goes on.
        """
        if self._survives:
            return function()
        self._survives = True
        try:
            while True:
                try:
                    return function()
                except PeerLostError as error:
                    self._recover(error)
        finally:
            self._survives = False

    def _recover(self, error: PeerLostError) -> None:
        """Form the job anew without the processes that have died; raise the error if that cannot be."""
        while True:
            dead = self._crew.take_dead()
            self._attempts += 1
            if dead:
                error = PeerLostError("; ".join(dead.values()))
            if not dead or self._settings.on_death == "raise":
                self.close()
                raise error
            if self._attempts > _MOST_ATTEMPTS:
                self.close()
                raise PeerLostError(
                    f"processes died {self._attempts} times with no step committed in between, after "
                    f"step {self.step}; the last time: {error}"
                )
            try:
                if self._pending is None:
                    self._pending = self._left()
                steps = self.step, self._pending.step
                log.warning("%s; %d steps were committed, going on from step %d", error, *steps)
                self._fill()
                self._form(self._pending)
                self._pending = None
                return
            except PeerLostError as again:
                error = again

    def _left(self) -> _KeptState:
        """Return the state from which the living processes continue."""
        if self._job.strategy.in_workers or (self._described.changing and not self._crew):
            return self._kept
        self._revoke()
        return self._read(self._buffers())

    def _fill(self) -> None:
        """Start successors of dead workers, or number the others anew."""
        if self._settings.on_death == "replace":
            self._make_models(sorted({*range(self._job.num_workers)} - {*self._crew.workers}))
        elif self._crew:
            self._crew.number_anew()
        else:
            raise PeerLostError("no worker is left")

    # -- waiting -------------------------------------------------------------------------------

    def _note(self) -> None:
        """Have the thread that waits for an outcome look again; called on the router's thread."""
        if not self._news.done():
            self._news.set_result(None)

    def _on_router(self, function: Callable[[], T]) -> T:
        """Return what a function returns, called on the router's thread."""
        future, seconds = self._router.call(function), self._settings.step_timeout
        return self._crew.wait(future, "take a request", ["the driver's router"], seconds)

    def _asked(self, function: Callable[[], Future[T]], what: str) -> T:
        """Return what the coordinator and servers answer, whose future a function returns."""
        future, seconds = self._on_router(function), self._settings.step_timeout
        return self._crew.wait(future, what, ["coordinator", "servers"], seconds)
