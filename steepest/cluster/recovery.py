"""Recovery: the processes that survive a death continue the job, from what they hold or from the driver's copy."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from steepest.cluster.diagnostics import has_answered, never_ran
from steepest.cluster.job_state import JobState
from steepest.cluster.launch import Cluster
from steepest.cluster.locations import by_calls
from steepest.cluster.membership import Membership
from steepest.cluster.optimizer_state import OptimizerState
from steepest.cluster.snapshots import Snapshots
from steepest.cluster.stock import Stock
from steepest.config.strategies import (
    LocalStrategy,
    ParameterServerStrategy,
    StrategyConfig,
)
from steepest.elastic.decision import Impossible, Target, Transition, World, decide
from steepest.engine.job import check_agreement
from steepest.engine.survivors import RecoveredState, ServerState, assemble
from steepest.errors import DeadlineError, PeerLostError
from steepest.messages.message import Peer, worker_peer

log = logging.getLogger(__name__)
_WORD_SECONDS = 1.0  # that Ray's word on a death is waited for, because it names the cause
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 0.3  # for the answer of a process whose channel another process has seen closing


class Recovery:
    """Puts a job together again after deaths, as `steepest.elastic.decision.decide` says.

    Args:
        cluster: the job's processes.
        state: of the job.

    Attributes:
        count: processes that were replaced in this way.
        snapshots: copies of the state, for what only dead processes held.
    """

    def __init__(self, cluster: Cluster, state: JobState) -> None:
        self.count = 0
        self._cluster = cluster
        self._state = state
        self._busy = False
        self._stopped: RecoveredState | None = None  # where all stood when no holder was dead
        self._spares: dict[Peer, Any] = {}  # processes that may take dead ones' places
        self.snapshots = Snapshots(cluster, state)
        # with the servers that are left, and with all
        self._fewer: tuple[StrategyConfig, StrategyConfig] | None = None

    # -- deaths ------------------------------------------------------------------------------------

    def can_replace(self, process: Peer) -> bool:
        """Return whether what a process holds can be found elsewhere."""
        cluster = self._cluster
        job = cluster.job
        kept = job.replication > 1 or self.snapshots.taken is not None
        only_works = process.role == "worker" and not job.servers_in_workers
        return cluster.run_config.failure.max_failures > 0 and (kept or only_works)

    def look(self) -> None:
        """Recover if a process has died that only this can replace."""
        if (loss := self.loss()) is not None:
            self.recover(*loss)

    def loss(self) -> tuple[Peer, str] | None:
        """Return a dead process that only this can replace, and the cause of its death; None without any."""
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
        """Continue without the dead processes, or with others in their places, from the last committed update.

        Args:
            suspect: the process that is said to be dead.
            why: the cause of its death, in words.

        Raises:
            PeerLostError: a chunk has no holder and no copy, or too many processes died in one
                place.
            DeadlineError: successors that are needed did not come up.
        """
        process = self._cluster.process_of(suspect)
        if not self.can_replace(process) or self._busy:
            self._cluster.lost(suspect, why)
        self._begin_again(process, why)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Prevent a recovery inside of this context, because the job is being put together there."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def resume(self) -> bool:
        """Finish a change of the job that a death has ended; return whether a death has.

        If the old job is still there, its next step finds the death.
        """
        if self._state.pending is not None:
            self._begin_again(None, "")
            return True
        cluster = self._cluster
        return any(cluster.deaths.cause(peer) is not None for peer in cluster.watches)

    def _begin_again(self, suspect: Peer | None, why: str) -> None:
        """Find the dead, decide and apply; once more whenever another process dies meanwhile."""
        cluster, began = self._cluster, time.monotonic()
        self._busy = True
        before = cluster.client.position.version
        standing: RecoveredState | None = None
        stock, self._stopped = self._state.pending, None
        said: dict[Any, str] = {}  # by the call that watched the process
        try:
            with cluster.successors.paused():
                dead = self._find_dead(suspect, why)
                while True:
                    said |= {cluster.watches[p]: f"{p} ({cause})" for p, cause in dead.items()}
                    try:
                        standing = standing or self._standing(dead, stock)
                        stock = stock or self._take_stock(dead, standing)
                        transition, seats = self._decide(dead, stock)
                        self._apply(transition, dead, stock)
                        break
                    except (PeerLostError, DeadlineError):
                        stock = self._state.pending or stock
                        dead = self._find_dead(None, "")
                        if {cluster.watches[peer] for peer in dead} <= said.keys():
                            raise
        finally:
            self._busy = False
        self.snapshots.interrupted()
        then = f"{cluster.placement.leave_out(seats)}; " if transition.left else ""
        lost = max(before - cluster.client.position.version, 0)
        self._tell(transition, list(said.values()), lost, then, began)

    def _tell(
        self, transition: Transition, said: Sequence[str], lost: int, then: str, began: float
    ) -> None:
        cluster = self._cluster
        step, job = cluster.step + 1, cluster.job
        what = (
            f"{lost} updates since the last copy are lost, and made again"
            if lost
            else "no update and no sample is lost"
        )
        took = f"training stopped for {time.monotonic() - began:.2f} s"
        self.count += len(transition.replaced)
        if transition.replaced:
            line = f"{', '.join(said)} died; others took over what they held at step {step}"
            cluster.note("recovered", f"{line}, {what}; {took}")
            return
        if not transition.left:
            self.count += len(said)
        left = [f"{job.num_workers} workers"] if transition.left else []
        if self._fewer is not None and transition.servers:
            left.append(f"{job.num_servers} servers, which took over")
        cluster.note(
            "left",
            f"{', '.join(said)} died; going on with {' and '.join(left)}, {job.global_batch} samples a step, from step "
            f"{step} on; {then}{what}; {took}",
        )

    def missing(self) -> StrategyConfig | None:
        """Return the strategy with all its servers, while the job goes on with fewer; otherwise None."""
        if self._fewer is not None and self._cluster.job.config != self._fewer[0]:
            self._fewer = None  # they are there, or somebody wants something else
        return None if self._fewer is None else self._fewer[1]

    # -- observing -------------------------------------------------------------------------------

    def _find_dead(self, suspect: Peer | None, why: str) -> dict[Peer, str]:
        """Ask all processes for a sign of life; return the dead, and the cause of each death.

        A process is dead when Ray says so, when it does not answer and another process has seen
        its channel closing, and when it has given no sign of life for `heartbeat` seconds. One that
        computes with Python's lock held has `DeadlineConfig.step` seconds to answer.

        Args:
            suspect: a process whose channel has closed, if any.
            why: it is said to be dead.
        """
        cluster, began = self._cluster, time.monotonic()
        asked = {peer: actor.lost_peers.remote() for peer, actor in cluster.actors.items()}
        signs = cluster.successors.signs
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
                    if not (gone or late or signs.is_silent(peer)):
                        continue
                    cause = why if peer == suspect else "its channels closed"
                    cause = cause if gone else f"no sign of life for {signs.silence(peer):.1f} s"
                    dead[peer] = cluster.deaths.declare(peer, cause)
                del asked[peer]
            if suspect in asked and time.monotonic() - began >= _WORD_SECONDS:
                # its router ended a channel although the process answers
                del asked[suspect]
                dead[suspect] = cluster.deaths.declare(suspect, why)
            if asked:
                signs.look(list(asked))
                ray.wait(list(asked.values()), timeout=_POLL_SECONDS)
        return dead

    def _processes_of(self, peers: Iterable[Peer]) -> set[Peer]:
        """Return the processes in which some roles live; not those of clients and collectives."""
        roles = ("worker", "server", "coordinator")
        return {self._cluster.process_of(peer) for peer in peers if peer.role in roles}

    def _standing(self, dead: Mapping[Peer, str], stock: Stock | None) -> RecoveredState | None:
        """Stop the survivors; return where the state of all chunks is, or None if it has to be the driver's copy.

        Args:
            dead: the processes that are gone.
            stock: what is known already, if the job is being put together.
        """
        if stock is not None:
            return stock.found
        cluster, job = self._cluster, self._cluster.job
        role = "worker" if job.strategy.in_workers else "server"
        cluster.extend_deadline()
        if self._stopped is None and not any(peer.role == role for peer in dead):
            self._stopped = self._state.stopped()
        cluster.disconnect()
        alive = {peer: actor for peer, actor in cluster.actors.items() if peer not in dead}
        workers = [actor for peer, actor in alive.items() if peer.role == "worker"]
        cluster.get([actor.give_up.remote() for actor in workers], "stop")
        holding = [actor for peer, actor in alive.items() if peer.role == role]
        return self._stopped or self._salvage(holding)

    def _take_stock(self, dead: Mapping[Peer, str], standing: RecoveredState | None) -> Stock:
        """Return everything with which the job continues.

        Raises:
            PeerLostError: a chunk has no holder and no copy.
        """
        cluster = self._cluster
        copy = self.snapshots.taken if standing is None else self._state.copy(standing)
        if copy is None:
            peer, cause = next(iter(dead.items()))
            cluster.raise_lost(
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
            return cluster.get(calls, "tell its state")

        optimizer = OptimizerState.collect(cluster, copy.found, workers, copy.step, call)
        return self._state.stock(copy, optimizer)

    def _salvage(self, holding: list[Any]) -> RecoveredState | None:
        """Return all servers' state at one version, in the processes that hold chunks; None if a chunk is lost."""
        cluster = self._cluster
        if cluster.job.replication == 1 or not holding:
            return None
        heard = ray.put(
            cluster.get([actor.heard.remote() for actor in holding], "say what it has heard")
        )
        parts: list[ServerState] = cluster.get(
            [actor.state_of.remote(heard) for actor in holding], "catch up"
        )
        return assemble(len(cluster.job.holders), dict(zip(holding, parts, strict=True)))

    # -- deciding --------------------------------------------------------------------------------

    def _decide(self, dead: Mapping[Peer, str], stock: Stock) -> tuple[Transition, list[int]]:
        """Return with which processes the job continues, and the places that no process takes again.

        Raises:
            PeerLostError: it cannot continue.
        """
        cluster, successors = self._cluster, self._cluster.successors
        allowed = cluster.run_config.failure.max_failures
        worn_out = frozenset(
            peer
            for peer, cause in dead.items()
            if successors.count_failure(peer, cluster.seat_of(peer), cause) > allowed
        )
        self._spares = {
            peer: successors.moved.pop(peer.index)[0]
            if peer.role == "worker" and peer.index in successors.moved
            else successors.spare(cluster.places[peer].node)
            for peer in dead
            if peer not in worn_out
        }
        config = cluster.job.config
        alone = all(peer.role == "worker" for peer in dead)
        spreads = isinstance(config, (ParameterServerStrategy, LocalStrategy)) or alone
        counts = Counter(peer.role for peer in cluster.actors)
        world = World(
            workers=counts["worker"],
            servers=counts["server"],
            dead=frozenset(dead),
            ready=frozenset(peer for peer, actor in self._spares.items() if actor is not None),
            worn_out=worn_out,
            whole=stock.is_held_by([actor for p, actor in cluster.actors.items() if p not in dead]),
            snapshot=self.snapshots.taken is not None,
        )
        target = Target(
            least=max(2, successors.least),
            waits=cluster.run_config.failure.patience > 0,
            movable=spreads and (cluster.job.strategy.in_driver or not by_calls(config)),
        )
        decided = decide(world, target)
        if isinstance(decided, Impossible):
            often = f": FailureConfig(max_failures={allowed}) allows no more" if worn_out else ""
            cluster.raise_lost(decided.peer, f"{dead[decided.peer]} ({decided.why}{often})")
        return decided, [cluster.seat_of(peer) for peer in worn_out if peer.role == "worker"]

    # -- applying --------------------------------------------------------------------------------

    def _apply(self, transition: Transition, dead: Mapping[Peer, str], stock: Stock) -> None:
        """Put the job together of the processes that a transition names.

        Raises:
            PeerLostError, DeadlineError: another process died, or did not come up. `JobState.pending`
                then is what to begin again with, if the old job is no more.
        """
        cluster, spares = self._cluster, self._spares
        if (
            transition.source == "snapshot"
            and not stock.copied
            and self.snapshots.taken is not None
        ):
            stock = Stock.from_copy(self.snapshots.taken)
        stock = stock.only_in([actor for peer, actor in cluster.actors.items() if peer not in dead])
        alive = sorted(p.index for p in cluster.actors if p.role == "worker" and p not in dead)
        as_before = self._state.pending is None and stock.copy.job is cluster.job
        if transition.replaced:
            self._replace(dead, alive, stock, as_before=as_before)
            return
        cluster.successors.follow(
            {peer.index: (dead[peer], spares.pop(peer, None)) for peer in transition.left}
        )
        for actor in filter(None, spares.values()):
            ray.kill(actor, no_restart=True)
        config = self._with_servers(transition.servers)
        wanted = Membership(config, len(alive), dict(enumerate(alive)), gone=frozenset(dead))
        if as_before and not transition.left:
            self._state.put_back(stock, wanted)
        else:
            self._state.put_together(stock, wanted)

    def _replace(
        self, dead: Mapping[Peer, str], alive: Sequence[int], stock: Stock, *, as_before: bool
    ) -> None:
        """Put the job together with other processes in the places of the dead.

        Args:
            dead: the processes that are gone.
            alive: the workers that are there.
            stock: the state.
            as_before: whether the job as it is has that state.
        """
        cluster = self._cluster
        added = self._start(dead, self._spares)
        try:
            self._build(added)
            workers = len(alive) + sum(peer.role == "worker" for peer in added)
            keep = {index: index for index in alive}
            wanted = Membership(cluster.job.config, workers, keep, added, gone=frozenset(dead))
            if as_before:
                self._state.put_back(stock, wanted)
            else:
                self._state.put_together(stock, wanted)
        except BaseException:
            for actor in added.values():
                if actor not in cluster.actors.values():
                    ray.kill(actor, no_restart=True)
            raise

    def _with_servers(self, count: int) -> StrategyConfig:
        """Return the strategy with so many server processes; all of them are wanted again later."""
        config = self._cluster.job.config
        have = sum(peer.role == "server" for peer in self._cluster.actors)
        if count == have or not isinstance(config, (ParameterServerStrategy, LocalStrategy)):
            return config
        fewer = replace(config, num_servers=count, replication=min(config.replication, count))
        self._fewer = fewer, self.missing() or config
        return fewer

    def _start(self, dead: Mapping[Peer, str], spares: Mapping[Peer, Any]) -> dict[Peer, Any]:
        """Return processes in place of the dead, spare ones where there are any, when they are up."""
        cluster, successors = self._cluster, self._cluster.successors
        starting = successors.starting  # each holds the place that another would wait for
        successors.give_up_on([index for index in starting if worker_peer(index) in dead])

        def start(peer: Peer) -> Any:
            worker = peer.role == "worker"
            return (cluster.start_worker if worker else cluster.start_server)(peer.index)

        added = {peer: spares.get(peer) or start(peer) for peer in dead}
        deadline = time.monotonic() + cluster.run_config.deadlines.start * 5
        for peer in added:
            while time.monotonic() < deadline:
                placed = added[peer].place.remote()
                ray.wait([placed], timeout=max(deadline - time.monotonic(), 0.1))
                if not never_ran(placed):
                    break
                added[peer] = start(peer)
        return added

    def _build(self, added: Mapping[Peer, Any]) -> None:
        """Have new workers build their models.

        Raises:
            ModelError: a model is another one than the job's.
        """
        cluster = self._cluster
        cluster.extend_deadline()
        builds = [
            cluster.successors.build(actor, peer.index)
            for peer, actor in added.items()
            if peer.role == "worker"
        ]
        for described in cluster.get(builds, "build the model again"):
            check_agreement(cluster.job.description, described, "the job", "a successor")
