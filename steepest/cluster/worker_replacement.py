"""Successors: another process takes the place of a dead worker; spare ones are kept ready."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from steepest.cluster.diagnostics import has_answered, never_ran
from steepest.cluster.locations import Place
from steepest.cluster.signs_of_life import SignsOfLife
from steepest.engine.job import check_agreement
from steepest.engine.replicas import all_states, mean_states
from steepest.errors import PeerLostError
from steepest.messages.driver import WorkerLost
from steepest.messages.message import Peer, server_peer, worker_peer
from steepest.tensors.dtypes import Tensors

if TYPE_CHECKING:
    from steepest.cluster.launch import Cluster

log = logging.getLogger(__name__)

_NOTICE_SECONDS = 5.0  # that Ray takes, at most, to see that a process is gone
_TRY_SECONDS = 0.02
_SPARE_AFTER_SECONDS = 20.0  # of training, before a spare process is worth its memory


@dataclass(frozen=True)
class Start:
    """A process that starts in a dead worker's place.

    Attributes:
        index, seat: of the worker, in whose place it starts.
        cause: of the worker's death.
        began: when.
        spare: whether it was kept ready.
        actor, building: itself, and the calls that end when it is up.
    """

    index: int
    seat: int
    cause: str
    began: float
    spare: bool
    actor: Any
    building: list[Any]


class Successors:
    """Watches over a job's workers, and replaces those that are gone.

    Args:
        cluster: the job's processes.

    Attributes:
        count: how many workers were replaced.
        starting: processes on their way to be workers, by index.
        returning: those whose job has gone on without them meanwhile.
        left_out: workers that died too often, and why; nobody takes their places.
        least: how many workers can go on without the others.
        signs: of life, of all processes.
        moved: those that have come up on another node than their predecessor, for a recovery; and
            why that died.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.count = 0
        self._cluster = cluster
        self._spares: list[tuple[Any, Any]] = []  # actors, and the call that says where they are
        self._mending = False
        self.starting: dict[int, Start] = {}
        self.returning: list[Start] = []
        self._joined: set[int] = set()  # successors, as long as others are starting
        self.left_out: dict[int, str] = {}
        self.least = 1
        self._failures: Counter[int] = Counter()  # by seat
        self._counted: set[Any] = (
            set()
        )  # deaths among them, by the calls that watched the processes
        self.moved: dict[int, tuple[Any, str]] = {}
        self._tried = 0.0  # when it was last looked whether they are up
        self.signs = SignsOfLife(cluster)
        self._given_up: list[Place] = []
        self._silent: dict[int, int] = {}  # workers, and their lives, that did not answer

    # -- spare processes -----------------------------------------------------------------------

    def prepare(self, trained: float) -> None:
        """Start spare processes, if some are wanted after `trained` seconds of training."""
        run_config = self._cluster.run_config
        wanted = run_config.failure.spares
        if wanted is None:
            wanted = 1 if trained >= _SPARE_AFTER_SECONDS else 0
        recovery = self._cluster.recovery
        replaced = recovery is not None and recovery.can_replace(worker_peer(0))
        if not replaced or self._cluster.chosen.gpu:
            return  # a GPU is Ray's to give, when it is needed
        for number in range(len(self._spares), wanted):
            actor = self._cluster.start_process(
                "spare", number, 0, 0, 1, run_config.resources.cpus_per_worker
            )
            actor.prepare.remote(self._cluster.creator)
            self._spares.append((actor, actor.place.remote()))

    def prepare_if_wanted(self) -> None:
        """Start a spare process after a death, unless none is wanted."""
        self.prepare(
            _SPARE_AFTER_SECONDS if self._cluster.run_config.failure.spares is None else 0.0
        )

    def spare(self, node: str) -> Any | None:
        """Return a spare process on a node, if one is up; it is a spare no more."""
        for spare in self._spares:
            actor, placing = spare
            ready, _ = ray.wait([placing], timeout=0)
            if not ready:
                continue
            try:
                found: Place = ray.get(placing)
                ray.get(actor.place.remote(), timeout=_NOTICE_SECONDS)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                self._spares.remove(spare)
                return self.spare(node)
            if found.node == node:
                self._spares.remove(spare)
                return actor
        return None

    def leave(self, nodes: Collection[str]) -> None:
        """End spare processes on nodes that will leave the cluster."""
        for spare in list(self._spares):
            actor, placing = spare
            if has_answered(placing) and ray.get(placing).node in nodes:
                self._spares.remove(spare)
                ray.kill(actor, no_restart=True)

    def end(self) -> None:
        """End the spare processes, and those that are starting."""
        starting = [*self.starting.values(), *self.returning]
        for actor in [*(actor for actor, _ in self._spares), *(start.actor for start in starting)]:
            ray.kill(actor, no_restart=True)
        self._spares.clear()
        self.starting.clear()
        self.returning.clear()

    # -- silence -------------------------------------------------------------------------------

    def look(self, trained: float) -> None:
        """Ask every worker for a sign of life, give up silent ones, and start spare processes.

        Args:
            trained: seconds of training so far.
        """
        self.prepare(trained)
        cluster = self._cluster
        recovery, replaced = cluster.recovery, cluster.job.workers_are_replaced
        watched = [
            peer
            for peer in cluster.actors
            if (peer.role == "worker" and replaced)
            or (recovery is not None and recovery.can_replace(peer))
        ]
        if not watched or not self.signs.look(watched):
            return
        for peer in watched:
            if self.signs.is_silent(peer) and cluster.places[peer] not in self._given_up:
                self._give_up(peer, f"no sign of life for {self.signs.silence(peer):.1f} s")

    def _give_up(self, peer: Peer, why: str) -> None:
        cluster, life = self._cluster, self._cluster.lives[peer.index]
        self._given_up.append(cluster.places[peer])
        if peer.role == "worker" and cluster.job.workers_are_replaced:
            self._silent[peer.index] = life
            cluster.on_router(lambda: cluster.client.declare_lost(peer.index, life, why))
        else:  # the process of a server
            cluster.on_router(lambda: cluster.client.lost(server_peer(peer.index), why))
        cluster.deaths.declare(peer, why)

    def give_up_on(self, workers: Collection[int]) -> None:
        """End the processes that start in the places of these workers."""
        for index in workers:
            ray.kill(self.starting.pop(index).actor, no_restart=True)

    def await_nobody(self) -> None:
        """End the processes that wait to return to a job that continued without them."""
        for start in self.returning:
            ray.kill(start.actor, no_restart=True)
        self.returning.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Replace no worker during a block."""
        before, self._mending = self._mending, True
        try:
            yield
        finally:
            self._mending = before

    def forget(self) -> None:
        """Forget unanswered questions: workers have other indices now."""
        self.signs.forget()
        self._silent.clear()

    def let_go(self) -> dict[int, str]:
        """Have successors that are starting join later; return the dead workers, and why they died.

        The others continue without them. Workers are among them whose death was not noticed so far.
        None is let go when too few would be left.
        """
        asked = {
            peer.index: actor.alive.remote()
            for peer, actor in self._cluster.actors.items()
            if peer.role == "worker"
        }
        ray.wait(
            list(asked.values()),
            num_returns=len(asked),
            timeout=self._cluster.run_config.failure.heartbeat,
        )
        self.mend(wait=False)
        gone = {index: start.cause for index, start in self.starting.items()} | self.left_out
        if self._cluster.job.num_workers - len(gone) < self.least:
            return {}
        self.returning += [start for _, start in sorted(self.starting.items())]
        self.starting.clear()
        self.left_out = {}
        return dict(sorted(gone.items()))

    def take_back(self, starting: Mapping[int, Start], left_out: Mapping[int, str]) -> None:
        """Undo `let_go`, given what `starting` and `left_out` were before."""
        self.starting |= {i: start for i, start in starting.items() if start in self.returning}
        self.returning = [start for start in self.returning if start not in starting.values()]
        self.left_out |= left_out

    def is_due(self) -> bool:
        """Return whether it is time to look again at processes that are starting."""
        return bool(self.starting) and time.monotonic() - self._tried >= _TRY_SECONDS

    # -- successors ----------------------------------------------------------------------------

    def mend(self, lost: WorkerLost | None = None, *, wait: bool = True) -> None:
        """Give workers that died a successor each, where that can be.

        Training continues when they have joined.

        Args:
            lost: what the coordinator says of one of them; the others are found by asking Ray.
            wait: until they have joined; otherwise their processes begin to start, and those that
                are up join.

        Raises:
            PeerLostError: a worker cannot be replaced, or not again. What its successor raises when
                it is made is raised too.
        """
        cluster = self._cluster
        if self._mending or not cluster.job.workers_are_replaced:
            return
        self._tried = time.monotonic()
        if not self.starting:
            self._joined.clear()
        self._notice(lost, wait=wait)
        with self.paused():  # what follows calls the others
            while True:
                for index, start in list(self.starting.items()):
                    if wait:  # one that is not up by its deadline ends in an error there
                        self._join(index, self._wait_for(index, start))
                    else:
                        self._join_if_up(index, start)
                if not wait or not self.starting:
                    return

    def _notice(self, lost: WorkerLost | None, *, wait: bool) -> None:
        """Begin to replace every worker that is dead by now.

        Args:
            lost: what the coordinator says of one of them, if it says anything.
        """
        cluster = self._cluster
        for index in range(cluster.job.num_workers):
            peer = worker_peer(index)
            life = cluster.lives[index]
            suspected = lost is not None and (lost.worker, lost.life) == (index, life)
            silent = self._silent.get(index) == life
            if suspected and not silent:
                ray.wait([cluster.watches[peer]], timeout=_NOTICE_SECONDS)
            cause = cluster.deaths.cause(peer)
            if lost is not None and suspected and (silent or cause is None):
                cluster.deaths.declare(peer, cause := lost.why)
            known = index in self.starting or index in self.moved or index in self.left_out
            if cause is not None and not known:
                self._begin(index, cause, wait=wait)

    def _begin(self, index: int, cause: str, *, wait: bool) -> None:
        """Start another process in the place of a dead worker."""
        cluster, peer, seat = (
            self._cluster,
            worker_peer(index),
            self._cluster.placement.order[index],
        )
        allowed = cluster.run_config.failure.max_failures
        self.signs.forget(peer)
        if self.count_failure(peer, seat, cause) > allowed:
            cause += f" (it had {allowed} successors, FailureConfig(max_failures={allowed}) gives it no more)"
            if (
                wait
                or cluster.job.num_workers - len(self.starting) - len(self.left_out) <= self.least
            ):
                cluster.raise_lost(peer, cause)
            self.left_out[index] = cause
            return
        spare = self.spare(cluster.places[peer].node)
        actor = spare or cluster.start_worker(index)
        self.starting[index] = self._start(
            index, seat, cause, actor, time.monotonic(), spare=spare is not None
        )

    def _start(
        self, index: int, seat: int, cause: str, actor: Any, began: float, *, spare: bool = False
    ) -> Start:
        return Start(
            index,
            seat,
            cause,
            began,
            spare,
            actor,
            [self.build(actor, index), actor.place.remote()],
        )

    def follow(self, dead: Mapping[int, tuple[str, Any | None]]) -> None:
        """Start processes in the places of workers that the others do without.

        None starts in the place of one that died too often.

        Args:
            dead: by worker, why it died, and a spare process, if there is one.
        """
        cluster, now = self._cluster, time.monotonic()
        for index, (cause, spare) in sorted(dead.items()):
            if index in self.starting and spare is None:
                self.returning.append(self.starting.pop(index))
                continue
            seat = cluster.placement.order[index]
            if self._failures[seat] <= cluster.run_config.failure.max_failures:
                actor = spare or cluster.start_worker(index)
                self.returning.append(self._start(index, seat, cause, actor, now))

    def count_failure(self, peer: Peer, seat: int, cause: str) -> int:
        """Return how many processes have died in a seat, with the one that just did.

        Raises:
            PeerLostError: it ended by an error of its own, and so did the one before it there at
                the same version.
        """
        if self._cluster.deaths.is_repeated(peer, seat):
            self._cluster.raise_lost(
                peer, f"{cause} (as the one before it, with no version committed in between)"
            )
        if (watch := self._cluster.watches[peer]) not in self._counted:
            self._counted.add(watch)
            self._failures[seat] += 1
        return self._failures[seat]

    def build(self, actor: Any, index: int) -> Any:
        """Have a process build the models of a worker; return the call."""
        cluster, job = self._cluster, self._cluster.job
        return actor.build.remote(
            cluster.creator, index, job.devices_per_worker, job.seed, job.strategy.cut
        )

    def again(self, start: Start) -> Start | None:
        """Start another process if one could never run; Ray notices a node's death late."""
        if not any(never_ran(call) for call in start.building):
            return None
        actor = self._cluster.start_worker(start.index, start.seat)
        return self._start(start.index, start.seat, start.cause, actor, start.began)

    def _again(self, index: int, start: Start) -> bool:
        late = time.monotonic() - start.began > self._cluster.run_config.deadlines.start * 5
        if late or (other := self.again(start)) is None:
            return False
        self.starting[index] = other
        return True

    def _wait_for(self, index: int, start: Start) -> Start:
        """Return a starting process when it is up, or the one that was started after it."""
        while True:
            left = start.began + self._cluster.run_config.deadlines.start * 5 - time.monotonic()
            ray.wait(start.building, num_returns=2, timeout=max(left, 0.1))
            if not self._again(index, start):
                return start
            start = self.starting[index]

    def _join_if_up(self, index: int, start: Start) -> None:
        if len(ray.wait(start.building, num_returns=2, timeout=0)[0]) == 2 and not self._again(
            index, start
        ):
            self._join(index, start)

    def _join(self, index: int, start: Start) -> None:  # noqa: PLR0915 - one order of steps
        """Have a process that starts in the place of a worker join; raise what it raises."""
        cluster, peer, actor, cause = self._cluster, worker_peer(index), start.actor, start.cause
        job, run_config = cluster.job, cluster.run_config
        cluster.extend_deadline()
        cluster.lives[index] += 1
        old, life, before = cluster.places[peer], cluster.lives[index], cluster.actors[peer]
        cluster.actors[peer] = actor
        try:
            described, place = cluster.get(start.building, "build the model again", peer, peer)
            check_agreement(job.description, described, "the job", str(peer))
            if place.node != old.node:  # who shares a host with whom is another question now
                self.moved[index] = (actor, cause)
                del self.starting[index]
                cluster.lives[index] -= 1
                cluster.actors[peer] = before
                return
            states = self._states_of_the_others()
            mean = mean_states(states, [1.0] * len(states)) if states else None
            cluster.get(
                [actor.bind.remote(cluster.stored_job, cluster.chosen.gpu)], "bind the model again"
            )
            (address,) = cluster.get(
                [actor.open.remote(cluster.stored_job, [], None, life)], "open a worker again"
            )
            cluster.get([actor.take_state.remote(*cluster.plan, mean)], "take the others' state")
            cluster.get(
                [actor.connect.remote(cluster.ends, run_config.deadlines.start)],
                "connect a worker again",
            )
        except BaseException:
            del self.starting[index]
            ray.kill(actor, no_restart=True)
            cluster.actors[peer] = before
            raise
        del self.starting[index]
        cluster.watches[peer], cluster.places[peer] = actor.watch.remote(), place
        cluster.listening[index] = address
        self._joined.add(index)
        self._tell(self._living())
        if not self.starting:
            self._joined.clear()
        self.count += 1
        repeated = "the step is taken again" if job.strategy.rule.together else "the others went on"
        step, took = cluster.step + 1, time.monotonic() - start.began
        cluster.note(
            "replaced",
            f"{peer} on {old.host} (pid {old.pid}) died in step {step}: {cause}; pid {place.pid} has taken its place "
            f"after {took:.1f} s; {repeated}, no update and no sample is lost",
        )
        self.prepare_if_wanted()

    def _living(self) -> list[int]:
        cluster = self._cluster
        alive = [
            i
            for i in range(cluster.job.num_workers)
            if cluster.deaths.cause(worker_peer(i)) is None
        ]
        return [i for i in alive if self._silent.get(i) != cluster.lives[i]]

    def _states_of_the_others(self) -> list[Tensors]:
        """Return the buffers of all workers' replicas that have weights, without those that die.

        Where all contribute to each version, a successor that has joined is sent weights when no
        other is missing.
        """
        while True:
            begun = len(self.starting)
            workers = [index for index in self._living() if index not in self._joined]
            try:
                return all_states(partial(self._cluster.workers.call, workers=workers))
            except PeerLostError:
                self._notice(None, wait=False)
                if len(self.starting) == begun:
                    raise

    def _tell(self, workers: Collection[int]) -> None:
        """Have workers learn where all others listen; a worker that dies is replaced next."""
        cluster = self._cluster
        calls = {
            i: cluster.actors[worker_peer(i)].join.remote(cluster.stored_job, cluster.listening)
            for i in workers
        }
        for index, call in calls.items():
            try:
                cluster.get([call], "join again")
            except PeerLostError:
                peer = worker_peer(index)
                ray.wait([cluster.watches[peer]], timeout=_NOTICE_SECONDS)
                if cluster.deaths.cause(peer) is None:
                    raise
