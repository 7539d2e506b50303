"""The driver's side of training: it grants steps, takes their results, and takes back the rest."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import NoReturn, Protocol, TypeVar

from steepest.cluster.diagnostics import raise_step_error
from steepest.cluster.launch import Cluster
from steepest.data.sampler import SamplePlan
from steepest.errors import DeadlineError, PeerLostError, ShutdownError, SteepestError
from steepest.messages.driver import Failure, Result, WorkerLost
from steepest.messages.message import Peer

T = TypeVar("T")
log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_SHORT_SECONDS = 0.02  # while a process starts that others wait for


def _unheard(step: int, plan: SamplePlan | None) -> Result:
    """Return the result of a committed step of which no message came: samples, no statistics."""
    samples = 0 if plan is None else plan.position(step - 1).size
    return Result(0, 0, step, samples, bytes_pushed=0, bytes_pulled=0, staleness=())


class Change(Protocol):
    """Something that is made between two steps, when it is ready."""

    def ready(self) -> bool:
        """Return whether it can be made at once."""

    def apply(self) -> None:
        """Make the change; no worker trains meanwhile."""

    def cancel(self) -> None:
        """Give the change up."""

    def again(self) -> Change | None:
        """Return what remains of the change when another one was made first."""


class WorkerRange(Protocol):
    """Bounds within which a job's size follows what the cluster has."""

    def loss(self) -> Change | None:
        """Return what must be changed at once, if anything."""

    def look(self) -> Change | None:
        """Return what should be changed, if anything."""

    def fix(self, workers: int) -> None:
        """Keep exactly that many workers from now on."""


