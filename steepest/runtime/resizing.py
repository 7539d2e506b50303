"""Another number of workers or servers: new processes start while the others train, and join between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

import ray

from steepest.comm.message import Peer, worker_peer
from steepest.config import StrategyConfig
from steepest.errors import ResourcesError
from steepest.job import check_agreement, make_strategy
from steepest.runtime.launch import Cluster
from steepest.runtime.placement import Room, ask_for_room, fitting, worker_bundle
from steepest.runtime.process import by_calls
from steepest.runtime.state import JobState

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_LONGEST_PAUSE = 60.0


class Resize:
    """One change of the number of workers or servers; its new processes begin to start at once.

    Args:
        cluster: the job's processes.
        workers: how many there will be.
        config: the strategy, with as many servers as there will be.
        state: of the job.

    Raises:
        ResourcesError: the job runs in a placement group of somebody else's, which has no more places.
    """

    def __init__(self, cluster: Cluster, workers: int, config: StrategyConfig, state: JobState) -> None:
        self.workers = workers
        self._cluster = cluster
        self._config = config
        self._state = state
        self._began = time.monotonic()
        self._room: Room | None = None
        self._added: dict[Peer, Any] = {}
        self._servers: dict[Peer, Any] = {}
        self._waiting: list[Any] = []  # calls that end when the workers are up, and the servers
        self._opening: list[Any] = []
        if (missing := workers - len(cluster.nodes)) > 0:
            bundle = worker_bundle(cluster.job.devices_per_worker, cluster.gpu, cluster.settings.cpus_per_worker)
            self._room = ask_for_room(missing, bundle)
            self._waiting = [self._room.group.ready()]
        else:
            self._start()

    def _start(self) -> None:
        cluster, job = self._cluster, self._cluster.job
        cut = make_strategy(self._config).cut
        for index in range(job.num_workers, self.workers):
            self._added[worker_peer(index)] = actor = cluster.start_worker(index)
            self._waiting.append(actor.build.remote(cluster.creator, index, job.devices_per_worker, job.seed, cut))
        if by_calls(self._config):
            return  # `Cluster.reform` starts all servers anew
        have = sum(peer.role == "server" for peer in cluster.actors)
        self._servers = cluster.start_servers(self._config, self.workers, have)
        self._opening = [actor.place.remote() for actor in self._servers.values()]

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether all new processes are up and have their models.

        Raises:
            ResourcesError: there has been no room for them for `start_timeout` seconds.
            Whatever building a model raises. The job goes on as it was, after `cancel`.
        """
        settings = self._cluster.settings
        if self._room is not None and not self._added:
            done, _ = ray.wait(self._waiting, timeout=min(timeout, settings.start_timeout))
            if not done:
                if time.monotonic() - self._began >= settings.start_timeout:
                    raise ResourcesError(
                        f"the cluster has had no room for {self.workers} workers for {settings.start_timeout:g} s: it "
                        f"goes on with {self._cluster.job.num_workers}; stop what holds the rest, or add nodes"
                    )
                return False
            self._waiting = []
            self._cluster.add_room(self._room)
            self._room = None
            self._start()
        calls = [*self._waiting, *self._opening]
        return len(ray.wait(calls, num_returns=len(calls), timeout=timeout)[0]) == len(calls)

    def wait(self) -> None:
        """Returns when it is ready."""
        limit = self._cluster.settings.start_timeout * 5
        while not self.ready(_LOOK_SECONDS) and time.monotonic() - self._began < limit:
            pass  # whoever is late then is named by `apply`

    def apply(self) -> None:
        """Makes it so, between two steps."""
        cluster, before, began = self._cluster, self._cluster.job, time.monotonic()
        cluster.extend_deadline()
        for peer, described in zip(self._added, cluster.get(self._waiting, "build the model"), strict=True):
            check_agreement(before.description, described, "the job", str(peer))
        self._state.reform(self._config, self.workers, {**self._added, **self._servers})
        log.warning(
            "%d workers and %d servers instead of %d and %d from step %d on; training stopped for %.2f s",
            cluster.job.num_workers, cluster.job.num_servers, before.num_workers, before.num_servers,
            cluster.client.position.version // cluster.job.versions_per_step + 1, time.monotonic() - began,
        )  # fmt: skip

    def cancel(self) -> None:
        """Ends what was started for it."""
        for actor in (*self._added.values(), *self._servers.values()):
            ray.kill(actor, no_restart=True)
        if self._room is not None:
            self._room.release()


class Shrink:
    """Goes on without some workers, whose successors do not come; the others are numbered anew.

    Args:
        cluster: the job's processes.
        missing: indices of those that are gone.
        state: of the job.
    """

    def __init__(self, cluster: Cluster, missing: Collection[int], state: JobState) -> None:
        self._cluster = cluster
        self._missing = missing
        self._state = state

    def ready(self) -> bool:
        """At once."""
        return True

    def cancel(self) -> None:
        """Nothing was started."""

    def apply(self) -> None:
        """Makes it so, between two steps."""
        cluster = self._cluster
        keep = [index for index in range(cluster.job.num_workers) if index not in self._missing]
        cluster.successors.give_up_on(self._missing)
        self._state.reform(cluster.job.config, len(keep), keep=keep)
        gone = ", ".join(str(worker_peer(index)) for index in self._missing)
        log.warning("the cluster has no room for a successor of %s: going on with %d workers", gone, len(keep))


class Range:
    """As many workers as the cluster has room for, within bounds.

    Args:
        cluster: the job's processes.
        least, most: how many there may be.
        state: of the job.
    """

    def __init__(self, cluster: Cluster, least: int, most: int, state: JobState) -> None:
        self._cluster = cluster
        self._least, self._most = least, most
        self._state = state
        self._looked = time.monotonic()
        self._pause = _LOOK_SECONDS

    def look(self) -> Resize | Shrink | None:
        """What should be changed, if anything; to be asked often."""
        cluster, now = self._cluster, time.monotonic()
        workers, patience = cluster.job.num_workers, cluster.settings.start_timeout
        starting = cluster.successors.starting
        if late := [index for index, start in starting.items() if now - start.began > patience]:
            return Shrink(cluster, late, self._state) if workers - len(late) >= self._least else None
        if now - self._looked < self._pause or workers >= self._most or starting:
            return None
        self._looked = now
        bundle = worker_bundle(cluster.job.devices_per_worker, cluster.gpu, cluster.settings.cpus_per_worker)
        more = min(self._most - workers, fitting(bundle) + max(len(cluster.nodes) - workers, 0))
        if more < 1:
            return None
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)  # what is free may be in pieces: then it asks more rarely
        return Resize(cluster, workers + more, cluster.job.config, self._state)
