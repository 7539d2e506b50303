"""Recovery: when a process dies that held chunks of which there are copies, nothing is lost."""

from __future__ import annotations

import logging
import time
from collections import Counter
from concurrent.futures import Future
from typing import Any

import ray

from steepest.client import Snapshot
from steepest.comm.message import Peer, worker_peer
from steepest.config import LocalStrategy, SimpleStrategy
from steepest.job import check_agreement
from steepest.runtime import tasks
from steepest.runtime.launch import Cluster
from steepest.runtime.state import JobState
from steepest.runtime.supervision import cause_of_death, has_answered, never_ran
from steepest.salvage import Remains, Salvage, assemble

log = logging.getLogger(__name__)
_NOTICE_SECONDS = 5.0


class Recovery:
    """Puts a job together again from what its living processes hold.

    Args:
        cluster: the job's processes.
        state: of the job.

    Attributes:
        count: processes that were replaced in this way.
    """

    def __init__(self, cluster: Cluster, state: JobState) -> None:
        self.count = 0
        self._cluster = cluster
        self._state = state
        self._deaths: Counter[Peer] = Counter()
        self._busy = False
        self._taking: Future[Snapshot] | None = None
        self._taken: Snapshot | None = None  # the last copy of everything

    # -- copies in the driver --------------------------------------------------------------------

    def remember(self) -> None:
        """Takes a copy of weights and optimizer state, if one is due, without waiting for it."""
        every, client = self._cluster.settings.snapshot_every, self._cluster.client
        if every is None or isinstance(self._cluster.job.config, (LocalStrategy, SimpleStrategy)):
            return
        if self._taking is not None:
            if self._taking.done():
                if self._taking.exception() is None:
                    self._taken = self._taking.result()
                self._taking = None
        elif self._taken is None or client.position.version - self._taken.version >= every:
            self._taking = self._cluster.on_router(lambda: client.read("state"))

    def forget(self) -> None:
        """The job is another one, or its weights were set: the copy is of no use."""
        self._taking = self._taken = None

    # -- deaths ------------------------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        """Whether what a process held can be found again."""
        cluster = self._cluster
        kept = cluster.job.replication > 1 or self._taken is not None or bool(cluster.successors.moved)
        return cluster.settings.max_failures > 0 and kept

    def look(self) -> None:
        """Recovers if a process has died that only this can replace."""
        if (loss := self.loss()) is not None:
            self.recover(*loss)

    def loss(self) -> tuple[Peer, str] | None:
        """Who has died that held chunks of which there are copies, and why."""
        cluster = self._cluster
        if self._busy or not self.possible:
            return None
        for index, (_, cause) in cluster.successors.moved.items():
            return worker_peer(index), cause
        role = self._role
        found = [(p, cause_of_death(watch)) for p, watch in cluster.watches.items() if p.role == role]
        return next(((peer, cause) for peer, cause in found if cause is not None), None)

    @property
    def _role(self) -> str:
        """Of the processes that hold chunks."""
        return "worker" if self._cluster.job.strategy.in_workers else "server"

    def recover(self, suspect: Peer, why: str) -> None:
        """Replaces every process that is dead; training goes on from the last committed update.

        Args:
            suspect: who is said to be gone.
            why: in words.

        Raises:
            PeerLostError: there are no copies of what it held, or it died too often.
        """
        cluster, began = self._cluster, time.monotonic()
        process = cluster.process_of(suspect)
        if not self.possible or self._busy:
            cluster.lost(suspect, why)
        self._busy = True
        try:
            dead = self._find_dead(process, why)
            self._count(dead)
            before = cluster.client.position.version
            self._rebuild(dead)
            lost = max(before - cluster.client.position.version, 0)
        finally:
            self._busy = False
        self.count += len(dead)
        self._taking = None  # its reader is gone
        what = (
            f"{lost} updates since the last copy are lost, and made again"
            if lost
            else "no update and no sample is lost"
        )
        who = ", ".join(f"{peer} ({cause})" for peer, cause in dead.items())
        log.warning(
            "%s died; copies of what they held took over at step %d, %s; %.1f s",
            who, cluster.client.position.version // cluster.job.versions_per_step + 1, what, time.monotonic() - began,
        )  # fmt: skip

    def _find_dead(self, suspect: Peer, why: str) -> dict[Peer, str]:
        """Everybody who is gone, or gives no sign of life, and why."""
        cluster = self._cluster
        ray.wait([cluster.watches[suspect]], timeout=min(cluster.settings.heartbeat, _NOTICE_SECONDS))
        dead = {peer: cause for peer, watch in cluster.watches.items() if (cause := cause_of_death(watch)) is not None}
        asked = {peer: actor.alive.remote() for peer, actor in cluster.actors.items() if peer not in dead}
        wait = max(cluster.settings.heartbeat, _NOTICE_SECONDS)
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=wait)
        for peer, ref in asked.items():
            if not has_answered(ref):
                dead[peer] = cause_of_death(cluster.watches[peer]) or f"no sign of life for {wait:g} s"
        dead.setdefault(suspect, why)
        for peer in dead:
            if cause_of_death(cluster.watches[peer]) is None:  # it may live, out of reach
                cluster.successors.kill(peer)
        return dead

    def _count(self, dead: dict[Peer, str]) -> None:
        allowed = self._cluster.settings.max_failures
        for peer, cause in dead.items():
            self._deaths[peer] += 1
            if self._deaths[peer] > allowed:
                often = f"it was replaced {allowed} times, RunSettings(max_failures={allowed}) allows no more"
                self._cluster.raise_lost(peer, f"{cause} ({often})")

    def _rebuild(self, dead: dict[Peer, str]) -> None:
        cluster, job = self._cluster, self._cluster.job
        cluster.extend_deadline()
        added = self._start(dead)
        try:
            found = None
            if not any(peer.role == self._role for peer in dead):
                found = self._state.stopped()
            cluster.disconnect()
            alive = {peer: actor for peer, actor in cluster.actors.items() if peer not in dead}
            workers = {peer.index: actor for peer, actor in alive.items() if peer.role == "worker"}
            cluster.get([actor.give_up.remote() for actor in workers.values()], "stop")
            found = found or self._salvage(alive, dead)
            own = self._left_out(workers)
            builds = [added[peer].build.remote(*self._build(peer)) for peer in added if peer.role == "worker"]
            for described in cluster.get(builds, "build the model again"):
                check_agreement(job.description, described, "the job", "a successor")
            buffers = cluster.get([a.call.remote((0, -1), 0, tasks.states) for a in workers.values()], "tell its state")
            for peer in dead:
                if peer.role == "worker":
                    cluster.lives[peer.index] += 1
            plan = cluster.plan
            step = found.version // job.versions_per_step
            cluster.reform(job.config, step, range(job.num_workers), added, job.num_workers)
        except BaseException:
            for actor in added.values():
                ray.kill(actor, no_restart=True)
            raise
        cluster.plan = plan
        self._state.put_back(found, own, [state for part in buffers for state in part], list(added))

    def _build(self, peer: Peer) -> tuple[Any, ...]:
        job = self._cluster.job
        return self._cluster.creator, peer.index, job.devices_per_worker, job.seed, job.strategy.cut

    def _start(self, dead: dict[Peer, str]) -> dict[Peer, Any]:
        """Processes in place of the dead, spare ones where there are any."""
        cluster = self._cluster
        starting = cluster.successors.starting  # each holds the place that another would wait for
        cluster.successors.give_up_on([index for index in starting if worker_peer(index) in dead])
        added = {}
        for peer in dead:
            if peer.role == "worker" and peer.index in cluster.successors.moved:
                added[peer] = cluster.successors.moved.pop(peer.index)[0]
                continue
            start = cluster.start_worker if peer.role == "worker" else cluster.start_server
            added[peer] = cluster.successors.spare(cluster.places[peer].node) or start(peer.index)
        deadline = time.monotonic() + cluster.settings.start_timeout * 5
        for peer in added:
            while time.monotonic() < deadline:
                placed = added[peer].place.remote()
                ray.wait([placed], timeout=max(deadline - time.monotonic(), 0.1))
                if not never_ran(placed):
                    break
                added[peer] = (cluster.start_worker if peer.role == "worker" else cluster.start_server)(peer.index)
        return added

    def _salvage(self, alive: dict[Peer, Any], dead: dict[Peer, str]) -> Salvage:
        """All servers' state at one version."""
        cluster = self._cluster
        holding = {peer.index: actor for peer, actor in alive.items() if peer.role == self._role}
        found = None
        if cluster.job.replication > 1 and holding:
            heard = cluster.get([actor.heard.remote() for actor in holding.values()], "say what it has heard")
            told = ray.put(heard)
            parts: list[Remains] = cluster.get([a.remains.remote(told) for a in holding.values()], "tell its state")
            found = assemble(cluster.job.description.layout, dict(zip(holding, parts, strict=True)))
        if found is None and self._taken is not None:
            copy = self._taken
            found = Salvage(copy.version, copy.weights, copy.records, copy.state)
        if found is None:
            peer, cause = next(iter(dead.items()))
            cluster.raise_lost(peer, f"{cause}; too many died together: of some chunks no copy is left")
        return found

    def _left_out(self, workers: dict[int, Any]) -> dict[int, dict[str, Any]]:
        """What compression has left out of each living worker's gradients."""
        if not self._cluster.job.compresses:
            return {}
        calls = [actor.call.remote((0, -1), 0, tasks.left_out) for actor in workers.values()]
        told = dict(zip(workers, self._cluster.get(calls, "tell its state"), strict=True))
        return {index: told.get(index, {}) for index in range(self._cluster.job.num_workers)}
