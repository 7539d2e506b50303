"""Nodes that are about to go: what runs there moves away before, without anything having died."""

from __future__ import annotations

import time
from typing import Any

import ray

from steepest.cluster.diagnostics import never_ran
from steepest.cluster.job_state import JobState
from steepest.cluster.launch import Cluster
from steepest.cluster.placement import Reservation, ask_for_room
from steepest.engine.job import check_agreement
from steepest.errors import ResourcesError
from steepest.messages.message import Peer, worker_peer


def are_up(calls: list[Any], timeout: float, deadline: float) -> bool:
    """Return whether calls that end when processes are up have ended.

    Raises:
        ResourcesError: a process is gone, or the deadline (of `time.monotonic`) is over.
    """
    up = len(ray.wait(calls, num_returns=len(calls), timeout=timeout)[0]) == len(calls)
    if (up and any(never_ran(call) for call in calls)) or (not up and time.monotonic() > deadline):
        raise ResourcesError(
            "a process for another size, or place, of the job did not come up: it goes on as before"
        )
    return up


class Move:
    """Moves a job's processes away from nodes; the new ones start while the old ones train.

    Where there is no room for the workers elsewhere, the others go on without them.

    Args:
        cluster: the job's processes.
        nodes: to leave, and when they go.
        least: how many workers can go on without the others.
        state: of the job.
        why: what is said of the nodes.
    """

    def __init__(
        self,
        cluster: Cluster,
        nodes: dict[str, float],
        least: int,
        state: JobState,
        why: str = "will go",
    ) -> None:
        self._cluster = cluster
        self._state = state
        self.nodes = nodes
        self._why = why
        self._began = time.monotonic()
        self._leaving = {peer for peer, place in cluster.places.items() if place.node in nodes}
        self._workers = sorted(peer.index for peer in self._leaving if peer.role == "worker")
        self._fewer = cluster.job.num_workers - len(self._workers)
        self._least = least
        self._added: dict[Peer, Any] = {}
        self._placement: dict[int, int] = {}
        self._calls: list[Any] = []
        self._room: Reservation | None = None
        self._started = not self._workers
        left = [when - time.time() for when in nodes.values() if when]
        self._patience = min(
            [cluster.run_config.deadlines.start, *(max(seconds, 0.0) / 3 for seconds in left)]
        )
        if self._workers:
            self._room = ask_for_room(
                len(self._workers), cluster.bundle, {*nodes, *cluster.placement.failing}
            )
        else:
            self._start()

    def ready(self) -> bool:
        """Return whether new processes are up, or there is no room and the others can do without.

        Raises:
            ResourcesError: there is no room, and they cannot; or something did not come up.
        """
        if not self._started:
            assert self._room is not None
            found, _ = ray.wait([self._room.group.ready()], timeout=0)
            late = time.monotonic() - self._began > self._patience
            if not found and not late:
                return False
            if not found:
                self._room.release()
                self._room = None
                if self._fewer < self._least:
                    raise ResourcesError(
                        f"{', '.join(sorted(self.nodes))} {self._why}, and there is no room "
                        f"elsewhere for {len(self._workers)} workers, of which {self._least} at "
                        "least must stay: add nodes"
                    )
            self._start()
        up = are_up(self._calls, 0.0, self._began + 5 * self._cluster.run_config.deadlines.start)
        return (
            up and not self._cluster.successors.starting
        )  # who is replaced just now could not let go of its roles

    def _start(self) -> None:
        cluster, self._started = self._cluster, True
        stays = [
            place
            for place in cluster.placement.order
            if cluster.placement.nodes([place])[0] not in self.nodes
        ]
        if self._room is not None:
            before = len(cluster.placement.order)
            cluster.placement.add(self._room)
            self._room = None
            new = cluster.placement.order[before:]
            stays += new
            self._placement = dict(zip(self._workers, new, strict=True))
            for index, seat in self._placement.items():
                self._added[worker_peer(index)] = actor = cluster.start_worker(index, seat)
                self._calls.append(cluster.successors.build(actor, index))
        for number, peer in enumerate(
            sorted(peer for peer in self._leaving if peer.role == "server")
        ):
            self._added[peer] = cluster.start_server(peer.index, stays[number % len(stays)])
            self._calls.append(self._added[peer].place.remote())

    def cancel(self) -> None:
        """End the processes that were started for the move."""
        for actor in self._added.values():
            if actor not in self._cluster.actors.values():
                ray.kill(actor, no_restart=True)
        if self._room is not None:
            self._room.release()

    def again(self) -> Move | None:
        """Return the same move of what is another job by now; None if it has left the nodes."""
        self.cancel()
        if all(place.node not in self.nodes for place in self._cluster.places.values()):
            return None
        return Move(self._cluster, self.nodes, self._least, self._state, self._why)

    def apply(self) -> None:
        """Have the new processes take over; called between two steps."""
        cluster, began = self._cluster, time.monotonic()
        cluster.extend_deadline()
        for peer, described in zip(
            self._added, cluster.get(self._calls, "start again"), strict=True
        ):
            if peer.role == "worker":
                check_agreement(cluster.job.description, described, "the job", str(peer))
        leaving = [cluster.placement.order[index] for index in self._workers]
        staying = [index for index in range(cluster.job.num_workers) if index not in self._workers]
        hosts = sorted({cluster.places[peer].host for peer in self._leaving})
        keep = {index: index for index in staying} if self._placement else dict(enumerate(staying))
        workers = cluster.job.num_workers if self._placement else len(staying)
        self._state.reform(cluster.job.config, workers, self._added, keep, self._placement)
        for seat in leaving:
            cluster.placement.retire(seat)
        cluster.successors.leave(self.nodes)
        step = cluster.step + 1
        who = ", ".join(map(str, sorted(self._leaving)))
        cluster.note(
            "moved",
            f"{', '.join(hosts)} {self._why}: {who} moved away; {workers} workers, "
            f"{cluster.job.global_batch} samples a step, from step {step} on; training stopped for "
            f"{time.monotonic() - began:.2f} s",
        )
