"""Another number of workers or servers: new processes start beside training, and join it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from steepest.cluster.diagnostics import has_answered, never_ran
from steepest.cluster.draining import Move, are_up
from steepest.cluster.job_state import JobState
from steepest.cluster.launch import Cluster
from steepest.cluster.locations import by_calls
from steepest.cluster.placement import Reservation, ask_for_room, check_possible, fitting, may_grow
from steepest.cluster.ray_private import draining_nodes
from steepest.cluster.worker_replacement import Start
from steepest.config.strategies import StrategyConfig
from steepest.engine.job import check_agreement
from steepest.engine.strategy import make_strategy
from steepest.errors import DeadlineError, PeerLostError, ResourcesError
from steepest.messages.message import Peer, worker_peer

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_LONGEST_PAUSE = 60.0
_TELL_SECONDS = 10.0
_TOGETHER_SECONDS = 2.0  # that one who is up waits for others, so that all join in one pause


class Resize:
    """One change of the number of workers or servers; its new processes begin to start at once.

    Args:
        cluster: the job's processes.
        workers: how many there will be.
        config: the strategy, with as many servers as there will be.
        state: of the job.
        wanted: told how many there are, when they are, if somebody wants exactly that many.

    Raises:
        ResourcesError: the job runs in a placement group of somebody else's, which has no more
            places.
    """

    def __init__(
        self,
        cluster: Cluster,
        workers: int,
        config: StrategyConfig,
        state: JobState,
        wanted: Callable[[int], None] | None = None,
    ) -> None:
        self.workers = workers
        self._wanted = wanted
        self._cluster = cluster
        self._config = config
        self._state = state
        self._began = time.monotonic()
        self._room: Reservation | None = None
        self._placement = [
            seat
            for seat in cluster.placement.order[cluster.job.num_workers :]
            if not self._is_taken(seat)
        ]
        self._added: dict[Peer, Any] = {}
        self._servers: dict[Peer, Any] = {}
        self._waiting: list[Any] = []  # calls that end when the workers are up, and the servers
        self._opening: list[Any] = []
        if (missing := workers - cluster.job.num_workers - len(self._placement)) > 0:
            check_possible(workers, cluster.bundle, ray.nodes(), may_grow())
            self._room = ask_for_room(missing, cluster.bundle, cluster.placement.failing)
            self._waiting = [self._room.group.ready()]
        else:
            self._start()

    def _is_taken(self, seat: int) -> bool:
        return any(start.seat == seat for start in self._cluster.successors.returning)

    def _start(self) -> None:
        cluster, job = self._cluster, self._cluster.job
        cut = make_strategy(self._config).cut
        for index, seat in zip(range(job.num_workers, self.workers), self._placement, strict=False):
            self._added[worker_peer(index)] = actor = cluster.start_worker(index, seat)
            self._waiting.append(
                actor.build.remote(cluster.creator, index, job.devices_per_worker, job.seed, cut)
            )
        if by_calls(self._config):
            return  # `Cluster.reform` starts all servers anew
        have = sum(peer.role == "server" for peer in cluster.actors)
        self._servers = cluster.start_servers(self._config, self.workers, have)
        nbytes = job.description.layout.nbytes
        self._opening = [actor.reserve.remote(nbytes) for actor in self._servers.values()]

    def ready(self, timeout: float = 0.0) -> bool:
        """Return whether all new processes are up and have their models.

        Raises:
            ResourcesError: there has been no room for them for `DeadlineConfig.start` seconds, or
                they did not come up.
            Exception: whatever building a model raises. The job goes on as it was, after `cancel`.
        """
        limit = self._cluster.run_config.deadlines.start
        if self._room is not None and not self._added:
            done, _ = ray.wait(self._waiting, timeout=min(timeout, limit))
            if not done:
                if time.monotonic() - self._began >= limit:
                    raise ResourcesError(
                        f"the cluster has had no room for {self.workers} workers for {limit:g} s: "
                        f"it goes on with {self._cluster.job.num_workers}; stop what holds the "
                        "rest, or add nodes"
                    )
                return False
            self._waiting = []
            before = len(self._cluster.placement.order)
            self._cluster.placement.add(self._room)
            self._placement += self._cluster.placement.order[before:]
            self._room = None
            self._start()
        return are_up([*self._waiting, *self._opening], timeout, self._began + 5 * limit)

    def wait(self) -> None:
        """Wait until the change is ready, or late."""
        limit = self._cluster.run_config.deadlines.start * 5
        while not self.ready(_LOOK_SECONDS) and time.monotonic() - self._began < limit:
            pass  # whoever is late then is named by `apply`

    def make(self) -> None:
        """Wait until it is ready, and apply it; called while no step is taken."""
        try:
            self.wait()
            self.apply()
        except BaseException:
            self.cancel()
            raise

    def apply(self) -> None:
        """Give the job its new size; called between two steps."""
        cluster, before, began = self._cluster, self._cluster.job, time.monotonic()
        cluster.extend_deadline()
        for peer, described in zip(
            self._added, cluster.get(self._waiting, "build the model"), strict=True
        ):
            check_agreement(before.description, described, "the job", str(peer))
        placement = {
            peer.index: seat for peer, seat in zip(self._added, self._placement, strict=False)
        }
        self._state.reform(
            self._config, self.workers, {**self._added, **self._servers}, placement=placement
        )
        if self._wanted is not None:
            self._wanted(self.workers)
        job, step = cluster.job, cluster.step + 1
        cluster.note(
            "resized",
            f"{job.num_workers} workers and {job.num_servers} servers instead of {before.num_workers} and "
            f"{before.num_servers}, {job.global_batch} samples a step, from step {step} on; training stopped for "
            f"{time.monotonic() - began:.2f} s",
        )

    def cancel(self) -> None:
        """End the processes that were started for the change."""
        members = self._cluster.actors.values()  # some may be, if `apply` failed half-way
        for actor in (*self._added.values(), *self._servers.values()):
            if actor not in members:
                ray.kill(actor, no_restart=True)
        if self._room is not None:
            self._room.release()

    def again(self) -> Resize | None:
        """Return the same change of what is another job by now, if the user has asked for it."""
        self.cancel()
        if self._wanted is None and self._config == self._cluster.job.config:
            return None
        workers = self._cluster.job.num_workers if self._wanted is None else self.workers
        return Resize(self._cluster, workers, self._config, self._state, self._wanted)


class Without:
    """Continues without the dead workers; the others are numbered anew. Successors join later.

    Args:
        cluster: the job's processes.
        state: of the job.
    """

    def __init__(self, cluster: Cluster, state: JobState) -> None:
        self._cluster = cluster
        self._state = state

    def ready(self) -> bool:
        """Return True: nothing has to start."""
        return True

    def cancel(self) -> None:
        """Do nothing: nothing was started."""

    def again(self) -> None:
        """Return None: the change is never put off."""

    def apply(self) -> None:
        """Let the dead workers go; called between two steps."""
        cluster, began = self._cluster, time.monotonic()
        successors = cluster.successors
        left_out = [cluster.placement.order[index] for index in successors.left_out]
        before = dict(successors.starting), dict(successors.left_out)
        gone = successors.let_go()
        if not gone:
            return  # their successors have joined meanwhile, or too few are left
        who = [
            f"{worker_peer(i)} on {cluster.places[worker_peer(i)].host} died: {why}"
            for i, why in gone.items()
        ]
        alive = [index for index in range(cluster.job.num_workers) if index not in gone]
        try:
            with successors.paused():
                self._state.reform(cluster.job.config, len(alive), keep=dict(enumerate(alive)))
        except (PeerLostError, DeadlineError):
            if self._state.pending is None:  # the dead workers are still part of the job
                successors.take_back(*before)
            raise
        then = cluster.placement.leave_out(left_out)
        step, took = cluster.step + 1, time.monotonic() - began
        cluster.note(
            "left",
            f"{', '.join(who)}; going on with {len(alive)} workers, {cluster.job.global_batch} "
            f"samples a step, from step {step} on, {then}; no update and no sample is lost; training "
            f"stopped for {took:.2f} s",
        )


class Return:
    """Successors join a job that has gone on meanwhile without those in whose places they are.

    Args:
        cluster: the job's processes.
        starts: that are up; each gets the number that it was made for, where that can be.
        state: of the job.
    """

    def __init__(self, cluster: Cluster, starts: Sequence[Start], state: JobState) -> None:
        self._cluster = cluster
        self._state = state
        self._keep = list(range(cluster.job.num_workers))
        self._starts: dict[
            int, Start
        ] = {}  # by place among the others, -1 and below among those that stay
        for number, start in enumerate(reversed(starts)):
            self._keep.insert(min(start.index, len(self._keep)), -1 - number)
            self._starts[-1 - number] = start
        self._built = {
            new: start.building[0]
            if new == start.index
            else cluster.successors.build(start.actor, new)
            for new, start in (
                (new, self._starts[old]) for new, old in enumerate(self._keep) if old < 0
            )
        }

    def ready(self) -> bool:
        """Return whether the returning workers have their models."""
        calls = list(self._built.values())
        up = len(ray.wait(calls, num_returns=len(calls), timeout=0)[0]) == len(calls)
        return (
            up and not self._cluster.successors.starting
        )  # who is replaced just now could not let go of its roles

    def cancel(self) -> None:
        """Do nothing: they return another time."""

    def again(self) -> None:
        """Return None: they return another time."""

    def apply(self) -> None:
        """Have the successors join; called between two steps."""
        cluster, began = self._cluster, time.monotonic()
        if any(never_ran(call) for call in self._built.values()):
            return  # it died: another one starts
        cluster.extend_deadline()
        described = cluster.get(list(self._built.values()), "build the model")
        for new, description in zip(self._built, described, strict=True):
            check_agreement(cluster.job.description, description, "the job", str(worker_peer(new)))
        joining = {new: self._starts[self._keep[new]] for new in self._built}
        self._state.reform(
            cluster.job.config,
            len(self._keep),
            {worker_peer(new): start.actor for new, start in joining.items()},
            {new: old for new, old in enumerate(self._keep) if old >= 0},
            {new: start.seat for new, start in joining.items()},
        )
        successors = cluster.successors
        successors.returning = [
            start for start in successors.returning if start not in joining.values()
        ]
        successors.count += len(joining)
        step, took = cluster.step + 1, time.monotonic() - began
        who = ", ".join(
            f"{worker_peer(new)} (pid {cluster.places[worker_peer(new)].pid})" for new in joining
        )
        after = time.monotonic() - min(start.began for start in joining.values())
        cluster.note(
            "returned",
            f"{who} is there again, after {after:.1f} s: {len(self._keep)} workers, "
            f"{cluster.job.global_batch} samples a step, from step {step} on; training stopped for "
            f"{took:.2f} s",
        )
        successors.prepare_if_wanted()


class WorkerRange:
    """As many workers as the cluster has room for, within bounds; dead ones are missing a while.

    Args:
        cluster: the job's processes.
        least, most: how many there may be; for an exact number both are that.
        state: of the job.
    """

    def __init__(self, cluster: Cluster, least: int, most: int, state: JobState) -> None:
        self._cluster = cluster
        self._most = most
        self._exact = least == most
        # one by itself would hold all weights alone
        self._least = min(2, most) if self._exact else least
        self._state = state
        self._looked = time.monotonic()
        self._pause = _LOOK_SECONDS
        self._heard = 0.0  # when it was asked which nodes will go
        self._left: set[str] = set()
        self._told: set[tuple[int, float]] = set()  # of whose absence it was said that it is long
        self._up_since = math.inf  # when the first of those that return was up
        cluster.successors.least = self._least

    def fix(self, workers: int) -> None:
        """Keep exactly that many workers from now on; no other is awaited."""
        self._exact, self._most, self._least = True, workers, min(2, workers)
        self._cluster.successors.least = self._least
        self._cluster.successors.await_nobody()

    def loss(self) -> Without | None:
        """Return the change by which the others continue without dead workers, if it is due.

        To be called often.
        """
        cluster, now = self._cluster, time.monotonic()
        successors, run_config = cluster.successors, cluster.run_config
        workers = cluster.job.num_workers
        self._tell_who_is_awaited(now)
        left = workers - len(successors.starting) - len(successors.left_out)
        if left < self._least or left == workers:
            return None
        if successors.left_out:
            return Without(cluster, self._state)
        cold = [now - start.began for start in successors.starting.values() if not start.spare]
        held_up = cluster.job.strategy.rule.needs(workers) == workers and left > 1
        patience = min(
            run_config.failure.patience if held_up else math.inf,
            math.inf if self._exact else run_config.deadlines.start,
        )
        return Without(cluster, self._state) if cold and max(cold) >= patience else None

    def _tell_who_is_awaited(self, now: float) -> None:
        starting = self._cluster.successors.starting
        self._told = {key for key in self._told if key[0] in starting}
        for index, start in starting.items():
            if now - start.began >= _TELL_SECONDS and (index, start.began) not in self._told:
                self._told.add((index, start.began))
                log.warning(
                    "%s died %.0f s ago (%s), and its successor is not up yet: the cluster has no "
                    "room for it, or it "
                    "is slow to start", worker_peer(index), now - start.began, start.cause,
                )  # fmt: skip

    def look(self) -> Resize | Return | Move | None:
        """Return what should be changed, if anything; to be called often."""
        cluster, now = self._cluster, time.monotonic()
        successors, workers = cluster.successors, cluster.job.num_workers
        if now - self._heard >= _LOOK_SECONDS:
            self._heard = now
            here = {place.node for place in cluster.places.values()}
            failing = dict.fromkeys(cluster.placement.failing, 0.0)
            for nodes, why in ((draining_nodes(), "will go"), (failing, "failed again and again")):
                going = {
                    node: when
                    for node, when in nodes.items()
                    if node in here and node not in self._left
                }
                self._left |= going.keys()
                if going:
                    return Move(cluster, going, self._least, self._state, why)
        recovery = cluster.recovery
        if successors.starting:
            return None
        if recovery is not None and (whole := recovery.missing()) is not None:
            return Resize(cluster, workers, whole, self._state)
        if workers >= self._most:
            return None
        successors.returning = [successors.again(start) or start for start in successors.returning]
        up = [start for start in successors.returning if has_answered(start.building[1])]
        self._up_since = min(self._up_since, now) if up else math.inf
        if up and (
            len(up) == len(successors.returning) or now - self._up_since >= _TOGETHER_SECONDS
        ):
            return Return(cluster, up, self._state)
        if now - self._looked < self._pause or len(cluster.placement.retired) > self._most:
            return None
        self._looked = now
        placement = len(cluster.placement.order) - len(successors.returning) - workers
        more = min(
            self._most - workers - len(successors.returning),
            fitting(cluster.bundle) + max(placement, 0),
        )
        if more < 1:
            return None
        self._pause = min(
            2 * self._pause, _LONGEST_PAUSE
        )  # what is free may be in pieces: then it asks more rarely
        return Resize(cluster, workers + more, cluster.job.config, self._state)
