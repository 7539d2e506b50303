"""Processes that are starting: in dead ones' places, as further ones, and as spare ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from steepest.core.engine.job import check_agreement
from steepest.core.messages.message import Peer, worker_peer
from steepest.core.system import system
from steepest.core.tensors.layout import ChunkSpec
from steepest.runtime.calls import has_answered, never_ran
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import LateError, ProcessDiedError, runtime
from steepest.runtime.places import Place, kill

_ANSWER_SECONDS = 5.0
#: A process has to come up within this many times `DeadlineConfig.start` seconds.
_STARTS = 5


@dataclass(frozen=True, eq=False)
class Start:
    """A process that is starting."""

    peer: Peer  # the role for which it starts; a worker's models are built for that number
    seat: int | None  # in or beside which it runs; None for a server placed as the job's size says
    actor: Any
    watch: Any  # a call that ends when the process does
    # calls that have ended when it is up; the first one of a worker returns its `Description`, the last one the `Place`
    building: list[Any]
    began: float  # when the first process was started for this
    cause: str = ""  # of the death of its predecessor; "" if none died
    spare: bool = False  # whether it was kept in reserve
    cut: ChunkSpec | None = None  # of a worker's models
    # when this process was started
    started: float = field(default_factory=lambda: system().now())
    # by `Starting.clock`, since when it has had to come up: from `began`, or when one that had come up before it died
    awaited: float = field(kw_only=True)

    @property
    def is_up(self) -> bool:
        """Whether it can join: all calls have ended, even if by an error of the user's code."""
        return all(call.done() for call in self.building) and not self.is_dead

    @property
    def is_dead(self) -> bool:
        """Whether its process died, or could not be started."""
        return self.watch.done() or any(never_ran(call) for call in self.building)

    @property
    def is_placed(self) -> bool:
        """Whether it is known where its process runs."""
        return has_answered(self.building[-1]) and not self.is_dead

    @property
    def was_up(self) -> bool:
        """Whether it had come up, though it may have died since."""
        return all(has_answered(call) for call in self.building)

    @property
    def place(self) -> Place:
        """Where it runs; it must be up."""
        place: Place = self.building[-1].get()
        return place


