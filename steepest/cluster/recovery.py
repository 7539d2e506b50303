"""Recovery: when a process dies that held chunks of which there are copies, nothing is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray

from steepest.cluster import remote_functions
from steepest.cluster.diagnostics import has_answered, never_ran
from steepest.cluster.job_state import JobState
from steepest.cluster.launch import Cluster
from steepest.cluster.optimizer_state import OptimizerState
from steepest.cluster.process import by_calls
from steepest.config.strategies import (
    LocalStrategy,
    ParameterServerStrategy,
    SimpleStrategy,
    StrategyConfig,
)
from steepest.engine.client import Snapshot
from steepest.engine.job import check_agreement
from steepest.engine.replicas import all_states
from steepest.engine.survivors import RecoveredState, ServerState, assemble
from steepest.messages.message import Peer, worker_peer
from steepest.tensors.dtypes import Tensors

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
        self._busy = False
        self._taking: Future[Snapshot] | None = None
        self._taken: Snapshot | None = None  # the last copy of everything
        self._fewer: tuple[StrategyConfig, StrategyConfig] | None = (
            None  # with the servers that are left, and with all
        )

    # -- copies in the driver --------------------------------------------------------------------

    def remember(self) -> None:
        """Take a copy of weights and optimizer state, if one is due, without waiting for it."""
        every, client = self._cluster.run_config.failure.snapshot_every, self._cluster.client
        if every is None or isinstance(self._cluster.job.config, SimpleStrategy):
            return
        if self._taking is not None:
            if self._taking.done():
                if self._taking.exception() is None:
                    self._taken = self._taking.result()
                self._taking = None
        elif self._taken is None or client.position.version - self._taken.version >= every:
            self._taking = self._cluster.on_router(lambda: client.read("state"))

    def forget(self) -> None:
        """Drop the copy: it is of another job, or of weights that were replaced."""
        self._taking = self._taken = None

    # -- deaths ------------------------------------------------------------------------------------

    def can_replace(self, process: Peer) -> bool:
        """Return whether what a process held can be found again."""
        cluster = self._cluster
        job = cluster.job
        kept = job.replication > 1 or self._taken is not None
        only_works = process.role == "worker" and not job.servers_in_workers
        return cluster.run_config.failure.max_failures > 0 and (kept or only_works)

    def look(self) -> None:
        """Recover if a process has died that only a recovery can replace."""
        if (loss := self.loss()) is not None:
            self.recover(*loss)

    def loss(self) -> tuple[Peer, str] | None:
        """Return a dead process that only a recovery can replace, and why; None without one."""
        cluster = self._cluster
        if self._busy:
            return None
        for index, (_, why) in cluster.successors.moved.items():
            return worker_peer(index), why
        for peer in cluster.watches:
            if peer.role == "worker" and cluster.job.workers_are_replaced:
                continue
            if self.can_replace(peer) and (cause := cluster.deaths.cause(peer)) is not None:
                return peer, cause
        return None

    def recover(self, suspect: Peer, why: str) -> None:
        """Replace every process that is dead; training continues from the last committed update.

        Args:
            suspect: the role that is said to be dead.
            why: in words.

        Raises:
            PeerLostError: there are no copies of what it held, or it died too often.
        """
        cluster, began = self._cluster, time.monotonic()
        process = cluster.process_of(suspect)
        if not self.can_replace(process) or self._busy:
            cluster.lost(suspect, why)
        self._busy = True
        try:
            dead = self._find_dead(process, why)
            left_out = self._count(dead)
            before = cluster.client.position.version
            added = self._start(dead, fewer=bool(left_out))
            self._rebuild(dead, added)
            lost = max(before - cluster.client.position.version, 0)
        finally:
            self._busy = False
        self._taking = None  # its reader is gone
        what = (
            f"{lost} updates since the last copy are lost, and made again"
            if lost
            else "no update and no sample is lost"
        )
        who = ", ".join(f"{peer} ({cause})" for peer, cause in dead.items())
        step, job = cluster.step + 1, cluster.job
        took = f"training stopped for {time.monotonic() - began:.2f} s"
        if added is not None:
            self.count += len(dead)
        if added:
            cluster.note(
                "recovered",
                f"{who} died; others took over what they held at step {step}, {what}; {took}",
            )
            return
        left = (
            f"{job.num_workers} workers"
            if added is None
            else f"{job.num_servers} servers, which took over"
        )
        then = cluster.placement.leave_out(left_out)
        cluster.note(
            "left", f"{who} died; going on with {left}, from step {step} on; {then}; {what}; {took}"
        )

    def missing(self) -> StrategyConfig | None:
        """Return the strategy with all its servers, while the job continues with fewer."""
        if self._fewer is not None and self._cluster.job.config != self._fewer[0]:
            self._fewer = None  # they are there, or somebody wants something else
        return None if self._fewer is None else self._fewer[1]

    def _find_dead(self, suspect: Peer, why: str) -> dict[Peer, str]:
        """Return every process that is dead, or gives no sign of life, and why."""
        cluster = self._cluster
        ray.wait(
            [cluster.watches[suspect]],
            timeout=min(cluster.run_config.failure.heartbeat, _NOTICE_SECONDS),
        )
        dead = {
            peer: cause
            for peer in cluster.watches
            if (cause := cluster.deaths.cause(peer)) is not None
        }
        asked = {
            peer: actor.alive.remote() for peer, actor in cluster.actors.items() if peer not in dead
        }
        wait = max(cluster.run_config.failure.heartbeat, _NOTICE_SECONDS)
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=wait)
        for peer, ref in asked.items():
            if not has_answered(ref):
                dead[peer] = cluster.deaths.declare(peer, f"no sign of life for {wait:g} s")
        if suspect not in dead:
            dead[suspect] = cluster.deaths.declare(suspect, why)
        return dead

    def _count(self, dead: dict[Peer, str]) -> list[int]:
        """Count deaths; return the seats of workers that died too often and are dispensable."""
        cluster, allowed = self._cluster, self._cluster.run_config.failure.max_failures
        left_out = []
        for peer, cause in dead.items():
            seat = cluster.placement.order[peer.index] if peer.role == "worker" else -1 - peer.index
            if cluster.successors.count_failure(peer, seat, cause) > allowed:
                if not self._can_go_on(dead):
                    often = f"it was replaced {allowed} times, FailureConfig(max_failures={allowed}) allows no more"
                    cluster.raise_lost(peer, f"{cause} ({often})")
                left_out.append(seat)
        return left_out

    def _can_go_on(self, dead: dict[Peer, str]) -> bool:
        """Return whether the others can do without dead processes.

        Workers that die together with a server are waited for.
        """
        cluster = self._cluster
        left = cluster.job.num_workers - len(dead)
        if by_calls(cluster.job.config) and not cluster.job.strategy.in_driver:
            return False  # its servers would start anew for it, which takes as long as a worker
        return all(peer.role == "worker" for peer in dead) and left >= max(
            2, cluster.successors.least
        )

    def _rebuild(self, dead: dict[Peer, str], added: dict[Peer, Any] | None) -> None:  # noqa: PLR0915 - one order
        """Give living and added processes their roles anew, and the state that was found."""
        cluster, job = self._cluster, self._cluster.job
        role = (
            "worker" if job.strategy.in_workers else "server"
        )  # of the processes that hold chunks
        cluster.extend_deadline()
        try:
            found: RecoveredState | None = None
            if not any(peer.role == role for peer in dead):
                found = self._state.stopped()
            cluster.disconnect()
            alive = {peer: actor for peer, actor in cluster.actors.items() if peer not in dead}
            workers = {peer.index: actor for peer, actor in alive.items() if peer.role == "worker"}
            cluster.get([actor.give_up.remote() for actor in workers.values()], "stop")
            found = found or self._salvage(
                [actor for p, actor in alive.items() if p.role == role], dead
            )

            def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
                calls = [
                    actor.call.remote((0, -1), 0, function, *arguments)
                    for actor in workers.values()
                ]
                return cluster.get(calls, "tell its state")

            step = job.step_of(found.version)
            if added is None:
                keep = dict(enumerate(workers))
                optimizer = OptimizerState.collect(cluster, found, keep, step, call)
                self._state.form(job.config, found, optimizer, Tensors(), len(keep), keep, {})
                return
            left_out = (
                dict(zip(workers, call(remote_functions.left_out), strict=True))
                if job.compresses
                else {}
            )
            left_out = (
                {index: left_out.get(index, {}) for index in range(job.num_workers)}
                if left_out
                else {}
            )
            local = isinstance(job.config, LocalStrategy)
            inner = (
                dict(zip(workers, call(remote_functions.inner_state, step), strict=True))
                if local
                else {}
            )
            builds = [
                cluster.successors.build(actor, peer.index)
                for peer, actor in added.items()
                if peer.role == "worker"
            ]
            for described in cluster.get(builds, "build the model again"):
                check_agreement(job.description, described, "the job", "a successor")
            buffers = all_states(call)
            for peer in dead:
                if peer.role == "worker":
                    cluster.lives[peer.index] += 1
            plan, part = cluster.plan, self._state.part()
            same = {i: i for i in range(job.num_workers)}
            config = job.config if added or self._fewer is None else self._fewer[0]
            cluster.reform(
                config, step, same, added, job.num_workers, held=found.holders, dead=dead
            )
        except BaseException:
            for actor in (added or {}).values():
                ray.kill(actor, no_restart=True)
            raise
        cluster.plan = plan
        self._state.put_back(found, part, left_out, inner, buffers, list(added))

    def _start(self, dead: dict[Peer, str], *, fewer: bool) -> dict[Peer, Any] | None:
        """Start processes in place of the dead; spare ones are taken first.

        Returns:
            None if the other workers continue meanwhile; no process if the other servers do.
        """
        cluster, successors = self._cluster, self._cluster.successors
        starting = successors.starting  # each holds the place that another would wait for
        successors.give_up_on([index for index in starting if worker_peer(index) in dead])
        moved = {worker_peer(index) for index in successors.moved}
        spares = {
            peer: successors.spare(cluster.places[peer].node) for peer in dead if peer not in moved
        }
        waits = cluster.run_config.failure.patience > 0 or None not in spares.values()
        if fewer or (not waits and not moved and self._can_go_on(dead)):
            successors.follow(
                {peer.index: (cause, spares.get(peer)) for peer, cause in dead.items()}
            )
            return None
        added: dict[Peer, Any] = {}
        if not waits and not any(spares.values()) and self._does_with_fewer_servers(dead):
            return added
        for peer in dead:
            if peer in moved:
                added[peer] = successors.moved.pop(peer.index)[0]
                continue
            start = cluster.start_worker if peer.role == "worker" else cluster.start_server
            added[peer] = spares[peer] or start(peer.index)
        deadline = time.monotonic() + cluster.run_config.deadlines.start * 5
        for peer in added:
            while time.monotonic() < deadline:
                placed = added[peer].place.remote()
                ray.wait([placed], timeout=max(deadline - time.monotonic(), 0.1))
                if not never_ran(placed):
                    break
                added[peer] = (
                    cluster.start_worker if peer.role == "worker" else cluster.start_server
                )(peer.index)
        return added

    def _does_with_fewer_servers(self, dead: dict[Peer, str]) -> bool:
        """Return whether the other servers do; the strategy then has fewer until there are more."""
        config = self._cluster.job.config
        left = self._cluster.job.num_servers - len(dead)
        if by_calls(config) or left < 1 or any(peer.role != "server" for peer in dead):
            return False
        if not isinstance(config, (ParameterServerStrategy, LocalStrategy)):
            return False
        fewer = replace(config, num_servers=left, replication=min(config.replication, left))
        self._fewer = fewer, self.missing() or config
        return True

    def _salvage(self, holding: list[Any], dead: dict[Peer, str]) -> RecoveredState:
        """Return all servers' state at one version, or the last copy of it."""
        cluster = self._cluster
        found = None
        if cluster.job.replication > 1 and holding:
            told = ray.put(
                cluster.get([actor.heard.remote() for actor in holding], "say what it has heard")
            )
            parts: list[ServerState] = cluster.get(
                [actor.state_of.remote(told) for actor in holding], "catch up"
            )
            found = assemble(len(cluster.job.holders), dict(zip(holding, parts, strict=True)))
        if found is None and self._taken is not None:
            copy = self._taken
            found = RecoveredState(copy.version, copy.state, None, copy.weights, copy.records)
        if found is None:
            peer, cause = next(iter(dead.items()))
            cluster.raise_lost(
                peer, f"{cause}; too many died together: of some chunks no copy is left"
            )
        return found
