"""Taking stock after deaths: which processes live, where they stand, and what they hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import ray

from steepest.config.strategies import StrategyConfig
from steepest.engine.survivors import RecoveredState, ServerState, assemble
from steepest.messages.message import Peer, worker_peer
from steepest.runtime.calls import has_answered
from steepest.runtime.diagnostics import update_error
from steepest.runtime.launch import Cluster
from steepest.runtime.signs_of_life import SignsOfLife
from steepest.state.job_state import JobState
from steepest.state.optimizer_state import OptimizerState
from steepest.state.snapshots import Snapshots
from steepest.state.stock import Stock

_WORD_SECONDS = 1.0  # that Ray's word on a death is waited for, because it names the cause
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 0.3  # for the answer of a process whose channel another process has seen closing


class StockTaking:
    """Asks the processes of a job what is left of it, once."""

    def __init__(
        self, cluster: Cluster, state: JobState, signs: SignsOfLife, snapshots: Snapshots
    ) -> None:
        self._cluster = cluster
        self._state = state
        self._signs = signs
        self._snapshots = snapshots
        self.has_begun = False  # whether the survivors were told to stop, and take no step any more
        self._stopped: RecoveredState | None = None  # where all stood when no holder was dead

    def find_dead(self, suspect: Peer | None, why: str) -> dict[Peer, str]:
        """Ask all processes for a sign of life; return the dead, and the cause of each death.

        A process is dead when Ray says so, when it does not answer and another process has seen
        its channel closing, and when it has given no sign of life for `heartbeat` seconds. One that
        computes with Python's lock held has `DeadlineConfig.step` seconds to answer.
        """
        cluster, began = self._cluster, time.monotonic()
        asked = {peer: actor.lost_peers.remote() for peer, actor in cluster.actors.items()}
        signs = self._signs
        closed: set[Peer] = set()
        if suspect is not None:  # otherwise processes close channels because they get other roles
            closed = {suspect} | self._processes_of(cluster.lost_peers())
        dead: dict[Peer, str] = {}
        while asked:
            for peer, ref in list(asked.items()):
                if (cause := cluster.deaths.cause(peer)) is not None:
                    dead[peer] = cause
                elif has_answered(ref):
                    if suspect is not None:
                        closed |= self._processes_of(ray.get(ref))
                    if peer != suspect:
                        del asked[peer]
                    continue
                else:
                    grace = _WORD_SECONDS if peer == suspect else _GRACE_SECONDS
                    gone = peer in closed and time.monotonic() - began >= grace
                    late = time.monotonic() - began >= cluster.run_config.deadlines.step
                    actor = cluster.actors[peer]
                    if not (gone or late or signs.is_silent(actor)):
                        continue
                    cause = why if peer == suspect else "its channels closed"
                    cause = cause if gone else cluster.silence_of(peer, signs.silence(actor))
                    dead[peer] = cluster.deaths.declare(peer, cause)
                del asked[peer]
            if suspect in asked and time.monotonic() - began >= _WORD_SECONDS:
                # its router ended a channel although the process answers
                del asked[suspect]
                dead[suspect] = cluster.deaths.declare(suspect, why)
            if asked:
                signs.look(cluster.living())
                self._await_any(asked.values())
        return dead

    def _processes_of(self, peers: Iterable[Peer]) -> set[Peer]:
        """Return the processes in which some roles live; not those of clients and collectives."""
        roles = ("worker", "server", "coordinator")
        return {self._cluster.process_of(peer) for peer in peers if peer.role in roles}

    def standing(self, dead: Collection[Peer], config: StrategyConfig) -> RecoveredState | None:
        """Stop the survivors; return where the state of all chunks is, or None if a copy has to serve."""
        cluster, job = self._cluster, self._cluster.job
        role = "worker" if job.servers_in_workers else "server"
        cluster.extend_deadline()
        whole = cluster.client.torn is None and not any(peer.role == role for peer in dead)
        if self._stopped is None and whole:
            self._stopped = self._state.stopped(config)
        self.has_begun = True
        cluster.disconnect()
        alive = {peer: actor for peer, actor in cluster.actors.items() if peer not in dead}
        workers = {peer: actor for peer, actor in alive.items() if peer.role == "worker"}
        stopping = [actor.give_up.remote() for actor in workers.values()]
        cluster.get(stopping, "stop", workers, after_step=True)
        cluster.extend_deadline()
        holding = [actor for peer, actor in alive.items() if peer.role == role]
        return self._stopped or self._salvage(holding)

    def take(self, dead: Mapping[Peer, str], standing: RecoveredState | None) -> Stock:
        """Return everything with which the job continues."""
        cluster, torn = self._cluster, self._cluster.client.torn
        copy = self._snapshots.taken if standing is None else self._state.copy(standing)
        if copy is None and torn is not None:
            raise update_error(torn, cluster.places, None)
        if copy is None:
            peer, cause = next(iter(dead.items()))
            cluster.deaths.raise_lost(
                peer, f"{cause}; too many died together: of some chunks no copy is left"
            )
        if standing is None:
            return Stock.from_copy(copy)
        workers = {
            peer.index: actor
            for peer, actor in cluster.actors.items()
            if peer.role == "worker" and peer not in dead
        }

        def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            calls = [
                actor.call.remote((0, -1), 0, function, *arguments) for actor in workers.values()
            ]
            return cluster.get(calls, "tell its state", map(worker_peer, workers))

        optimizer = OptimizerState.collect(cluster, copy.found, workers, copy.step, call)
        return self._state.stock(copy, optimizer)

    def _await_any(self, calls: Iterable[Any]) -> None:
        """Return when a call that has not answered does, or a moment later."""
        waiting = [call for call in calls if not has_answered(call)]
        if waiting:
            ray.wait(waiting, timeout=_POLL_SECONDS)
        self._cluster.owner.attend(0.0 if waiting else _POLL_SECONDS)

    def _salvage(self, holding: list[Any]) -> RecoveredState | None:
        """Return all servers' state at one version, in the processes that hold chunks; None if a chunk is lost."""
        cluster = self._cluster
        if cluster.job.replication == 1 or not holding:
            return None
        names = cluster.names(holding)
        hearing = [actor.heard.remote() for actor in holding]
        heard = ray.put(cluster.get(hearing, "say what it has heard", names))
        parts: list[ServerState] = cluster.get(
            [actor.state_of.remote(heard) for actor in holding], "catch up", names
        )
        return assemble(len(cluster.job.holders), dict(zip(holding, parts, strict=True)))
