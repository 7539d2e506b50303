"""What is known of a job's processes, and the processes that are started because of it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from steepest.core.messages.driver import AuditDifference, WorkerLost
from steepest.core.messages.message import Peer, server_peer, worker_peer
from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.errors import ResourcesError, ShutdownError, listed
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import runtime
from steepest.runtime.places import kill
from steepest.runtime.recovery.decision import Target, World
from steepest.runtime.recovery.growth import Growth, Wanted
from steepest.runtime.recovery.leaving import Leaving
from steepest.runtime.recovery.starting import Reserve, Start, Starting
from steepest.runtime.state.snapshots import Snapshots

log = logging.getLogger(__name__)
NOTICE_SECONDS = 5.0  # that Ray takes, at most, to see that a process is dead
_TELL_SECONDS = 10.0
_SPARE_AFTER_SECONDS = 20.0  # of training, before a spare process is worth its memory
_TOGETHER_SECONDS = 2.0  # that a started process waits for others, so that all join in one pause


class Observation:
    """Watches a job's processes, and starts missing ones."""

    def __init__(self, cluster: Cluster, snapshots: Snapshots, wanted: Wanted) -> None:
        self.wanted = wanted
        self.starting = Starting(cluster)
        self.reserve = Reserve(cluster)
        self.growth = Growth(cluster, self.starting)
        self.leaving = Leaving(cluster, self.starting)
        self._cluster = cluster
        self._snapshots = snapshots
        self._failures: Counter[int] = Counter()  # by seat
        self._counted: set[object] = set()  # deaths among them, by the calls that watched
        self._job_knows: set[object] = set()  # of deaths, by the calls that watched
        # workers on nodes that are left out because they compute wrongly, by the calls that watch them
        self.distrusted: set[object] = set()
        self._told: set[Start] = set()  # that were already reported as slow
        self._up_since = math.inf  # when the first of the further workers was up

    # -- who is dead -----------------------------------------------------------------------------

    def can_replace(self, process: Peer) -> bool:
        """Return whether what a process holds can be found elsewhere."""
        cluster = self._cluster
        kept = cluster.job.replication > 1 or self._snapshots.taken is not None
        only_works = process.role == "worker" and not cluster.job.servers_in_workers
        return cluster.run_config.failure.max_failures > 0 and (kept or only_works)

    def ask_for_signs(self, *, changing: bool = False) -> tuple[list[str], list[str]]:
        """Ask every process for a sign of life; give up the silent ones, and return them in words.

        Returns those of the job, and those that have no role yet or any more.
        """
        cluster, signs = self._cluster, self._cluster.signs
        if not signs.is_time:
            return [], []
        members = {actor: peer for peer, actor in cluster.actors.items() if self.can_replace(peer)}
        fixed = set(cluster.actors.values()) - members.keys()
        living = {actor: at for actor, at in cluster.living().items() if actor not in fixed}
        coming = {start.actor: start for start in self.starting if start.is_placed}
        places = {actor: start.place for actor, start in coming.items()} | living
        if not places or not signs.look(places):
            return [], []
        silent: tuple[list[str], list[str]] = [], []
        for actor in [actor for actor in places if signs.is_silent(actor)]:
            why = f"no sign of life for {signs.silence(actor):.1f} s"
            if actor in members:
                why = cluster.silence_of(members[actor], signs.silence(actor))
                if not changing:  # else the job hears nothing
                    self.tell_job({members[actor]: why})
                cluster.deaths.declare(members[actor], why)
                silent[0].append(str(members[actor]))
                continue
            if actor in coming:
                what = f"a process that starts as {coming[actor].peer}"
                self.starting.lose(coming[actor])
            else:
                what = "a process that was let go"
                kill(places[actor], actor)
            log.warning("%s gave %s", what, why)
            silent[1].append(what)
        return silent

    def tell_job(self, dead: Mapping[Peer, str]) -> None:
        """Tell the driver's client and the coordinator, once each, of processes that are dead.

        They hear of most because channels close; of one whose node is cut off they do not.
        """
        cluster = self._cluster
        for peer, why in dead.items():
            if (watch := cluster.members[peer].watch) in self._job_knows:
                continue
            self._job_knows.add(watch)
            with contextlib.suppress(ShutdownError):  # the driver's router has ended, and says why
                if self.is_plain(peer):
                    life = cluster.members[peer].life
                    cluster.on_router(partial(cluster.client.declare_lost, peer.index, life, why))
                elif peer.role == "server" or cluster.job.servers_in_workers:
                    cluster.on_router(partial(cluster.client.lost, server_peer(peer.index), why))

    def hear(self, lost: WorkerLost) -> None:
        """Take the coordinator's report that a worker is dead; Ray's report, if there is one, names the cause."""
        cluster, peer = self._cluster, worker_peer(lost.worker)
        if peer not in cluster.members or cluster.members[peer].life != lost.life:
            return
        if cluster.deaths.cause(peer) is None:
            runtime().wait([cluster.members[peer].watch], NOTICE_SECONDS)
            cluster.deaths.declare(peer, lost.why)

    def hear_difference(self, difference: AuditDifference) -> None:
        """Log that gradients of an audited step differ; give up a worker that is to be replaced for it.

        Raises:
            PeerLostError: it cannot be replaced.
        """
        cluster = self._cluster
        who = None if difference.worker is None else worker_peer(difference.worker)

        def named(worker: int) -> str:
            peer = worker_peer(worker)
            place = cluster.places.get(peer)
            return (
                str(peer) if place is None else f"{peer} on {place.host} (node {place.node[:12]})"
            )

        names = listed(map(named, sorted({worker for pair in difference.pairs for worker in pair})))
        wrong = f"{who} computes wrongly: {difference.why}" if who else difference.why
        cluster.note(
            "difference",
            f"audit of step {difference.step}: gradients of the same samples differ on {names}; {wrong}",
        )
        member = None if who is None else cluster.members.get(who)
        if not difference.waits or who is None or member is None:
            return
        if (
            self.is_plain(who) and member.life != difference.life
        ):  # others live as long as the coordinator's job
            return
        why = f"the audit of step {difference.step} has found that it computes wrongly"
        if not self.can_replace(who):
            cluster.deaths.raise_lost(who, why)
        cluster.placement.distrust(member.place.node)
        if member.place.node in cluster.placement.failing:
            self.distrusted.add(member.watch)
        self.tell_job({who: why})
        cluster.deaths.declare(who, why)

    def is_plain(self, peer: Peer) -> bool:
        """Return whether a process is a worker that the others can do without for a while."""
        return peer.role == "worker" and self._cluster.job.workers_are_replaced

    def dead(self) -> dict[Peer, str]:
        """Return the processes that are known to be dead, and why."""
        cluster = self._cluster
        dead = cluster.deaths.causes()
        for peer, cause in dead.items():
            if not self.can_replace(peer):
                cluster.deaths.raise_lost(peer, cause)
        cluster.await_successors(dead)
        return dead

    def worn_out(self, dead: Collection[Peer]) -> frozenset[Peer]:
        """Return the dead whose places have seen too many deaths, or that are distrusted."""
        allowed = self._cluster.run_config.failure.max_failures
        return frozenset(p for p in dead if self._failed(p) > allowed or self.is_distrusted(p))

    def is_distrusted(self, peer: Peer) -> bool:
        """Return whether a process has computed wrongly on a node that is left out."""
        return self._cluster.members[peer].watch in self.distrusted

    def _failed(self, peer: Peer) -> int:
        """Return how many processes have died in a place, including the present dead one."""
        cluster, seat = self._cluster, self._cluster.seat_of(peer)
        watch = cluster.members[peer].watch
        if watch not in self._counted:
            if cluster.deaths.is_repeated(peer, seat):
                again = "as the one before it, with no version committed in between"
                cluster.deaths.raise_lost(peer, f"{cluster.deaths.cause(peer)} ({again})")
            self._counted.add(watch)
            self._failures[seat] += 1
        return self._failures[seat]

    def late(self, dead: Collection[Peer]) -> frozenset[Peer]:
        """Return the dead whose successors are so late that they are no longer awaited."""
        starting = self.starting
        waited = {peer: start for peer, start in starting.instead.items() if peer in dead}
        return frozenset(peer for peer, start in waited.items() if starting.is_late(start))

    def in_vain(self, dead: Collection[Peer]) -> frozenset[Peer]:
        """Return the dead whose successors are not awaited."""
        return self.worn_out(dead) | self.late(dead)

    def failed_to_start(self, peer: Peer) -> None:
        """Count the death of a process that started in the place of a dead one."""
        self._failures[self._cluster.seat_of(peer)] += 1

    # -- processes that start --------------------------------------------------------------------

    def fill_reserve(self, trained: float = math.inf) -> None:
        """Start spare processes if any are wanted, after `trained` seconds of training or a death."""
        cluster = self._cluster
        wanted = cluster.run_config.failure.spares
        if wanted is None:
            wanted = 1 if trained >= _SPARE_AFTER_SECONDS else 0
        if wanted and not cluster.chosen.gpu and self.can_replace(worker_peer(0)):
            self.reserve.fill(wanted)  # a GPU is Ray's to give, when it is needed

    def start_successors(self, dead: Mapping[Peer, str], *, cold: bool) -> None:
        """Start processes in the places of dead ones; spare processes are used first."""
        starting, cluster = self.starting, self._cluster
        for peer, cause in dead.items():
            if (known := starting.instead.get(peer)) is not None:
                if known.is_dead and known.was_up:  # not because its node is
                    self.failed_to_start(peer)
                    known = replace(known, awaited=starting.clock())
                known = starting.again(known)
                known = known if known.cause == cause else replace(known, cause=cause)
                starting.instead[peer] = known
                continue
            spare = self.reserve.take(cluster.members[peer].place.node)
            if spare is None and not cold:
                continue
            if peer.role == "server":
                start = starting.server(peer, cause, spare, spare=spare is not None)
            else:
                seat = cluster.placement.order[peer.index]
                start = starting.worker(peer.index, seat, cause, spare)
            starting.instead[peer] = start

    def tell_who_is_awaited(self) -> None:
        """Log, once each, which dead processes have waited long for their successors."""
        now = system().now()
        self._told &= set(self.starting.instead.values())
        for peer, start in self.starting.instead.items():
            if start.cause and now - start.began >= _TELL_SECONDS and start not in self._told:
                self._told.add(start)
                log.warning(
                    "%s died %.0f s ago (%s), and its successor is not up yet: the cluster has no "
                    "room for it, or it is slow to start", peer, now - start.began, start.cause,
                )  # fmt: skip

    def start_missing(self) -> None:
        """Start further workers and servers, and replacements of those on nodes that will go."""
        starting = self.starting
        self._give_up_late_successors()
        for start in [*starting.workers, *starting.servers]:
            if starting.is_late(start):
                raise ResourcesError(
                    f"the process of another {start.peer.role} did not come up within "
                    f"{starting.patience:g} s"
                )
        starting.workers = [starting.again(start) for start in starting.workers]
        starting.servers = [starting.again(start) for start in starting.servers]
        self.leaving.look(self.wanted.least)
        if not self.leaving.nodes:
            self.growth.start_missing(self.wanted)
            self._give_back()

    def _give_back(self) -> None:
        """Give back the seats that are no longer needed, after workers have left."""
        if surplus := self.growth.surplus(self.wanted.most):
            coming = [start.actor for start in self.starting]
            unused = self._cluster.unused(surplus, coming, self.reserve.actors)
            self.reserve.end_in(unused)
            self._cluster.placement.give_back(unused)

    def _give_up_late_successors(self) -> None:
        """End successors of dead workers that do not come up; others may be started later."""
        starting = self.starting
        late = [start for start in starting.workers if start.cause and starting.is_late(start)]
        if late:
            log.warning(
                "successors of %d dead workers have not come up within %g s: training goes on with "
                "%d workers; others join when the cluster has room",
                len(late), starting.patience, self._cluster.job.num_workers,
            )  # fmt: skip
            starting.give_up(late)

    def joining(self) -> dict[int, Start]:
        """Return the further workers that can join now, by their new numbers.

        Each gets the number that it was made for, if possible; otherwise it builds its models once
        more, and joins afterwards.
        """
        starting, now = self.starting, system().now()
        up = [start for start in starting.workers if start.is_up]
        self._up_since = min(self._up_since, now) if up else math.inf
        late = [start for start in starting.workers if start not in up]
        soon = now - self._up_since < _TOGETHER_SECONDS
        if not up or (late and (soon or not all(start.cause for start in late))):
            return {}
        have = self._cluster.job.num_workers
        numbers = numbered([start.peer.index for start in up], have)
        joining = {number: starting.fitting(up[n], number) for n, number in numbers.items()}
        starting.workers = [*joining.values(), *late]
        if not all(start.is_up for start in joining.values()):
            return {}
        models = {worker_peer(number): start for number, start in joining.items()}
        starting.check_models(models)
        return joining

    # -- what is known ---------------------------------------------------------------------------

    def world(self, dead: Mapping[Peer, str], *, patient: bool) -> World:
        """Return what is known of all processes."""
        cluster = self._cluster
        counts = Counter(peer.role for peer in cluster.members)
        stuck = self.lacks_buffers(dead) or not all(self.is_plain(peer) for peer in dead)
        leaving = self.leaving.peers - dead.keys()
        instead = self.starting.instead
        ready = {peer for peer, s in instead.items() if s.is_up or (stuck and s.spare)}
        opening = sum(start.is_up for start in self.starting.servers)
        return World(
            workers=counts["worker"],
            servers=counts["server"],
            dead=dead.keys(),
            leaving=leaving,
            ready=ready & (dead.keys() | leaving),
            worn_out=self.worn_out(dead),
            late=self.late(dead),
            stuck=stuck,
            overdue=not patient and self._is_overdue(dead),
            full=self.leaving.full,
            joining=0 if dead or leaving else len(self.joining()),
            opening=opening,
            snapshot=self._snapshots.taken is not None,
        )

    def lacks_buffers(self, dead: Collection[Peer]) -> bool:
        """Return whether all workers are dead, and there is a copy of their own state, such as buffers."""
        if any(peer.role == "worker" and peer not in dead for peer in self._cluster.members):
            return False
        copy = self._snapshots.taken
        return copy is not None and copy.has_buffers

    def _is_overdue(self, dead: Collection[Peer]) -> bool:
        """Return whether successors of dead workers were waited for long enough."""
        now, run_config = system().now(), self._cluster.run_config
        cold = [
            now - start.began
            for peer, start in self.starting.instead.items()
            if peer in dead and not start.spare
        ]
        workers, rule = self._cluster.job.num_workers, self._cluster.job.strategy.rule
        held_up = rule.needs(workers) == workers and workers - len(dead) > 1
        patience = min(
            run_config.failure.patience if held_up else math.inf,
            math.inf if self.wanted.exact else run_config.deadlines.start,
        )
        return bool(cold) and max(cold) >= patience

    def target(self, world: World) -> Target:
        """Return what is wanted of these processes."""
        job, config = self._cluster.job, self._cluster.job.config
        spreads = config.has_servers or all(peer.role == "worker" for peer in world.dead)
        workers = min(world.workers + world.joining, self.wanted.most)
        return Target(
            least=self.wanted.least,
            workers=self.wanted.most,
            servers=self._cluster.serving(self.wanted.config, workers),
            waits=self._cluster.run_config.failure.patience > 0,
            movable=spreads,
            switched=self.config_for(world.workers, world.servers) != config
            or self._cluster.unfrozen != job.unfrozen
            or self._cluster.roles_due,
        )

    def config_for(self, workers: int, servers: int, config: Strategy | None = None) -> Strategy:
        """Return a strategy, with fewer servers if there are not as many as it wants."""
        config = config or self.wanted.config
        enough = servers == 0 or servers >= self._cluster.serving(config, workers)
        if enough or not config.has_servers:
            return config
        return config.with_at_most(servers)


def numbered(wished: Collection[int], have: int) -> dict[int, int]:
    """Return the new numbers of further workers, after the `have` workers there are; their order stays.

    Example:
        >>> numbered([1], 2)
        {0: 1}
        >>> numbered([5, 3], 2)
        {1: 2, 0: 3}
    """
    free = sorted(range(len(wished)), key=list(wished).__getitem__)
    numbers: dict[int, int] = {}
    for taken, position in enumerate(free):
        lowest = max(numbers.values(), default=-1) + 1
        numbers[position] = min(max(list(wished)[position], lowest), have + taken)
    return numbers