class Training:
    """Steps of one job.

    Args:
        cluster: its processes.
        step_timeout: seconds.

    Attributes:
        cluster: its processes.
        range: within which the number of workers changes by itself.
        running: whether workers are at work.
        samples, seconds, bytes_pushed, bytes_pulled: sums over all steps so far.
    """

    def __init__(self, cluster: Cluster, step_timeout: float) -> None:
        self.running = False
        self.samples = 0
        self.seconds = 0.0
        self.bytes_pushed = 0
        self.bytes_pulled = 0
        self.cluster = cluster
        self._timeout = step_timeout
        self._change: Change | None = None
        self._urgent = False  # whether it may not be replaced by another
        self._later: Change | None = None
        self.range: WorkerRange | None = None
        self._began = 0.0  # of the steps that are being taken
        self._idle = True  # whether no granted step is left

    @property
    def version(self) -> int:
        """Updates committed, as far as the driver has heard."""
        return self.cluster.client.position.version

    @property
    def step(self) -> int:
        """Steps committed, as far as the driver has heard."""
        return self.cluster.step

    def take(self, end: Callable[[], int], stats: bool, on_step: Callable[[Result], None]) -> None:
        """Have workers take steps until a step is committed; hand on the result of each.

        What was granted and is not used is taken back when anything raises.

        Args:
            end: returns the number of steps that are to be committed then, as a whole; asked again
                whenever the job was put together anew, since a step may cover another number of
                samples afterwards.
            stats: whether workers report loss and metrics.
            on_step: called with each result, in order.
        """
        self._began = time.monotonic()
        self.running, self._idle = True, True
        done, goal = self.step, end()
        if self.cluster.recovery is not None:
            self.cluster.recovery.snapshots.ensure()  # whoever dies in the first step is replaced
        stop: int | None = None  # the number of steps after which workers stop for a change
        try:
            self._ask(goal - done, stats)
            while done < goal:
                if stop is None and self._is_change_ready():
                    stop = self._stop()
                if stop is not None and done >= stop:
                    self._make_change()
                    done, stop, goal = self.step, None, end()
                    self._ask(goal - done, stats)
                    continue
                outcome = self._next_outcome(stopping=stop is not None)
                if outcome is None:
                    continue
                lost = self._loss(outcome)
                if lost is not None and self._can_replace(lost[0]):
                    done = self._recover(lost, done, on_step)
                    stop, goal = None, end()
                    self._ask(goal - done, stats)
                    continue
                done += 1
                self._hand_on(outcome, on_step)
            self._idle = True
            if self._is_change_ready():  # workers stand still
                self._make_change()
            self._complete()
        finally:
            self._end()

    def begin_snapshot(self) -> None:
        """Have the state copied if there is no copy of it, for a death before training goes on."""
        if self.cluster.recovery is not None:
            self.cluster.recovery.snapshots.begin()

    def _end(self) -> None:
        self.running = False
        self.seconds += time.monotonic() - self._began
        if not self._idle:
            self._revoke()

    def _recover(self, lost: tuple[Peer, str], done: int, on_step: Callable[[Result], None]) -> int:
        """Put the job together without a dead process; return how many steps are committed.

        Args:
            lost: the process, and the cause of its death.
            done: the number of steps whose results were handed on.
            on_step: called for each step that was committed before the death and not handed on.
        """
        before, (plan, _), recovery = self.cluster.client, self.cluster.plan, self.cluster.recovery
        assert recovery is not None
        recovery.recover(*lost)
        if (change := self._change) is not None:  # what was started for it fits no more
            self._change, self._urgent = change.again(), False
        while done < self.step and not before.outcomes.empty():
            late = before.outcomes.get()
            if isinstance(late, Result):
                done += 1
                self._hand_on(late, on_step)
        while done < self.step:
            done += 1
            self._hand_on(_unheard(done, plan), on_step)
        return self.step  # it may have been set back

    def _hand_on(
        self, outcome: Result | Failure | PeerLostError, on_step: Callable[[Result], None]
    ) -> None:
        if isinstance(outcome, PeerLostError):
            self._raise_lost(outcome)
        if isinstance(outcome, Failure):
            self._idle = True  # the coordinator has taken the rest back already
            self._raise_failure(outcome)
        self._count(outcome)
        on_step(outcome)

    def _ask(self, steps: int, stats: bool) -> None:
        if steps <= 0:
            return
        client, self._idle = self.cluster.client, False
        self.cluster.on_router(lambda: client.ask(steps, stats))

    def _stop(self) -> int | None:
        """Have workers stop soon; return after how many steps, or None if a death comes first.

        The death is the next outcome then.
        """
        client = self.cluster.client
        stopping: Future[int] = self.cluster.on_router(client.stop)
        try:
            return self.cluster.job.step_of(stopping.result(self._timeout))
        except PeerLostError as error:
            if client.lost_peer is None or not self._can_replace(client.lost_peer):
                self._raise_lost(error)
            return None
        except FutureTimeoutError:
            self.cluster.raise_if_dead()
            raise DeadlineError(
                f"waited {self._timeout:g} s in vain for the coordinator to stop the workers"
            ) from None

    def request(self, change: Change) -> None:
        """Have something changed between two of the steps that are being taken; from any thread."""
        if self._urgent:  # that is made first
            earlier, self._later = self._later, change
        else:
            earlier, self._change = self._change, change
        if earlier is not None:
            earlier.cancel()

    def _is_change_ready(self) -> bool:
        try:
            if (
                self.range is not None
                and not self._urgent
                and (loss := self.range.loss()) is not None
            ):
                self._later, self._change, self._urgent = self._change, loss, True
            elif self._change is None and self.range is not None:
                self._change = self.range.look()
            return self._change is not None and self._change.ready()
        except SteepestError as error:
            log.warning("%s", error)
            if self._change is not None:
                self._change.cancel()
            self._change = None
            return False

    def surviving(self, change: Callable[[], None]) -> None:
        """Make a change while no step is taken; once more if a process dies in the middle of it.

        Raises:
            PeerLostError, DeadlineError: what failed was no death, or the job cannot continue.
        """
        recovery = self.cluster.recovery
        while True:
            try:
                return change()
            except (PeerLostError, DeadlineError):
                if recovery is None or not recovery.resume():
                    raise
                self.cluster.mend()

    def _make_change(self) -> None:
        change, self._change, self._urgent = self._change, None, False
        later, self._later = self._later, None
        if change is not None:
            try:
                change.apply()
            except (PeerLostError, DeadlineError):
                if self.cluster.recovery is None or not self.cluster.recovery.resume():
                    raise
                later = later or change
        if later is not None:
            self._change = later.again()

    def _complete(self) -> None:
        """Wait until copies that were lost are there again."""
        recovery, deadline = (
            self.cluster.recovery,
            time.monotonic() + 5 * self.cluster.run_config.deadlines.start,
        )
        while (
            recovery is not None and recovery.missing() is not None and time.monotonic() < deadline
        ):
            recovery.look()
            if self._is_change_ready():
                self._make_change()
            else:
                time.sleep(_SHORT_SECONDS)

    def _loss(self, outcome: Result | Failure | PeerLostError) -> tuple[Peer, str] | None:
        """Return the role that is lost, and why, if an outcome says so."""
        if isinstance(outcome, PeerLostError):
            return self.cluster.client.lost_peer or Peer("server", 0), str(outcome)
        if isinstance(outcome, Failure) and outcome.reason == "lost":
            assert outcome.peer is not None
            return outcome.peer, outcome.why
        return None

    def _is_mended(self, process: Peer) -> bool:
        """Return whether `_mend` handles the death of a process."""
        return (
            process.role == "worker" and self.cluster.job.workers_are_replaced
        ) or self._can_replace(process)

    def _can_replace(self, peer: Peer) -> bool:
        recovery = self.cluster.recovery
        return recovery is not None and recovery.can_replace(self.cluster.process_of(peer))

    def _count(self, result: Result) -> None:
        self.samples += result.samples
        self.bytes_pushed += result.bytes_pushed
        self.bytes_pulled += result.bytes_pulled

    def _next_outcome(self, *, stopping: bool) -> Result | Failure | PeerLostError | None:
        """Return the next outcome; None when a change is ready and none comes."""
        deadline = (
            time.monotonic() + self._timeout + 5 * _LOOK_SECONDS
        )  # the coordinator's word first
        if self.cluster.recovery is not None:
            self.cluster.recovery.snapshots.remember()
        look = min(_LOOK_SECONDS, self.cluster.run_config.failure.heartbeat / 6)
        while True:
            try:
                successors = self.cluster.successors
                successors.look(self.seconds + time.monotonic() - self._began)
                if successors.is_due() and (gone := self._mend(None)) is not None:
                    return gone
                timeout = _SHORT_SECONDS if successors.starting else look
                outcome = self.cluster.client.outcomes.get(timeout=timeout)
                if not isinstance(outcome, WorkerLost):
                    return outcome
                if (gone := self._mend(outcome)) is not None:
                    return gone
                deadline = time.monotonic() + self._timeout + 5 * _LOOK_SECONDS
            except queue.Empty:
                if (gone := self._mend(None)) is not None:
                    return gone
                if not stopping and self._is_change_ready():
                    return None
                self.cluster.raise_if_dead(
                    replaced=self._is_mended
                )  # who died since that can be is next
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"step {self.step + 1} was not committed within {self._timeout:g} s and "
                        "the coordinator is mute"
                    ) from None

    def _mend(self, lost: WorkerLost | None) -> PeerLostError | None:
        """Replace workers that died; return the loss of a process that only a recovery replaces."""
        recovery = self.cluster.recovery
        try:
            if recovery is None or recovery.loss() is None:
                self.cluster.successors.mend(lost, wait=False)
        except PeerLostError:
            if recovery is None or recovery.loss() is None:
                raise
        if recovery is None or (loss := recovery.loss()) is None:
            return None
        self.cluster.client.lost_peer = loss[0]
        return PeerLostError(loss[1])

    def _revoke(self) -> None:
        """Take back steps after an error or Ctrl-C; those that were committed meanwhile stay."""
        client = self.cluster.client
        try:
            self.wait(self.cluster.on_router(client.revoke), "the coordinator to stop the workers")
        except (PeerLostError, DeadlineError, ShutdownError):
            return  # nobody is left to be stopped; the first error says why
        while not client.outcomes.empty():
            outcome = client.outcomes.get()
            if isinstance(outcome, Result):
                self._count(outcome)

    def _raise_failure(self, failure: Failure) -> NoReturn:
        if failure.reason == "deadline":
            self.cluster.raise_if_dead()  # the better explanation
        if failure.reason == "lost":
            assert failure.peer is not None
            self.cluster.lost(failure.peer, failure.why)
        raise_step_error(failure, self.cluster.places)

    def wait(self, future: Future[T], what: str) -> T:
        """Return what a future holds, within the deadline.

        Raises:
            DeadlineError, PeerLostError
        """
        try:
            return future.result(self._timeout)
        except FutureTimeoutError:
            self.cluster.raise_if_dead()
            raise DeadlineError(f"waited {self._timeout:g} s in vain for {what}") from None
        except PeerLostError as error:
            self._raise_lost(error)

    def _raise_lost(self, error: PeerLostError) -> NoReturn:
        self.cluster.lost(self.cluster.client.lost_peer or Peer("server", 0), str(error))