class Starting:
    """Starts a job's processes, while it trains."""

    def __init__(self, cluster: Cluster) -> None:
        self.instead: dict[Peer, Start] = {}  # by the process in whose place it starts
        self.workers: list[Start] = []  # further ones
        self.servers: list[Start] = []  # likewise
        self._cluster = cluster
        self._unwatched = 0.0  # seconds

    def __iter__(self) -> Iterator[Start]:
        """Iterate over all of them."""
        return iter([*self.instead.values(), *self.workers, *self.servers])

    def worker(self, index: int, seat: int, cause: str = "", actor: Any = None) -> Start:
        """Start a worker's process, which builds its models."""
        spare, cluster = actor is not None, self._cluster
        actor = actor or cluster.start_worker(index, seat)
        building = self._building(actor, index)
        cut, now = self._cluster.job.cut, system().now()
        watch = runtime().call(actor, "watch")
        return Start(
            worker_peer(index),
            seat,
            actor,
            watch,
            building,
            now,
            cause,
            spare,
            cut,
            awaited=self.clock(),
        )

    def server(
        self,
        peer: Peer,
        cause: str = "",
        actor: Any = None,
        *,
        seat: int | None = None,
        spare: bool = False,
    ) -> Start:
        """Start a server's process."""
        actor = actor or self._cluster.start_server(peer.index, seat)
        building = [runtime().call(actor, "reserve", self._cluster.job.description.layout.nbytes)]
        building.append(runtime().call(actor, "place"))
        now, watch = system().now(), runtime().call(actor, "watch")
        return Start(peer, seat, actor, watch, building, now, cause, spare, awaited=self.clock())

    def _building(self, actor: Any, index: int) -> list[Any]:
        cluster, job = self._cluster, self._cluster.job
        built = runtime().call(
            actor,
            "build",
            cluster.creator,
            index,
            job.devices_per_worker,
            job.seed,
            job.cut,
            cluster.size,
        )
        return [built, runtime().call(actor, "place")]

    def fitting(self, start: Start, index: int) -> Start:
        """Return a worker that has, or builds, the models of a number, cut as the job's are now."""
        cut = self._cluster.job.cut
        if (start.peer.index, start.cut) == (index, cut):
            return start
        building = self._building(start.actor, index)
        return replace(start, peer=worker_peer(index), building=building, cut=cut)

    @property
    def patience(self) -> float:
        """Seconds within which a process has to come up."""
        return _STARTS * self._cluster.run_config.deadlines.start

    def is_late(self, start: Start) -> bool:
        """Return whether a process has taken so long to come up that it is no longer awaited."""
        return self.clock() - start.awaited > self.patience and not start.is_up

    def clock(self) -> float:
        """Return the time by which processes have to come up, in seconds; it stands still in `unwatched`."""
        return system().now() - self._unwatched

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Return a context for other waits; a process that dies during it is not started again meanwhile."""
        began = system().now()
        try:
            yield
        finally:
            self._unwatched += system().now() - began

    def check_models(self, starts: Mapping[Peer, Start]) -> None:
        """Check that workers that are up have built the job's model; ModelError, ModelRaisedError: one has not."""
        calls, job = [start.building[0] for start in starts.values()], self._cluster.job
        descriptions = self._cluster.get(calls, self._cluster.building, starts)
        for peer, described in zip(starts, descriptions, strict=True):
            check_agreement(job.description, described, "the job", str(peer))

    def lose(self, start: Start) -> None:
        """End a process that is silent; `again` starts another."""
        kill(start.place, start.actor)
        dead = replace(start, watch=runtime().put(None))  # Ray takes a while to say so
        self.instead = {peer: dead if s is start else s for peer, s in self.instead.items()}
        self.workers = [dead if s is start else s for s in self.workers]
        self.servers = [dead if s is start else s for s in self.servers]

    def again(self, start: Start) -> Start:
        """Return the start of another process if one has died before it joined; else the same.

        A process that has not begun to run in half the time counts as dead, too. The new one has the
        rest of the time to come up.
        """
        hangs = system().now() - start.started > self.patience / 2 and not start.is_placed
        if hangs and not start.is_dead:
            runtime().end(start.actor)
        elif not start.is_dead:
            return start if start.peer.role == "server" else self.fitting(start, start.peer.index)
        if start.peer.role == "server":
            other = self.server(start.peer, start.cause, seat=start.seat)
        else:
            assert start.seat is not None
            other = self.worker(start.peer.index, start.seat, start.cause)
        return replace(other, began=start.began, awaited=start.awaited)

    def joined(self, members: Collection[Any]) -> None:
        """Forget the processes that have become part of the job."""
        self.instead = {p: s for p, s in self.instead.items() if s.actor not in members}
        self.workers = [start for start in self.workers if start.actor not in members]
        self.servers = [start for start in self.servers if start.actor not in members]

    def give_up(self, starts: Iterable[Start]) -> None:
        """End some of the processes."""
        dead = list(starts)
        for start in dead:
            runtime().end(start.actor)
        self.joined([start.actor for start in dead])


class _Spare(NamedTuple):
    """A spare process."""

    actor: Any
    placing: Any  # the call that says where it is
    seat: int


class Reserve:
    """Spare processes, which have imported what a worker needs."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._spares: list[_Spare] = []

    def fill(self, wanted: int) -> None:
        """Start spare processes until there are as many as wanted."""
        cluster = self._cluster
        for number in range(len(self._spares), wanted):
            cpus = cluster.run_config.resources.cpus_per_worker
            seats = cluster.placement.order
            seat = seats[number % len(seats)]
            actor = cluster.start_process("spare", seat, 0, 0, cpus)
            size = replace(cluster.size, seed=cluster.job.seed)
            members = cluster.members.items()
            workers = [member.place for peer, member in members if peer.role == "worker"]
            runtime().call(actor, "prepare", cluster.creator, size, workers)
            self._spares.append(_Spare(actor, runtime().call(actor, "place"), seat))

    def take(self, node: str) -> Any | None:
        """Return a spare process on a node, if one is up, and remove it from the reserve."""
        for spare in list(self._spares):
            actor, placing, _ = spare
            if not placing.done():
                continue
            try:
                place: Place = placing.get()
                runtime().call(actor, "place").get(_ANSWER_SECONDS)
            except (ProcessDiedError, LateError):
                self._spares.remove(spare)
                continue
            if place.node == node:
                self._spares.remove(spare)
                return actor
        return None

    @property
    def actors(self) -> list[Any]:
        """The spare processes."""
        return [spare.actor for spare in self._spares]

    def leave(self, nodes: Collection[str]) -> None:
        """End spare processes on nodes that will go."""
        self.end(lambda s: has_answered(s.placing) and s.placing.get().node in nodes)

    def end_in(self, seats: Collection[int]) -> None:
        """End spare processes in seats that are to be given back; others are started elsewhere."""
        self.end(lambda spare: spare.seat in seats)

    def end(self, which: Callable[[_Spare], bool] = lambda spare: True) -> None:
        """End spare processes; all by default."""
        for spare in list(filter(which, self._spares)):
            self._spares.remove(spare)
            runtime().end(spare.actor)
