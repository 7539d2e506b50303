"""Room and seats for further workers, as the cluster has them or as the user asks for them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.errors import ResourcesError
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import runtime
from steepest.runtime.recovery.starting import Starting
from steepest.runtime.room import Room, fitting, require_possible

_LOOK_SECONDS = 1.0
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Wanted:
    """What the user wants of a job's processes."""

    config: Strategy
    least: int  # workers
    most: int
    exact: bool  # whether `most` are wanted, and fewer only while the cluster has no room for them
    before: Wanted | None = None  # what was wanted before the user asked for this; None if granted
    of_workers: bool = False  # whether another number of workers was asked for
    of_more: bool = False  # whether something else was asked for after it

    def asking(self, config: Strategy, workers: int | None) -> Wanted:
        """Return what is wanted once the user has also asked for this; `workers` is None for as many as now."""
        before, of_workers = self.before or self, self.of_workers or workers is not None
        if workers is not None:
            return Wanted(config, 1, workers, True, before, of_workers)
        return replace(
            self, config=config, before=before, of_workers=of_workers, of_more=self.of_workers
        )


class Missing(NamedTuple):
    """A dead worker without which the others continue; its successor joins later."""

    number: int  # that it had
    seat: int  # where it ran, and its successor will run
    cause: str  # of its death


class Growth:
    """Starts the processes that a job lacks."""

    def __init__(self, cluster: Cluster, starting: Starting) -> None:
        self.missing: list[Missing] = []  # of whom no successor has been started
        self._cluster = cluster
        self._starting = starting
        self._room: Room | None = None
        self._looked = system().now()
        self._pause = _LOOK_SECONDS

    def start_missing(self, wanted: Wanted) -> None:
        """Start processes of workers and servers that are wanted and that there is room for."""
        starting, have, most = self._starting, self._cluster.job.num_workers, wanted.most
        while self.missing and have + len(starting.workers) < most:
            starting.workers.append(starting.worker(*self.missing.pop(0)))
        missing = most - have - len(starting.workers)
        if missing <= 0:
            self.missing.clear()
        if missing < 0:
            starting.give_up(starting.workers[missing:])
        if self._room is not None:
            self._take_room()
        elif missing > 0:
            self._start_workers(missing, asked=wanted.of_workers)
        if self._room is None:
            # one who died may come back late: no server is placed beside that seat until then
            coming = sum(not start.cause or start.is_up for start in starting.workers)
            self._start_servers(wanted.config, min(have + coming, most))

    def _free_seats(self) -> list[int]:
        """Return the free seats on nodes that live and stay; Ray moves the seats of dead nodes."""
        placement, taken = self._cluster.placement, {start.seat for start in self._starting}
        free = [s for s in placement.order[self._cluster.job.num_workers :] if s not in taken]
        if not free:
            return []
        placement.look()
        living = {*runtime().nodes()}
        living -= runtime().leaving_nodes().keys()
        return [seat for seat in free if placement.nodes([seat])[0] in living]

    def _start_workers(self, missing: int, *, asked: bool) -> None:
        """Start workers on free seats, and ask for room for the others if that may help."""
        cluster, placement, now = self._cluster, self._cluster.placement, system().now()
        if not asked:
            worn_out = len(placement.retired) > cluster.job.num_workers + missing
            if now - self._looked < self._pause or worn_out:
                return
            self._looked = now
        free, serving = self._free_seats(), placement.serving_nodes
        if not asked:
            missing = min(missing, fitting(cluster.bundle, serving) + len(free))
            if missing < 1:
                return
        if (further := missing - len(free)) > 0:
            workers = cluster.job.num_workers + missing
            require_possible(workers, cluster.bundle)
            going = {*runtime().leaving_nodes()}
            # what is free may be in pieces, or another's by then: so it asks more rarely until it
            # has got some
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._room = Room(further, cluster.bundle, placement.failing | serving | going)
            return
        self._begin(free[:missing])

    def _begin(self, seats: Collection[int]) -> None:
        starting = self._starting
        for seat in seats:
            index = self._cluster.job.num_workers + len(starting.workers)
            starting.workers.append(starting.worker(index, seat))

    def _take_room(self) -> None:
        """Start workers in the room that was asked for, once it is there; give it up after a while."""
        assert self._room is not None
        limit = self._cluster.run_config.deadlines.start
        if self._room.is_there:
            self._cluster.placement.add(self._room.seats)
            self._room, self._pause = None, _LOOK_SECONDS
            self._begin(self._free_seats())
        elif system().now() - self._room.began >= limit:
            self.cancel()
            raise ResourcesError(
                f"the cluster has had no room for more workers for {limit:g} s: training goes on "
                f"with {self._cluster.job.num_workers}; stop what holds the rest, or add nodes"
            )

    def _start_servers(self, config: Strategy, workers: int) -> None:
        """Start the servers that are wanted with this number of workers."""
        cluster, servers = self._cluster, self._starting.servers
        have = sum(peer.role == "server" for peer in cluster.members)
        wanted = cluster.serving(config, workers)
        if have + len(servers) > wanted:
            self._starting.give_up(servers[max(wanted - have, 0) :])
        elif have + len(servers) < wanted:
            started = cluster.start_servers(config, workers, have + len(servers))
            for peer, actor in started.items():
                servers.append(self._starting.server(peer, actor=actor))

    @property
    def asks_for_room(self) -> bool:
        """Whether room for further workers is asked for."""
        return self._room is not None

    @property
    def awaits_successors(self) -> bool:
        """Whether successors of dead workers are on their way."""
        return bool(self.missing) or any(start.cause for start in self._starting.workers)

    def surplus(self, most: int) -> list[int]:
        """Return the seats that no worker has or will get; processes of other kinds may have them."""
        if self._room is not None or self._starting.workers:
            return []
        coming = {each.seat for each in (*self._starting, *self.missing)}
        workers = max(most, self._cluster.job.num_workers)
        return [s for s in self._cluster.placement.surplus(workers) if s not in coming]

    def cancel(self) -> None:
        """Give up the room that was asked for, and the processes that are starting."""
        if self._room is not None:
            self._room.release()
            self._room = None
        self._starting.give_up([*self._starting.workers, *self._starting.servers])
