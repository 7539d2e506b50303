"""What the driver knows of a job's processes: where each runs, how it is called, what it is part of."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from steepest.core.config.run import RunConfig
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.client import Client
from steepest.core.engine.job import Job
from steepest.core.messages.message import Peer, server_peer, worker_peer
from steepest.core.status import Status
from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.core.transport.channel import Address
from steepest.core.transport.router import Router
from steepest.errors import DeadlineError, PeerLostError, ShutdownError, listed
from steepest.observe.results import Event
from steepest.runtime.activity import log_report
from steepest.runtime.calls import drop_calls, raise_remote, who_raised
from steepest.runtime.job_runtime import CallRaisedError, ProcessDiedError, runtime
from steepest.runtime.owner import Owner
from steepest.runtime.places import Place
from steepest.runtime.seats import Placement
from steepest.runtime.signs_of_life import SignsOfLife
from steepest.runtime.tls.connections import identity_of

log = logging.getLogger(__name__)
change_log = logging.getLogger("steepest.changes")
#: Processes may take this many times `DeadlineConfig.start` to import, build the model and connect.
_UP_FACTOR = 4.0
LOOK_SECONDS = 0.3
_LEAST_SECONDS = 0.1  # of a wait, however late it begins
_MOST_SAMPLES = 64  # of a share, in an error
_MOST_FORMER = 16  # processes whose places stay known


@dataclass(frozen=True)
class Lineup:
    """The processes that will form a job."""

    config: Strategy
    num_workers: int
    keep: Mapping[int, int]  # maps each surviving worker's new index to its old one
    #: New processes: of workers, with their models built, or in place of dead servers.
    added: Mapping[Peer, Any] = field(default_factory=dict)
    #: Seats of new workers, by index; the others get the first that are free.
    placement: Mapping[int, int] = field(default_factory=dict)
    #: Dead processes, and servers with successors in `added`; other servers take the free numbers.
    gone: Collection[Peer] = ()
    unfrozen: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Member:
    """One process of a job, known by the first of its roles."""

    actor: Any  # Ray's handle
    watch: Any  # a call that ends when the process does
    place: Place
    life: int = 0  # of a worker, its incarnation


class JobContext:
    """What the driver knows of a job and its processes; only its own methods and `Cluster`'s change it."""

    client: Client  # the driver's end of the job; used through `Cluster.on_router`
    job: Job  # its facts as it is now
    stored_job: Any  # the same, in Ray's store
    ends: list[Address]  # see `connect_processes`
    listening: list[Address]

    def __init__(self, run_config: RunConfig, seed: int) -> None:
        self.run_config = run_config
        self.owner = Owner()  # of all that is here: one thread changes it
        self._standing: int | None = None  # the step, while processes change their roles
        self.roles_due = False  # whether processes know less of the job than is known here
        self.members: dict[Peer, Member] = {}  # another dict when processes get their roles anew
        self.starting: dict[Peer, Any] = {}  # Ray's handles of the first ones, until all are up
        self.placement = Placement()
        # which samples belong to which worker, and the seed, for workers that join later
        self.plan: tuple[SamplePlan | None, int] = (None, seed)
        self.events: list[Event] = []  # oldest first
        # the last processes that have died or left, and where they ran
        self.former: deque[tuple[Peer, Place]] = deque(maxlen=_MOST_FORMER)
        self.awaited: Set[Peer] = frozenset()  # the dead that are being handled
        self.signs = SignsOfLife(run_config.failure.heartbeat)
        self.unfrozen: frozenset[str] = frozenset()  # names that are to be trained, see `Job`
        self.begun_to_train: frozenset[str] = (
            frozenset()
        )  # those among them that some model may train already
        self.router = Router()
        self.token = system().chance.randbytes(32)
        self.identity = identity_of(run_config.tls)
        # called again and again while calls are waited for; what it raises ends the waiting
        self.meanwhile: Callable[[], None] = lambda: None
        self.extend_deadline()

    @property
    def actors(self) -> dict[Peer, Any]:
        """Ray's handle of each process."""
        return self.starting or {peer: member.actor for peer, member in self.members.items()}

    @property
    def places(self) -> dict[Peer, Place]:
        """Where each process runs."""
        return {peer: member.place for peer, member in self.members.items()}

    @property
    def watches(self) -> dict[Peer, Any]:
        """The call of each process that ends when the process does."""
        return {peer: member.watch for peer, member in self.members.items()}

    def process_of(self, peer: Peer) -> Peer:
        """Return the role under which the process that hosts a role is known in `members`."""
        members = self.members
        if peer in members or not members:
            return peer
        if server_peer(0) in members:
            return server_peer(0)
        alone = worker_peer(peer.index) not in members or self.job.num_workers == 1
        return worker_peer(0 if alone else peer.index)

    @property
    def step(self) -> int:
        """Steps committed, as far as the driver has heard; during a change, those at its beginning."""
        if self._standing is not None:
            return self._standing
        return self.job.step_of(self.client.position.version)

    def stand(self, step: int | None) -> None:
        """Fix `step` while processes change their roles; None once they have them."""
        self._standing = step

    def silence_of(self, peer: Peer, seconds: float) -> str:
        """Return in words that a process is silent; of a worker, with the samples that it may compute."""
        why, job = f"no sign of life for {seconds:.1f} s", self.job
        if peer.role != "worker" or job.leases_samples:
            return why
        samples = self.samples_of(self.step * job.shares + peer.index)
        share = f"step {self.step + 1}, the first without a result, has for it {samples}"
        return f"{why}; {share}" if samples else why

    def silence(self, actor: Any) -> float:
        """Return for how many seconds a process had given no sign of life when last looked at."""
        return self.signs.silence(actor)

    def roles(self) -> list[tuple[Peer, Status]]:
        """Return the roles in the driver, and what each does or waits for, see `Router.doing`."""
        return self.router.doing()

    def processes(self) -> list[Any]:
        """Return the handles of all processes, with a role or without; any thread may ask."""
        return list(self.actors.values())

    def samples_of(self, share: int) -> str:
        """Return the samples of a share in words; "" if data choose their own samples."""
        job, plan = self.job, self.plan[0]
        if plan is None:
            return ""
        samples = plan.samples_of(share, job.shares, job.parts).tolist()
        rest = len(samples) - _MOST_SAMPLES
        more = f" and {rest} more" if rest > 0 else ""
        shown = ", ".join(map(str, samples[:_MOST_SAMPLES])) or "none"
        return f"samples {shown}{more} of the data set"

    def seat_of(self, peer: Peer) -> int:
        """Return the number of the seat to which a process' failures are counted."""
        return self.placement.order[peer.index] if peer.role == "worker" else -1 - peer.index

    def lost_peers(self) -> set[Peer]:
        """Return the peers whose channels to the driver have closed."""
        return set(self.router.lost_peers)

    def note(self, kind: str, line: str, record: str = "") -> None:
        """Log what happened to processes in one line, and add it to `events`; see `Event`."""
        self.events.append(Event(system().time(), kind, self.step, line or record, record))
        if line:
            log.warning("%s", line)
        if record:
            change_log.info("%s", record)

    def use_plan(self, plan: SamplePlan | None, seed: int) -> None:
        """Note which samples belong to which worker from now on, see `plan`."""
        self.plan = (plan, seed)

    def shift_schedule(self, updates: int) -> None:
        """Note that the learning-rate schedule is `updates` updates ahead of the steps."""
        self.job = replace(self.job, schedule_offset=self.job.schedule_offset + updates)
        self.roles_due = True

    def await_successors(self, dead: Collection[Peer]) -> None:
        """Note the dead processes that are being replaced or left out; other deaths are errors."""
        self.awaited = frozenset(dead)

    def extend_deadline(self) -> None:
        """Give processes that start from now on the full time to come up, see `get`."""
        self._deadline = system().now() + self.run_config.deadlines.start * (1 + _UP_FACTOR)

    def names(self, actors: Iterable[Any]) -> list[str]:
        """Return the names of processes by Ray's handles, for errors."""
        known = {actor: str(peer) for peer, actor in self.actors.items()}
        return [known.get(actor, "a process that has no role any more") for actor in actors]

    def get(
        self,
        refs: list[Any],
        what: str,
        names: Iterable[Peer | str],
        *,
        after_step: bool = False,  # processes may have to end a step before
    ) -> list[Any]:
        """Return the results of calls of processes that start or get new roles.

        The deadline is counted from the job's start, or from the last `extend_deadline`.

        Raises:
            ModelRaisedError: the user's code raised; its traceback is the cause. Our own errors are
                raised as they are.
            PeerLostError: a process died.
            DeadlineError: not all calls ended before the deadline.
        """
        more = self.run_config.deadlines.step if after_step else 0.0
        named, results = dict(zip(refs, map(str, names), strict=True)), dict[Any, Any]()

        def late(calls: Collection[Any]) -> tuple[str, str]:
            others = [name for call, name in named.items() if call not in calls]
            did = f" ({listed(others)} did)" if others else ""
            limit = self.run_config.deadlines.start * (1 + _UP_FACTOR) + more
            silent = listed([named[call] for call in calls])
            error = f"{silent} did not {what} within {limit:g} s{did}"
            return error, f"{error}: raise DeadlineConfig(start=...)"

        try:
            for call in self.ended(refs, self._deadline + more - system().now(), late):
                results[call] = call.get()
        except CallRaisedError as error:
            drop_calls(refs)
            name = who_raised(error, named)
            try:
                raise_remote(error, name, what)
            except ShutdownError as ended:  # of its router, not of this trainer
                raise PeerLostError(f"{name} ended before it could {what}") from ended
        except ProcessDiedError as error:
            drop_calls(refs)
            raise PeerLostError(
                f"a process died before it could {what}: {' '.join(str(error).split())}"
            ) from None
        return [results[call] for call in refs]

    def ended(
        self,
        calls: Collection[Any],
        seconds: float,
        late: Callable[[Collection[Any]], tuple[str, str]],
        look: Callable[[], object] = lambda: None,
    ) -> Iterator[Any]:
        """Yield each of some calls of processes, or futures of other threads, as it ends.

        Meanwhile the owner serves requests, and silent processes are looked for. Every wait for a
        job's processes that has a deadline goes through here.

        Args:
            calls: that are waited for.
            seconds: within which all have to end.
            late: called with those that have not; returns the name of the wait, for the report, and
                the text of the error.
            look: called while nothing ends; its exception ends the wait.

        Raises:
            DeadlineError: not all have ended in time; what each process does was logged before.
        """
        left, deadline = list(calls), system().now() + seconds
        while left:
            pause = min(LOOK_SECONDS, max(deadline - system().now(), _LEAST_SECONDS))
            if self.owner.attend(pause, calls=left, number=1):
                for call in [call for call in left if call.done()]:
                    yield call
                    left.remove(call)
                continue
            self.meanwhile()
            look()
            if system().now() >= deadline:
                passed, words = late(left)
                log_report(self, passed)
                raise DeadlineError(words)

    def substitute(self, peer: Peer, actor: Any, place: Place, listening: Address) -> None:
        """Note that another process is a worker now."""
        before = self.members[peer]
        self.former.append((peer, before.place))
        self.members[peer] = Member(actor, runtime().call(actor, "watch"), place, before.life + 1)
        self.listening[peer.index] = listening
