"""Moves processes away from nodes that will go, or that failed again and again."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from steepest.core.messages.message import Peer
from steepest.core.system import system
from steepest.errors import ResourcesError
from steepest.runtime.cluster import Cluster
from steepest.runtime.job_runtime import runtime
from steepest.runtime.recovery.starting import Starting
from steepest.runtime.room import Room

log = logging.getLogger(__name__)
_LOOK_SECONDS = 1.0
_WILL_GO = "will go"


class Leaving:
    """Starts replacements of the processes on nodes that are to be left, while these still train."""

    def __init__(self, cluster: Cluster, starting: Starting) -> None:
        self.nodes: frozenset[str] = frozenset()  # to be left
        self._why = ""
        self.full = False  # whether there is no room elsewhere for the workers there
        self._cluster = cluster
        self._starting = starting
        self._known: set[str] = set()
        self._told: set[str] = set()
        self._looked = 0.0
        self._room: Room | None = None
        self._patience = 0.0  # seconds that room is waited for

    @property
    def peers(self) -> frozenset[Peer]:
        """The processes on these nodes."""
        places = self._cluster.places
        return frozenset(peer for peer, place in places.items() if place.node in self.nodes)

    @property
    def in_words(self) -> str:
        """The hosts that are being left, and why; "" if none is."""
        hosts = sorted({self._cluster.members[peer].place.host for peer in self.peers})
        return f"{', '.join(hosts)} {self._why}" if hosts else ""

    def look(self, least: int) -> None:
        """Find nodes that will go, ask for room elsewhere, and start processes there."""
        now = system().now()
        if now - self._looked >= _LOOK_SECONDS and not self.nodes:
            self._looked = now
            failing = dict.fromkeys(self._cluster.placement.failing, 0.0)
            for nodes, why in (
                (runtime().leaving_nodes(), _WILL_GO),
                (failing, "failed again and again"),
            ):
                if not self.nodes:
                    self._begin(nodes, why)
        if not self.nodes:
            return
        self._start_again()
        if self.full:
            return
        if self._room is not None and self._room.is_there:
            self._start(self._cluster.placement.add(self._room.seats))
            self._room = None
        elif self._room is not None and now - self._room.began > self._patience:
            self._without_room(least)

    def _start_again(self) -> None:
        """Start replacements that have died once more; give the move up if one is late."""
        starting = self._starting
        moving = {peer: start for peer, start in starting.instead.items() if peer in self.peers}
        if late := [start for start in moving.values() if starting.is_late(start)]:
            log.warning(
                "the successor of %s did not come up within %g s: nothing moves away from %s",
                late[0].peer, starting.patience, ", ".join(sorted(self.nodes)),
            )  # fmt: skip
            starting.give_up(moving.values())
            self.nodes, self.full = frozenset(), False
            return
        starting.instead |= {peer: starting.again(start) for peer, start in moving.items()}

    def _begin(self, nodes: Mapping[str, float], why: str) -> None:
        """Begin to leave nodes, each with the time at which it goes, or 0."""
        cluster = self._cluster
        here = {place.node for place in cluster.places.values()}
        going = {node: at for node, at in nodes.items() if node in here - self._known}
        self._known |= going.keys()
        self.nodes, self._why = frozenset(going), why
        left = [max(at - system().time(), 0.0) / 3 for at in going.values() if at]
        self._patience = min([cluster.run_config.deadlines.start, *left])
        if not going:
            return
        stays = runtime().may_grow or bool(runtime().nodes().keys() - going.keys())
        if why == _WILL_GO:
            self._tell(going, moves=stays)
        if not stays:  # there will never be another node
            self.nodes = frozenset()
            return
        workers = sum(peer.role == "worker" for peer in self.peers)
        try:
            if workers:
                without = {*going, *cluster.placement.failing}
                self._room = Room(workers, cluster.bundle, without)
            else:
                self._start([])
        except ResourcesError as error:
            log.warning("%s", error)
            self.nodes = frozenset()

    def _tell(self, going: Mapping[str, float], *, moves: bool) -> None:
        """Log, once for each node, that it goes, when, and what is moved away from it."""
        places = self._cluster.places
        for node in sorted(going.keys() - self._told):
            self._told.add(node)
            peers = sorted(peer for peer, place in places.items() if place.node == node)
            left = max(going[node] - system().time(), 0.0)
            when = f"in {left:.0f} s" if going[node] else "at a time that is not known"
            host = f"{places[peers[0]].host} {_WILL_GO} {when}"
            if not moves:
                self._cluster.note("draining", f"{host}, and there is no other node to move to")
                continue
            self._cluster.note(
                "draining",
                f"{host}: {', '.join(map(str, peers))} "
                f"{'is' if len(peers) == 1 else 'are'} to move away while training goes on",
            )

    def _without_room(self, least: int) -> None:
        """Give up the room that was asked for; the job goes on without these workers, or no process moves."""
        self._release()
        workers = sum(peer.role == "worker" for peer in self.peers)
        if self._cluster.job.num_workers - workers >= least:
            self.full = True
            self._start([])
            return
        log.warning(
            "%s %s, and there is no room elsewhere for %d workers, of which %d at least must stay: "
            "add nodes",
            ", ".join(sorted(self.nodes)), self._why, workers, least,
        )  # fmt: skip
        self.nodes = frozenset()

    def _start(self, seats: list[int]) -> None:
        """Start the processes that take over."""
        cluster, starting = self._cluster, self._starting
        placement = cluster.placement
        staying = [seat for seat in placement.order if placement.nodes([seat])[0] not in self.nodes]
        workers = sorted(peer for peer in self.peers if peer.role == "worker")
        for peer, seat in zip(workers, seats, strict=False):
            starting.instead[peer] = starting.worker(peer.index, seat)
        servers = sorted(peer for peer in self.peers if peer.role == "server")
        for number, peer in enumerate(servers):
            beside = staying[number % len(staying)]
            starting.instead[peer] = starting.server(peer, seat=beside)

    def _release(self) -> None:
        if self._room is not None:
            self._room.release()
            self._room = None

    def end(self) -> None:
        """End the move, done or given up; nodes that are still used are found again."""
        self._release()
        here = {place.node for place in self._cluster.places.values()}
        self._known -= here & self.nodes
        self.nodes, self.full, self._looked = frozenset(), False, 0.0
