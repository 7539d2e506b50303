"""The driver's side of training: it grants steps, takes their results, and takes back the rest."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NoReturn, TypeVar

import ray

from steepest.cluster.diagnostics import has_answered, raise_step_error
from steepest.cluster.launch import Cluster
from steepest.cluster.supervisor import Supervisor
from steepest.data.sampler import SamplePlan
from steepest.engine.client import Client, Position
from steepest.errors import DeadlineError, PeerLostError, ShutdownError
from steepest.messages.driver import Failure, Result, WorkerLost
from steepest.messages.message import Peer
from steepest.observe.history import Figures, History
from steepest.observe.results import StepResult

T = TypeVar("T")
log = logging.getLogger(__name__)
_SHORT_SECONDS = 0.02
_WHERE_SECONDS = 2.0  # that a worker has to say where it is
_LATER_SECONDS = 5.0  # that the coordinator has to say that a step is late, before the driver does


def _loss(outcome: Result | Failure | PeerLostError, client: Client) -> tuple[Peer, str] | None:
    """Return the role that is lost, and why, if an outcome of a client says so."""
    if isinstance(outcome, PeerLostError):
        return client.lost_peer or Peer("server", 0), str(outcome)
    if isinstance(outcome, Failure) and outcome.reason == "lost":
        assert outcome.peer is not None
        return outcome.peer, outcome.why
    return None


def _unheard(step: int, plan: SamplePlan | None) -> Result:
    """Return the result of a committed step of which no message came: samples, no statistics."""
    samples = 0 if plan is None else plan.position(step - 1).size
    return Result(0, 0, step, samples, bytes_pushed=0, bytes_pulled=0, staleness=())


class Training:
    """Steps of one job.

    Args:
        cluster: its processes.
        supervisor: changes them.

    Attributes:
        cluster: its processes.
        rates: learning rates of the steps.
        running: whether workers are at work.
        stopping: whether `stop` was called in the present `stoppable` block.
        samples, seconds, bytes_pushed, bytes_pulled: sums over all steps so far.
        last: the last step's result; None before the first one.
        history: has a row for each step.
    """

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        self.running = False
        self.samples = 0
        self.seconds = 0.0
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.last: StepResult | None = None
        self.history = History(cluster.events, cluster.run_config.history_rows)
        self.cluster = cluster
        self.rates = cluster.rates
        self.stopping = False
        self._stoppable = False
        self._newest = 0  # the greatest number of steps committed in the steps that are being taken
        self._supervisor = supervisor
        self._timeout = cluster.run_config.deadlines.step
        self._began = 0.0  # of the steps that are being taken
        self._idle = True  # whether no granted step is left
        self._silent_since = 0.0  # when the last outcome came
        # the thread that is in `on_step`, and of which step
        self._telling: tuple[int, int] | None = None
        self._warned = False
        self._made_again = 0  # those of these that were, or will be, taken again

    @property
    def version(self) -> int:
        """Updates committed, as far as the driver has heard."""
        return self.cluster.client.position.version

    @property
    def step(self) -> int:
        """Steps committed, as far as the driver has heard."""
        return self.cluster.step

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let `stop` end what is trained in a block; of blocks in each other the innermost one."""
        outer = self.stopping, self._stoppable
        self.stopping, self._stoppable = False, True
        try:
            yield
        finally:
            self.stopping, self._stoppable = outer

    def stop(self) -> None:
        """Have `take` return as soon as workers have stopped, see `DistributedSGD.stop`."""
        self.stopping = self._stoppable
        self.cluster.client.outcomes.put(None)  # wakes the thread that trains

    def _goal(self, end: Callable[[], int]) -> int:
        """Return the number of steps to be committed; after `stop` as many as were at any time."""
        return min(end(), self._newest) if self.stopping else end()

    def take(
        self, end: Callable[[], int], stats: bool, on_step: Callable[[StepResult], None]
    ) -> None:
        """Have workers take steps until a step is committed; hand on the result of each.

        What was granted and is not used is taken back when anything raises.

        Args:
            end: returns the number of steps that are to be committed then, as a whole; asked again
                whenever the job was put together anew, since a step may cover another number of
                samples afterwards.
            stats: whether workers report loss and metrics.
            on_step: called with each result, in order.
        """
        self._supervisor.settle()
        self._began = time.monotonic()
        self.running, self._idle = True, True
        self._newest = self.step
        self.rates.settle(self._next_new)
        goal = self._goal(end)
        self._supervisor.snapshots.ensure()  # for a death in the first step
        self._heard()
        try:
            while self.step < goal:
                goal = self._take_until(goal, end, stats, on_step)
                self._idle = True
                self._complete()  # which may set the job back
        finally:
            self._end()

    def _take_until(
        self, goal: int, end: Callable[[], int], stats: bool, on_step: Callable[[StepResult], None]
    ) -> int:
        """Take steps until so many are committed, or as many as `end` says after a change."""
        done, stop = self.step, None  # the number of steps after which workers stop
        changing = False  # whether they stop for a change
        client, plan = self.cluster.client, self.cluster.plan[0]
        self._ask(goal - done, stats)
        while done < goal:
            due = self._supervisor.look(self.seconds + time.monotonic() - self._began)
            if stop is None and (due == "soon" or self._is_interrupted(goal)):
                stop, changing = self._stop(), due == "soon"
            stopped = stop is not None and done >= stop
            if due == "now" or (stopped and changing):
                self._supervisor.change()
                self._supervisor.raise_mistake()
            if self.cluster.client is not client:  # a callback may have had it changed, too
                done = self._catch_up(client, plan, done, on_step)
                client, plan, stopped = self.cluster.client, self.cluster.plan[0], True
            if stopped or self._idle:
                self.rates.settle(self._newest)
                stop, goal = None, self._goal(end)
                self._ask(goal - done, stats)
            elif (outcome := self._next_outcome()) is not None:
                done += 1
                self._hand_on(outcome, plan, on_step)
        return goal

    def _is_interrupted(self, goal: int) -> bool:
        """Return whether workers are to stop because the user has asked for something."""
        return (self.stopping and goal > self._newest) or self.rates.are_wanted

    def set_learning_rate(self, rate: float | Sequence[float] | None) -> None:
        """Set learning rates of the steps to come, see `DistributedSGD.set_learning_rate`."""
        self.rates.want(rate)
        self.cluster.client.outcomes.put(None)  # wakes the thread that trains
        if not self.running:
            self.rates.settle(self._next_new)

    @property
    def _next_new(self) -> int:
        """The next step, counted from 0, between calls; steps lost since the last call are not new."""
        return self.step + self._supervisor.steps_lost - self._made_again

    def lost_before(self) -> int:
        """Return how many steps were lost between calls since the last time that it was asked."""
        lost = self._supervisor.steps_lost - self._made_again
        self._made_again = self._supervisor.steps_lost
        return lost

    def _end(self) -> None:
        self.running = False
        self._made_again = self._supervisor.steps_lost  # `end` counts from before they were lost
        self.rates.settle(self._newest)
        self.seconds += time.monotonic() - self._began
        if not self._idle:
            self._revoke()

    def _catch_up(
        self,
        before: Client,
        plan: SamplePlan | None,
        done: int,
        on_step: Callable[[StepResult], None],
    ) -> int:
        """Hand on the results of steps before a change; return how many steps are committed.

        Args:
            before, plan: the job's client and plan before.
            done: the number of steps whose results were handed on.
            on_step: called for each step that was committed before and not handed on.
        """
        self._heard()
        while done < self.step and not before.outcomes.empty():
            late = before.outcomes.get()
            if isinstance(late, Result):
                done += 1
                self._hand_on(late, plan, on_step)
        while done < self.step:
            done += 1
            self._hand_on(_unheard(done, plan), plan, on_step)
        return self.step  # it may have been set back

    def _heard(self) -> None:
        """Note that processes are at work now."""
        self._silent_since = time.monotonic()

    def _hand_on(
        self,
        outcome: Result | Failure,
        plan: SamplePlan | None,
        on_step: Callable[[StepResult], None],
    ) -> None:
        if isinstance(outcome, Failure):
            self._idle = True  # the coordinator has taken the rest back already
            self._raise_failure(outcome)
        taken = self._count(outcome, plan)
        self._newest = max(self._newest, outcome.step)
        with self._supervisor.elsewhere():
            self._telling = threading.get_ident(), taken.step
            try:
                on_step(taken)
            finally:
                self._telling = None

    def compare(self, step: int) -> None:
        """Warn, once, where `on_step` has read weights of another step than it is called with.

        Args:
            step: the number of steps after which the weights were these.
        """
        if self._telling is None or self._telling[0] != threading.get_ident() or self._warned:
            return
        if step != (told := self._telling[1]):
            self._warned = True
            log.warning(
                "weights() in on_step of step %d are those after step %d, since workers train "
                "meanwhile: in a callback's after_step they are those of its step",
                told, step,
            )  # fmt: skip

    def _count(self, result: Result, plan: SamplePlan | None) -> StepResult:
        """Count a committed step, and return the user's view of its result.

        Args:
            result: of the step.
            plan: the plan in force when the step was committed.
        """
        self.samples += result.samples
        self.bytes_pushed += result.bytes_pushed
        self.bytes_pulled += result.bytes_pulled
        epoch = None if plan is None else plan.position(result.step - 1).epoch
        self.last = StepResult.from_result(result, epoch, self.rates.at(result.step - 1))
        figures = Figures(
            self.cluster.job.num_workers,
            self.cluster.job.num_servers,
            self.cluster.client.position.generation,
            result.bytes_pushed,
            result.bytes_pulled,
            self.seconds + time.monotonic() - self._began,
        )
        ends = plan is not None and epoch is not None and plan.end_of(epoch) == result.step
        self.history.stepped(self.last, figures, ends_epoch=ends)
        return self.last

    def _ask(self, steps: int, stats: bool) -> None:
        if steps <= 0:
            return
        client, self._idle = self.cluster.client, False
        rates = self.rates.since(self.step)
        self.cluster.on_router(lambda: client.ask(steps, stats, rates))

    def _stop(self) -> int | None:
        """Have workers stop soon; return after how many steps, or None if a death comes first.

        The death is the next outcome then.
        """
        client = self.cluster.client
        stopping: Future[int] = self.cluster.on_router(client.stop)
        try:
            return self.cluster.job.step_of(stopping.result(self._timeout))
        except PeerLostError as error:
            if client.lost_peer is None or not self._supervisor.suspects(
                client.lost_peer, str(error), client
            ):
                self._raise_lost(error)
            return None
        except FutureTimeoutError:
            self.cluster.deaths.raise_if_dead()
            raise DeadlineError(
                f"waited {self._timeout:g} s in vain for the coordinator to stop the workers"
            ) from None

    def _complete(self) -> None:
        """Make the changes that are due, and wait until copies that were lost are there again."""
        deadline = time.monotonic() + 5 * self.cluster.run_config.deadlines.start
        while True:
            if self._supervisor.look() is not None:
                self._supervisor.change()
            elif self._supervisor.lacks_copies and time.monotonic() < deadline:
                time.sleep(_SHORT_SECONDS)
            else:
                return

    def _next_outcome(self) -> Result | Failure | None:
        """Return the next outcome; None when none comes soon, or the supervisor must look at one."""
        supervisor, client = self._supervisor, self.cluster.client
        try:
            outcome = client.outcomes.get(timeout=supervisor.pause)
        except queue.Empty:
            self.cluster.deaths.raise_if_dead(replaced=supervisor.observation.can_replace)
            # the coordinator's word first
            if time.monotonic() - self._silent_since > self._timeout + _LATER_SECONDS:
                raise DeadlineError(
                    f"step {self.step + 1} was not committed within {self._timeout:g} s and "
                    "the coordinator is mute"
                ) from None
            return None
        if outcome is None:
            return None
        self._heard()
        if isinstance(outcome, WorkerLost):
            supervisor.hear(outcome)
            return None
        lost = _loss(outcome, client)
        if lost is not None and supervisor.suspects(*lost, client):
            return None
        if isinstance(outcome, PeerLostError):
            self._raise_lost(outcome)
        if isinstance(outcome, Failure) and outcome.reason == "optimizer":
            return None  # the supervisor sets the job back, and raises
        late = isinstance(outcome, Failure) and outcome.reason == "deadline"
        if late and supervisor.observation.dead():
            self._idle = True  # the coordinator has taken the rest back while a death is handled
            return None
        return outcome

    def _revoke(self) -> None:
        """Take back steps after an error or Ctrl-C; those that were committed meanwhile stay."""
        client = self.cluster.client
        try:
            revoking: Future[Position] = self.cluster.on_router(client.revoke)
            revoking.result(self._timeout)  # results come before it, whoever is silent meanwhile
        except (PeerLostError, DeadlineError, ShutdownError, FutureTimeoutError):
            return  # nobody is left to be stopped; the first error says why
        while not client.outcomes.empty():
            outcome = client.outcomes.get()
            if isinstance(outcome, Result):
                self._count(outcome, self.cluster.plan[0])

    def _raise_failure(self, failure: Failure) -> NoReturn:
        if failure.reason == "deadline":
            self.cluster.deaths.raise_if_dead()  # the better explanation
        if failure.reason == "lost":
            assert failure.peer is not None
            self.cluster.deaths.lost(failure.peer, failure.why)
        raise_step_error(failure, self.cluster.places, self._where(failure.awaited))

    def _where(self, awaited: Collection[str]) -> list[tuple[str, str, str]]:
        """Return the name, samples and frames of workers that are waited for, if they answer soon."""
        cluster = self.cluster
        workers = {p: actor for p, actor in cluster.actors.items() if str(p) in awaited}
        calls = {p: a.where.remote() for p, a in workers.items() if p.role == "worker"}
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=_WHERE_SECONDS)
        found = []
        for peer, call in calls.items():
            if has_answered(call):
                share, frames = ray.get(call)
                words = "" if share is None else cluster.samples_of(share)
                if words and share is not None:
                    words = f"its share of step {share // cluster.job.shares + 1}: {words}"
                found.append((str(peer), words, frames))
        return found

    def _raise_lost(self, error: PeerLostError) -> NoReturn:
        self.cluster.deaths.lost(self.cluster.client.lost_peer or Peer("server", 0), str(error))
