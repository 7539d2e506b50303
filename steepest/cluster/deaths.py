"""Which of a job's processes are dead, and why; a process declared dead is killed."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from steepest.cluster.remote_error import RemoteError
from steepest.messages.message import Peer

if TYPE_CHECKING:
    from steepest.cluster.launch import Cluster

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Death:
    """How a process ended.

    Attributes:
        cause: in words.
        traceback: of the Python error that ended its router, while the process itself lives on;
            empty otherwise.
    """

    cause: str
    traceback: str = ""


@dataclass(frozen=True)
class _Defect:
    """A process that ended by an error of its own.

    Attributes:
        watch: the call that watched it.
        version: committed by then.
        repeated: whether the one before it in the same seat ended so too, at the same version.
    """

    watch: Any
    version: int
    repeated: bool


class Deaths:
    """The dead of a job. Each is killed, so that its CPUs and memory are free for its successor.

    Args:
        cluster: the job's processes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[Any, Death] = {}  # by the call that watches the process
        self._defects: dict[int, _Defect] = {}  # the last one, by seat

    def cause(self, peer: Peer) -> str | None:
        """Return why a process is dead; None while it serves.

        A process whose router ended by an error is killed.
        """
        death = self._death(peer)
        return None if death is None else death.cause

    def traceback(self, peer: Peer) -> str:
        """Return the traceback of the error that ended a process' router; empty if none did."""
        death = self._death(peer) if peer in self._cluster.watches else None
        return "" if death is None else death.traceback

    def declare(self, peer: Peer, why: str) -> str:
        """Declare a process dead and kill it, although it may live out of reach.

        Args:
            peer: the process.
            why: it is believed to be dead.

        Returns:
            The cause of its death: Ray's explanation, if there is any, or `why`.
        """
        if (cause := self.cause(peer)) is not None:
            return cause
        self._known[self._cluster.watches[peer]] = Death(why)
        self._kill(peer)
        return why

    def is_repeated(self, peer: Peer, seat: int) -> bool:
        """Return whether starting another process in a dead one's seat is of no use.

        It is when the process ended by an error of its own, as the one before it in the same seat
        did, with no version committed in between. The end of the process is remembered.
        """
        if not self.traceback(peer):
            return False
        watch, version = self._cluster.watches[peer], self._cluster.client.position.version
        before = self._defects.get(seat)
        if before is None or before.watch != watch:
            before = _Defect(watch, version, before is not None and before.version == version)
            self._defects[seat] = before
        return before.repeated

    def _death(self, peer: Peer) -> Death | None:
        watch = self._cluster.watches[peer]
        if watch in self._known:
            return self._known[watch]
        death = death_of(watch)
        if death is not None:
            self._known[watch] = death
            if death.traceback:
                place = self._cluster.places[peer]
                log.warning(
                    "%s on %s (pid %d): %s; the process is killed; %s",
                    peer, place.host, place.pid, death.cause, death.traceback.rstrip(),
                )  # fmt: skip
                self._kill(peer)
        return death

    def _kill(self, peer: Peer) -> None:
        """Kill a process, also one that is stopped or out of reach."""
        place = self._cluster.places[peer]
        if place.node == ray.get_runtime_context().get_node_id():
            with contextlib.suppress(
                ProcessLookupError, PermissionError
            ):  # Ray's word reaches no stopped process
                os.kill(place.pid, signal.SIGKILL)
        ray.kill(self._cluster.actors[peer], no_restart=True)


def death_of(watch: Any) -> Death | None:
    """Return how an actor ended; None while it serves.

    Args:
        watch: a call of its `Process.watch`.
    """
    ready, _ = ray.wait([watch], timeout=0)
    if not ready:
        return None
    try:
        ray.get(watch)
    except ray.exceptions.RayActorError as error:
        text = " ".join(str(error).split())
        if "connection error code 2" in text:
            return Death("its process is gone: killed by a signal, or for want of memory")
        for mark in ("The actor is dead because", "Worker exits", "Worker unexpectedly exits"):
            if mark in text:
                return Death(text[text.index(mark) :].partition(" Some common causes")[0][:300])
        return Death(text[:300])
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, RemoteError):
            described = error.cause.told
            return Death(f"its router ended: {described['error']}", described["traceback"])
        return Death(f"its router ended: {error.cause}", str(error))
    return Death("it was stopped")
