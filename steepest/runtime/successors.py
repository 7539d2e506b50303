"""Successors: another process takes the place of a worker that died; spare ones are kept ready for it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from steepest.comm.message import Message, Peer, server_peer, worker_peer
from steepest.job import check_agreement
from steepest.replicas import mean_states
from steepest.runtime import tasks
from steepest.runtime.process import Place
from steepest.runtime.supervision import cause_of_death, never_ran

if TYPE_CHECKING:
    from steepest.runtime.launch import Cluster

log = logging.getLogger(__name__)

_NOTICE_SECONDS = 5.0  # that Ray takes, at most, to see that a process is gone
_TRY_SECONDS = 0.02
_SPARE_AFTER_SECONDS = 20.0  # of training, before a spare process is worth its memory


@dataclass(frozen=True)
class _Start:
    """A process that starts in a dead worker's place: why, since when, and the calls that end when it is up."""

    cause: str
    began: float
    actor: Any
    building: list[Any]


class Successors:
    """Watches over a job's workers, and replaces those that are gone.

    Args:
        cluster: the job's processes.

    Attributes:
        count: how many workers were replaced.
        starting: processes on their way to be workers, by index.
        moved: those that have come up on another node than their predecessor, for a recovery; and why that died.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.count = 0
        self._cluster = cluster
        self._spares: list[tuple[Any, Any]] = []  # actors, and the call that says where they are
        self._mending = False
        self.starting: dict[int, _Start] = {}
        self.moved: dict[int, tuple[Any, str]] = {}
        self._tried = 0.0  # when it was last looked whether they are up
        self._pings: dict[Peer, tuple[Any, float]] = {}  # unanswered: the call, and since when
        self._looked = 0.0
        self._given_up: list[Place] = []
        self._silent: dict[int, int] = {}  # workers, and their lives, that did not answer

    # -- spare processes -----------------------------------------------------------------------

    def prepare(self, trained: float) -> None:
        """Starts spare processes, if some are wanted by now."""
        settings = self._cluster.settings
        wanted = settings.spares
        if wanted is None:
            wanted = 1 if trained >= _SPARE_AFTER_SECONDS else 0
        if not self._cluster.job.workers_are_replaced or not settings.max_failures or self._cluster.gpu:
            return  # a GPU is Ray's to give, when it is needed
        for number in range(len(self._spares), wanted):
            actor = self._cluster.start_process("spare", number, 0, 0, 1, settings.cpus_per_worker)
            actor.prepare.remote(self._cluster.creator)
            self._spares.append((actor, actor.place.remote()))

    def spare(self, node: str) -> Any | None:
        """A spare process on a node that is up, if there is one."""
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

    def end(self) -> None:
        """Ends the spare processes, and those that are starting."""
        for actor in [*(actor for actor, _ in self._spares), *(start.actor for start in self.starting.values())]:
            ray.kill(actor, no_restart=True)
        self._spares.clear()
        self.starting.clear()

    # -- silence -------------------------------------------------------------------------------

    def look(self, trained: float) -> None:
        """Asks every worker for a sign of life, gives up who has not answered for too long, and starts spares.

        Args:
            trained: seconds of training so far.
        """
        self.prepare(trained)
        cluster, now = self._cluster, time.monotonic()
        limit = cluster.settings.heartbeat
        recoverable = cluster.recovery is not None and cluster.recovery.possible
        replaced = cluster.job.workers_are_replaced
        watched = [peer for peer in cluster.actors if recoverable or (peer.role == "worker" and replaced)]
        if not watched or now - self._looked < limit / 6:
            return
        self._looked = now
        if self._pings:
            refs = [ref for ref, _ in self._pings.values()]
            answered = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
            self._pings = {peer: ping for peer, ping in self._pings.items() if ping[0] not in answered}
        for peer, (_, since) in self._pings.items():
            if now - since >= limit and peer in watched and cluster.places[peer] not in self._given_up:
                self._give_up(peer, f"no sign of life for {now - since:.1f} s")
        for peer in watched:
            if peer not in self._pings and cause_of_death(cluster.watches[peer]) is None:
                self._pings[peer] = (cluster.actors[peer].alive.remote(), now)

    def _give_up(self, peer: Peer, why: str) -> None:
        cluster, life = self._cluster, self._cluster.lives[peer.index]
        self._given_up.append(cluster.places[peer])
        if peer.role == "worker" and cluster.job.workers_are_replaced:
            self._silent[peer.index] = life
            cluster.on_router(lambda: cluster.client.declare_lost(peer.index, life, why))
        else:  # the process of a server
            cluster.on_router(lambda: cluster.client.lost(server_peer(peer.index), why))
        self.kill(peer)

    def kill(self, peer: Peer) -> None:
        """Nothing that it still says may count; it may be stopped, or out of reach."""
        place = self._cluster.places[peer]
        if place.node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(ProcessLookupError, PermissionError):  # Ray's word reaches no stopped process
                os.kill(place.pid, signal.SIGKILL)
        ray.kill(self._cluster.actors[peer], no_restart=True)

    def give_up_on(self, workers: Collection[int]) -> None:
        """Nobody will take the place of these."""
        for index in workers:
            ray.kill(self.starting.pop(index).actor, no_restart=True)

    def is_due(self) -> bool:
        """Whether it is time to look again at processes that are starting."""
        return bool(self.starting) and time.monotonic() - self._tried >= _TRY_SECONDS

    # -- successors ----------------------------------------------------------------------------

    def mend(self, left: Message | None = None, *, wait: bool = True) -> None:
        """Gives workers that died a successor each, where that can be; training goes on when they have joined.

        Args:
            left: the coordinator's word that one is gone.
            wait: until they have joined; otherwise their processes begin to start, and those that are up join.

        Raises:
            PeerLostError: it cannot be, or not again. Whatever its successor raises when it is made.
        """
        cluster = self._cluster
        if self._mending or not cluster.job.workers_are_replaced:
            return
        self._tried = time.monotonic()
        said = left.values() if left is not None else {}
        for index in range(cluster.job.num_workers):
            peer = worker_peer(index)
            suspected = said.get("worker") == index and said["life"] == cluster.lives[index]
            silent = self._silent.get(index) == cluster.lives[index]
            if suspected and not silent:
                ray.wait([cluster.watches[peer]], timeout=_NOTICE_SECONDS)
            cause = cause_of_death(cluster.watches[peer])
            if suspected and (silent or cause is None):
                if cause is None:  # it may live, out of reach
                    self.kill(peer)
                cause = str(said["why"])
            if cause is not None and index not in self.starting and index not in self.moved:
                self._begin(index, cause)
        self._mending = True  # what follows calls the others
        try:
            for index, start in list(self.starting.items()):
                if wait:
                    start = self._wait_for(index, start)
                if len(ray.wait(start.building, num_returns=2, timeout=0)[0]) == 2 and not self._again(index, start):
                    del self.starting[index]
                    self._join(index, start)
        finally:
            self._mending = False

    def _begin(self, index: int, cause: str) -> None:
        """Another process starts, to take the place of a worker that is dead."""
        cluster, peer = self._cluster, worker_peer(index)
        allowed = cluster.settings.max_failures
        if cluster.lives[index] >= allowed:
            many = f"it had {cluster.lives[index]} successors, RunSettings(max_failures={allowed}) gives it no more"
            cluster.raise_lost(peer, f"{cause} ({many})")
        self._pings.pop(peer, None)
        actor = self.spare(cluster.places[peer].node) or cluster.start_worker(index)
        self.starting[index] = self._start(index, cause, actor, time.monotonic())

    def _start(self, index: int, cause: str, actor: Any, began: float) -> _Start:
        cluster, job = self._cluster, self._cluster.job
        build = actor.build.remote(cluster.creator, index, job.devices_per_worker, job.seed, job.strategy.cut)
        return _Start(cause, began, actor, [build, actor.place.remote()])

    def _again(self, index: int, start: _Start) -> bool:
        """Starts another process if that one never was: Ray takes a while to see that a node is dead."""
        late = time.monotonic() - start.began > self._cluster.settings.start_timeout * 5
        if late or not never_ran(start.building[1]):
            return False
        self.starting[index] = self._start(index, start.cause, self._cluster.start_worker(index), start.began)
        return True

    def _wait_for(self, index: int, start: _Start) -> _Start:
        """Returns when it is up, or the one that was started after it."""
        while True:
            left = start.began + self._cluster.settings.start_timeout * 5 - time.monotonic()
            ray.wait(start.building, num_returns=2, timeout=max(left, 0.1))
            if not self._again(index, start):
                return start
            start = self.starting[index]

    def _join(self, index: int, start: _Start) -> None:
        """The process that starts in the place of a worker takes part."""
        cluster, peer, actor, cause = self._cluster, worker_peer(index), start.actor, start.cause
        job, settings = cluster.job, cluster.settings
        cluster.extend_deadline()
        cluster.lives[index] += 1
        old, life, before = cluster.places[peer], cluster.lives[index], cluster.actors[peer]
        cluster.actors[peer] = actor
        try:
            described, place = cluster.get(start.building, "build the model again", peer, peer)
            check_agreement(job.description, described, "the job", str(peer))
            if place.node != old.node:  # who shares a host with whom is another question now
                self.moved[index] = (actor, cause)
                cluster.lives[index] -= 1
                cluster.actors[peer] = before
                return
            alive = [i for i in range(job.num_workers) if cause_of_death(cluster.watches[worker_peer(i)]) is None]
            alive = [i for i in alive if self._silent.get(i) != cluster.lives[i]]
            states = [state for part in cluster.call_workers(tasks.states, workers=alive) for state in part]
            mean = mean_states(states, [1.0] * len(states)) if states else None
            cluster.get([actor.bind.remote(cluster.stored_job, cluster.gpu)], "bind the model again")
            (address,) = cluster.get([actor.open.remote(cluster.stored_job, [], None, life)], "open a worker again")
            cluster.get([actor.take_state.remote(*cluster.plan, mean)], "take the others' state")
            cluster.get([actor.connect.remote(cluster.ends, settings.start_timeout)], "connect a worker again")
        except BaseException:
            ray.kill(actor, no_restart=True)
            cluster.actors[peer] = before
            raise
        cluster.watches[peer], cluster.places[peer] = actor.watch.remote(), place
        cluster.listening[index] = address
        joining = [cluster.actors[worker_peer(i)] for i in (*alive, index)]
        cluster.get([each.join.remote(cluster.stored_job, cluster.listening) for each in joining], "join again")
        self.count += 1
        repeated = "the step is taken again" if job.strategy.rule.together else "the others went on"
        log.warning(
            "%s on %s (pid %d) died in step %d: %s; pid %d has taken its place after %.1f s; %s, no update and no "
            "sample is lost",
            peer, old.host, old.pid, cluster.client.position.version // job.versions_per_step + 1, cause, place.pid,
            time.monotonic() - start.began, repeated,
        )  # fmt: skip
        self.prepare(_SPARE_AFTER_SECONDS if settings.spares is None else 0.0)
