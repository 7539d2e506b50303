"""The driver's side of training: it grants steps, takes their results, and takes back the rest."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn

from msgspec.structs import replace

from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.client import Client, Outcome, Position
from steepest.core.engine.step_errors import raise_step_error
from steepest.core.messages.driver import AuditDifference, Failure, Result, WorkerLost
from steepest.core.messages.message import Peer
from steepest.core.system import system
from steepest.errors import DeadlineError, PeerLostError, ProtocolError, ShutdownError
from steepest.observe.history import Figures, History
from steepest.observe.results import StepResult
from steepest.runtime.activity import Activity
from steepest.runtime.calls import ALIKE_SECONDS, drop_calls, has_answered
from steepest.runtime.cluster import Cluster
from steepest.runtime.driver.job_settings import settings_of
from steepest.runtime.job_runtime import runtime
from steepest.runtime.owner import Moment, Request, owned
from steepest.runtime.recovery.supervisor import Supervisor

log = logging.getLogger(__name__)
_SHORT_SECONDS = 0.02
_WHERE_SECONDS = 2.0  # that a worker has to say where it is
#: The lead that workers may have over the function that hears of steps; each may have this many steps at least.
_LEAD_SECONDS, _LEAST_LEAD = 1.0, 4
_ALL = 1 << 40
_LATER_SECONDS = 5.0  # that the coordinator has to say that a step is late, before the driver does


def _loss(outcome: Outcome, client: Client) -> tuple[Peer, str] | None:
    """Return the role that is lost, and why, if an outcome of a client says so."""
    if isinstance(outcome, PeerLostError):
        return client.lost_peer or Peer("server", 0), str(outcome)
    if isinstance(outcome, Failure) and outcome.reason == "lost":
        assert outcome.peer is not None
        return outcome.peer, outcome.why
    return None


@dataclass
class StepRun:
    """The steps that one call asks for: the owner runs them, the caller gets the result of each."""

    # returns the number of steps that are to be committed then; asked on the owner's thread, and again after each
    # change of the job, since a step may cover another number of samples afterwards
    end: Callable[[], int]
    stats: bool  # whether workers report loss and metrics
    # steps of earlier calls; the caller is not told of them where they are taken again
    before: int = 0
    # for the caller; None when the run has ended
    results: SimpleQueue[StepResult | None] = field(default_factory=lambda: system().queue())
    handed_on: int = 0  # results
    told: int = 0  # of them, taken by the caller
    given_up: bool = False  # whether the caller takes no more
    begun: bool = False  # whether steps were, or may have been, granted
    waits: bool = False  # whether the owner waits for the caller to take results
    telling: int | None = None  # the step of which the caller's function is being told
    thread: Any = None  # of the caller; None where nobody is told
    began: float = field(default_factory=lambda: system().now())

    def lead(self, workers: int) -> int:
        """Return the most steps by which workers may be ahead of the caller: those of about a second."""
        if self.thread is None:
            return _ALL
        pace = self.told / max(system().now() - self.began, 1e-3)
        return max(_LEAST_LEAD * workers, math.ceil(pace * _LEAD_SECONDS))


@dataclass
class _Taken:
    """The progress of steps that were granted together."""

    done: int  # committed
    granted: int
    generation: int  # of the job when the first of them is asked for
    # the version after which workers stop, when it is known; None if they are not to
    stopping: Future[int] | None = None
    changing: bool = False  # whether they stop for a change of the job's processes
    last: int | None = None  # the step after which they stop

    @property
    def have_stopped(self) -> bool:
        """Whether workers have stopped."""
        return self.last is not None and self.done >= self.last


class Training:
    """Steps of one job."""

    def __init__(self, cluster: Cluster, supervisor: Supervisor) -> None:
        self.owner = cluster.owner
        self.running = False  # whether workers are at work
        self.goal = 0  # steps to be committed when the present, or last, call has ended
        self.samples = 0  # sums over all steps so far
        self.seconds = 0.0
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.last: StepResult | None = None
        self.history = History(cluster.events, cluster.run_config.history_rows)
        self.cluster = cluster
        self.rates = cluster.rates
        self.stopping = False  # whether `stop` was called in the present `stoppable` block
        self._stoppable = 0  # blocks in each other in which `stop` has an effect
        self._newest = 0  # the greatest number of steps committed in the steps that are being taken
        self._supervisor = supervisor
        self._timeout = cluster.run_config.deadlines.step
        self._began = 0.0  # of the steps that are being taken
        self._idle = True  # whether no granted step is left
        self._silent_since = 0.0  # when the last outcome came
        self._run: StepRun | None = None  # of the present, or last, call
        self._asked: Future[None] | None = None  # the last request for steps, to the router
        self._warned = False
        self.on_count: Callable[[int], None] | None = (
            None  # called with each committed step's number
        )
        self._described: tuple[object, int] = (None, -1)  # members and events when it was told
        supervisor.make_up = self._make_up

    @property
    def version(self) -> int:
        """Updates committed, as far as the driver has heard."""
        return self.cluster.client.position.version

    @property
    def step(self) -> int:
        """Steps committed, as far as the driver has heard."""
        return self.cluster.step

    @property
    def reached(self) -> int:
        """Steps committed, with those that a death has undone and that are taken again before further ones."""
        return max(self.step, self._supervisor.promised)

    @contextlib.contextmanager
    def stoppable(self) -> Iterator[None]:
        """Let `stop` end the training of a block; of nested blocks the innermost one."""
        outer = self._stoppable > 0 and self.stopping
        self.stopping, self._stoppable = False, self._stoppable + 1
        try:
            yield
        finally:
            self.stopping, self._stoppable = outer, self._stoppable - 1

    def stop(self) -> None:
        """Have `take` return as soon as workers have stopped, see `DistributedSGD.stop`."""
        self.stopping = self._stoppable > 0
        self.owner.wake()

    def _goal(self, run: StepRun) -> int:
        """Return the number of steps to commit; after `stop` no more than were begun, or ever committed."""
        end = run.end()
        if not self._stoppable:  # else `fit` has set its own, of which this is a part
            self.goal = end
        if not self.stopping or run.thread is None:
            return end
        begun = math.ceil(self.version / self.cluster.job.versions_per_step)
        return min(end, max(self._newest, begun))

    # -- for the caller ----------------------------------------------------------------------------

    def take_steps(
        self, end: Callable[[], int], stats: bool, on_step: Callable[[StepResult], None]
    ) -> None:
        """Have workers take steps until a step is committed; hand on the result of each.

        Runs on the caller's thread, which the owner does not wait for. What was granted and is not
        used is taken back when anything raises.
        """
        run = self._run = StepRun(end, stats, thread=system().current())
        request: Request | None = None
        try:
            request = self.owner.submit(partial(self._take, run), Moment.FREE)
            request.future.add_done_callback(lambda _: run.results.put(None))
            while (result := run.results.get()) is not None:
                run.telling = result.step
                on_step(result)
                run.telling = None
                run.told += 1
                if run.waits:
                    self.owner.wake()
            request.future.result()
        finally:
            run.given_up = True
            if request is not None:
                request.given_up = True
            self.owner.wake()
            if request is not None:
                self._await_end(run, request)

    def _await_end(self, run: StepRun, request: Request) -> None:
        """Return when the granted steps are taken back, or a change of the job is under way."""
        granted, supervisor = request.future, self._supervisor
        while run.begun and not granted.done() and not supervisor.is_changing:
            with contextlib.suppress(FutureTimeoutError):
                granted.exception(_SHORT_SECONDS)

    @property
    def is_telling(self) -> bool:
        """Whether the calling thread runs a function that was called for a step."""
        run = self._run
        here = run is not None and run.thread is system().current()
        return here and run is not None and run.telling is not None and not run.given_up

    def compare(self, step: int) -> None:
        """Warn, once, if `on_step` has read weights of another step than its own."""
        run = self._run
        if run is None or not self.is_telling or self._warned or step == run.telling:
            return
        self._warned = True
        log.warning(
            "weights() in on_step of step %d are those after step %d, since workers train "
            "meanwhile: in a callback's after_step they are those of its step",
            run.telling, step,
        )  # fmt: skip

    def one_more(self) -> Callable[[], int]:
        """Return a function whose result is the step after the one that is present at its first call."""
        steps: list[int] = []

        def end() -> int:
            if not steps:
                steps.append(self.step + 1)
            return steps[0]

        return end

    @owned(Moment.ANY)
    def learning_rate(self) -> tuple[float, ...]:
        """Return the learning rate of each parameter group in the next step."""
        return self.rates.at(self.step)

    @owned(Moment.ANY)
    def set_learning_rate(self, rate: float | Sequence[float] | None) -> None:
        """Set learning rates of the steps to come, see `DistributedSGD.set_learning_rate`."""
        self.rates.want(rate)
        if not self.running:
            self.rates.put_in_force(self.reached)

    # -- the owner's -------------------------------------------------------------------------------

    def _take(self, run: StepRun) -> None:
        """Have workers take the steps of a run."""
        self._supervisor.await_whole()
        run.before = self.reached
        self._take_steps(run)

    def _make_up(self) -> None:
        """Repeat the steps that a death has undone although calls had returned them."""
        log.info("steps %d to %d are taken again", self.step + 1, self._supervisor.promised)
        self._take_steps(StepRun(lambda: self._supervisor.promised, stats=True))

    def _take_steps(self, run: StepRun) -> None:
        run.begun = True
        self._began = system().now()
        self.running, self._idle = True, True
        self._newest = max(self.step, self._supervisor.promised)
        self._catch_up(self.cluster.plan[0], run)  # an earlier call may have ended beside a death
        self.rates.put_in_force(self._newest)
        goal = self._goal(run)
        self._supervisor.snapshots.ensure()  # for a death in the first step
        self._heard()
        self._supervisor.in_call = run.thread is not None
        try:
            while self.step < goal and not run.given_up:
                goal = self._take_until(goal, run)
                if run.given_up:
                    return
                self._idle = True
                self._complete()  # it may set the job back
        finally:
            self._end(run)

    def _take_until(self, goal: int, run: StepRun) -> int:
        """Take steps until `goal` are committed, or as many as `end` returns after a change."""
        taken = self._begin(self.step)
        client, plan = self.cluster.client, self.cluster.plan[0]
        while taken.done < goal and not run.given_up:
            self._grant(taken, goal, run)
            wanted = self._supervisor.look(self.seconds + system().now() - self._began)
            self._stop_if_wanted(taken, client, changing=wanted == "soon", goal=goal)
            stopped = taken.have_stopped
            if wanted == "now" or (stopped and taken.changing):
                self._supervisor.change()
                self._supervisor.raise_kept()
            if self.cluster.client is not client:
                taken.done = self._catch_up(plan, run)
                client, plan, stopped = self.cluster.client, self.cluster.plan[0], True
            if stopped or self._idle:
                self.rates.put_in_force(self._newest)
                taken, goal = self._begin(taken.done), self._goal(run)
            elif taken.done >= taken.granted:
                self._await_caller(run, taken, goal)
            elif (outcome := self._next_outcome(run, taken, goal)) is not None:
                taken.done += 1
                self._hand_on(outcome, plan, run)
        return goal

    def _begin(self, done: int) -> _Taken:
        """Return the progress before any step is granted."""
        return _Taken(done, done, self.cluster.client.position.generation)

    def _grant(self, taken: _Taken, goal: int, run: StepRun) -> None:
        """Grant workers more steps, unless they are far ahead of the caller, or should stop."""
        if taken.stopping is None:
            lead = run.lead(self.cluster.job.num_workers)
            most = min(goal, taken.done + max(lead - (run.handed_on - run.told), 0))
            if most > taken.granted and (taken.granted - taken.done) * 2 <= lead:
                self._ask(most - taken.granted, run.stats, taken.generation)
                taken.granted = most

    def _stop_if_wanted(self, taken: _Taken, client: Client, *, changing: bool, goal: int) -> None:
        """Have workers stop for a change, or because the user wants it; find out after which step."""
        if taken.stopping is None and (changing or self._is_interrupted(goal)):
            stopped = taken.done >= taken.granted
            taken.stopping, taken.changing = self._ask_to_stop(stopped=stopped), changing
        if taken.stopping is not None and taken.last is None and taken.stopping.done():
            taken.last = self._stop_of(taken.stopping, client)

    def _await_caller(self, run: StepRun, taken: _Taken, goal: int) -> None:
        """Return when the caller has taken a result, when workers should stop, or after a moment."""
        before, run.waits = run.told, True

        def due() -> bool:
            return run.told > before or run.given_up or self._is_stopping(taken, goal)

        self.owner.attend(self._supervisor.pause, due)
        run.waits = False
        self._heard()

    def _is_stopping(self, taken: _Taken, goal: int) -> bool:
        """Return whether workers should stop, or their last step is already known."""
        if taken.stopping is None:
            return self._is_interrupted(goal)
        return taken.last is None and taken.stopping.done()

    def _is_interrupted(self, goal: int) -> bool:
        """Return whether workers should stop because of a request of the user's."""
        return (self.stopping and goal > self._newest) or self.rates.are_wanted

    def _end(self, run: StepRun) -> None:
        self.running = False
        self._supervisor.in_call = False
        self.rates.put_in_force(self._newest)
        try:
            if not self._idle:
                self._revoke()  # which counts steps that were committed meanwhile
        finally:
            self.seconds += system().now() - self._began
        if run.thread is not None and not self._supervisor.is_amid_change:
            self._supervisor.promised = max(self._supervisor.promised, self.step)

    def _catch_up(self, plan: SamplePlan | None, run: StepRun) -> int:
        """Hand on the results of steps before a change; return how many steps are committed."""
        self._heard()
        outcomes, last = self.cluster.client.outcomes, 0
        for _ in range(outcomes.qsize()):
            late = outcomes.get()
            if isinstance(late, AuditDifference):
                self._supervisor.hear_difference(replace(late, waits=False))
            elif not isinstance(late, Result):
                outcomes.put(late)
            elif last < late.step <= self.step:  # else stock was taken twice, or the step is undone
                last = late.step
                self._hand_on(late, plan, run)
        return self.step

    def _heard(self) -> None:
        """Note that processes are at work now."""
        self._silent_since = system().now()

    def _hand_on(self, outcome: Result | Failure, plan: SamplePlan | None, run: StepRun) -> None:
        if isinstance(outcome, Failure):
            self._idle = True  # the coordinator has taken the rest back already
            self._raise_failure(outcome)
        taken = self._count(outcome, plan)
        self._newest = max(self._newest, outcome.step)
        if run.thread is not None:
            self._supervisor.promised = max(self._supervisor.promised, outcome.step)
            if outcome.step > run.before:
                run.handed_on += 1
                run.results.put(taken)

    def _count(self, result: Result, plan: SamplePlan | None) -> StepResult:
        """Count a committed step, and return the user's view of its result."""
        self.samples += result.samples
        self.bytes_pushed += result.bytes_pushed
        self.bytes_pulled += result.bytes_pulled
        epoch = result.epoch if plan is None else plan.position(result.step - 1).epoch
        rates = self.rates.at(result.step - 1)
        if result.hyper is not None:
            rates = tuple(g.get("lr", lr) for g, lr in zip(result.hyper, rates, strict=True))
        self.last = StepResult.from_result(result, epoch, rates)
        figures = Figures(
            self.cluster.job.num_workers,
            self.cluster.job.num_servers,
            self.cluster.client.position.generation,
            result.bytes_pushed,
            result.bytes_pulled,
            self.seconds + system().now() - self._began,
        )
        ends = None if plan is None or epoch is None else plan.end_of(epoch) == result.step
        self.history.stepped(self.last, figures, ends_epoch=ends)
        self.history.record.stepped(result.step, figures.seconds, result.spent)
        self._describe()
        if self.on_count is not None:
            self.on_count(result.step)
        self.history.reports.add_noted(result.notes, result.step, result.samples > 0)
        return self.last

    def _describe(self) -> None:
        """Update the run's record of the job, if that may have changed."""
        cluster = self.cluster
        now = cluster.members, len(cluster.events)
        if self._described[0] is now[0] and self._described[1] == now[1]:
            return
        self._described, job = now, cluster.job
        described = {
            "strategy": job.config.name,
            "samples": job.global_batch,
            "settings": settings_of(job),
            "processes": [
                [str(peer), place.node, place.host, place.pid]
                for peer, place in sorted(cluster.places.items())
            ],
        }
        self.history.record.describe(self.step, described)

    def _ask(self, steps: int, stats: bool, generation: int) -> None:
        client, self._idle = self.cluster.client, False
        rates = self.rates.since(self.step)
        self._asked = self.cluster.router.call(lambda: client.ask(steps, stats, rates, generation))

    def _ask_to_stop(self, *, stopped: bool) -> Future[int]:
        """Have workers stop soon; return a future of the version after which they do."""
        if stopped:
            known: Future[int] = Future()
            known.set_result(self.version)
            return known
        client = self.cluster.client
        stopping: Future[int] = self.cluster.on_router(client.stop)
        stopping.add_done_callback(lambda _: self.owner.wake())
        return stopping

    def _stop_of(self, stopping: Future[int], client: Client) -> int | None:
        """Return the step after which workers stop; None if a death comes first, which is handled next."""
        try:
            return self.cluster.job.step_of(stopping.result(0))
        except PeerLostError as error:
            lost = client.lost_peer
            if lost is None or not self._supervisor.suspects(lost, str(error), client):
                self._raise_lost(error)
            return None

    def _complete(self) -> None:
        """Make the changes that are due, and wait until lost copies are replaced."""
        deadline = system().now() + 5 * self.cluster.run_config.deadlines.start
        while True:
            if self._supervisor.look() is not None:
                self._supervisor.change()
            elif self._supervisor.lacks_copies and system().now() < deadline:
                self.owner.attend(_SHORT_SECONDS)
            else:
                return

    def _next_outcome(self, run: StepRun, taken: _Taken, goal: int) -> Result | Failure | None:
        """Return the next outcome; None if none comes soon, or other work is due."""
        supervisor, client = self._supervisor, self.cluster.client

        def heard() -> bool:
            waits = not client.outcomes.empty() or run.given_up
            return waits or self._is_stopping(taken, goal)

        if client.outcomes.empty():
            self.owner.attend(supervisor.pause, heard)
        if self._asked is not None and self._asked.done() and self._asked.exception() is not None:
            self.cluster.on_router(lambda: None)  # raises what ended the router
            self._asked.result()
        if client.outcomes.empty():
            if run.given_up or self._is_stopping(taken, goal):
                return None
            self.cluster.deaths.raise_if_dead(replaced=supervisor.observation.can_replace)
            # the coordinator's word first
            if system().now() - self._silent_since > self._timeout + _LATER_SECONDS:
                raise DeadlineError(
                    f"step {self.step + 1} was not committed within {self._timeout:g} s and "
                    f"the coordinator is mute{_held_up(self._activities().values())}"
                )
            return None
        outcome = client.outcomes.get()
        self._heard()
        if isinstance(outcome, WorkerLost):
            supervisor.hear(outcome)
            return None
        if isinstance(outcome, AuditDifference):
            supervisor.hear_difference(outcome)
            return None
        lost = _loss(outcome, client)
        if lost is not None and supervisor.suspects(*lost, client):
            return None
        if isinstance(outcome, PeerLostError):
            self._raise_lost(outcome)
        if isinstance(outcome, ProtocolError):
            raise outcome
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
            # results come before it, whoever is silent meanwhile
            self.owner.attend(self._timeout, calls=[revoking])
            revoking.result(0)
            stopped = True
        except (PeerLostError, DeadlineError, ShutdownError, FutureTimeoutError):
            stopped = False  # no process is left to stop; the first error says why
        for _ in range(client.outcomes.qsize()):
            outcome = client.outcomes.get()
            if isinstance(outcome, Result):
                self._count(outcome, self.cluster.plan[0])
            elif isinstance(outcome, AuditDifference):
                self._supervisor.hear_difference(replace(outcome, waits=False))
            elif not stopped:  # the next call hears of it
                client.outcomes.put(outcome)

    def _raise_failure(self, failure: Failure) -> NoReturn:
        if failure.reason == "deadline":
            self.cluster.deaths.raise_if_dead()  # the better explanation
        if failure.reason == "lost":
            assert failure.peer is not None
            self.cluster.deaths.lost(failure.peer, failure.why)
        hosts = {peer: place.host for peer, place in self.cluster.places.items()}
        activities = self._activities() if failure.awaited else {}
        late = [
            (str(peer), *self._where(activity))
            for peer, activity in activities.items()
            if peer.role == "worker" and str(peer) in failure.awaited
        ]
        alike = self._raised_alike(failure) if failure.reason == "raised" else []
        raise_step_error(failure, hosts, late, _held_up(activities.values()), alike)

    def _raised_alike(self, failure: Failure) -> list[int]:
        """Return the other workers that raise the same error in the failed step within a short time."""
        actors = {
            peer.index: actor
            for peer, actor in self.cluster.actors.items()
            if peer.role == "worker" and peer.index != failure.worker
        }
        alike, deadline = [], system().now() + ALIKE_SECONDS
        while actors:
            calls = {
                worker: runtime().call(actor, "raised_before", failure.generation)
                for worker, actor in actors.items()
            }
            self.owner.attend(max(deadline - system().now(), 0.0), calls=[*calls.values()])
            for worker, call in calls.items():
                if not has_answered(call) or (error := call.get()) is None:
                    continue
                del actors[worker]
                if error == failure.error:
                    alike.append(worker)
            if system().now() >= deadline:
                drop_calls(calls.values())
                break
            self.owner.attend(_SHORT_SECONDS if actors else 0.0, lambda: False)
        return alike

    def _activities(self) -> dict[Peer, Activity]:
        """Return the activities of the processes that answer soon."""
        return self.cluster.workers.answers("doing", _WHERE_SECONDS)

    def _where(self, activity: Activity) -> tuple[str, str]:
        """Return the samples that a worker computes, in words, and the frames of users' code that it runs."""
        cluster, share = self.cluster, activity.share
        words = "" if share is None else cluster.samples_of(share)
        if words and share is not None:
            words = f"its share of step {share // cluster.job.shares + 1}: {words}"
        return words, activity.frames

    def _raise_lost(self, error: PeerLostError) -> NoReturn:
        self.cluster.deaths.lost(self.cluster.client.lost_peer or Peer("server", 0), str(error))


def _held_up(activities: Iterable[Activity]) -> str:
    """Return in words which roles wait for resources of their machines; "" for none."""
    statuses = [each for activity in activities for each in activity.roles]
    return "".join(f"; {name} {status}" for name, status in statuses if status.is_held_up)
