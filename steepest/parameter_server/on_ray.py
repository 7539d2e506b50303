"""A parameter server's servers as actors of Ray, which live as long as any process has their handles."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from steepest.errors import PeerLostError, SteepestError
from steepest.parameter_server.actor import ServerActor
from steepest.parameter_server.servers import THREADS, Search
from steepest.parameter_server.succession import Succession
from steepest.runtime.job_runtime import (
    Call,
    LateError,
    ProcessAwayError,
    ProcessDiedError,
    runtime,
)
from steepest.runtime.places import Place
from steepest.runtime.tls.connections import Identity

_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 5.0


#: Whether it was: then it can call no actor.
_is_forked = False


def is_forked() -> bool:
    """Return whether this process was forked from one that was connected to Ray.

    Such a process has servers' addresses, and can connect to them, but lacks Ray's threads.
    """
    return _is_forked


def _note_fork() -> None:
    global _is_forked
    ray = sys.modules.get("ray")
    _is_forked = _is_forked or (ray is not None and ray.is_initialized())


os.register_at_fork(after_in_child=_note_fork)


@dataclass(frozen=True)
class RayServers:
    """`Servers` as actors of Ray, which starts them again under the same handles."""

    handles: tuple[Any, ...]

    @property
    def node(self) -> str:
        """Ray's id of this node."""
        node: str = ray.get_runtime_context().get_node_id()
        return node

    @property
    def names_successors(self) -> bool:
        """Whether this process may call actors: Ray's threads are not in a fork."""
        return not is_forked()

    def revive(self) -> None:
        """Do nothing: Ray starts dead actors again."""

    def end_one(self, index: int) -> None:
        """Kill the process of an actor."""
        ray.kill(self.handles[index], no_restart=False)

    def announce(self, places: Sequence[Place], succession: Succession | None = None) -> None:
        """Do nothing: users ask the actors."""

    def search(self, token: bytes, name: str) -> RaySearch:
        """Return a search."""
        return RaySearch(token, self.handles, name)

    def end(self) -> None:
        """Kill the actors."""
        if is_forked():
            raise SteepestError(
                "this process was forked, and cannot end the servers: call shutdown() in a process "
                "that is connected to Ray"
            )
        if ray.is_initialized():
            for handle in self.handles:
                ray.kill(handle, no_restart=True)


def start_actors(
    count: int, copies: int, transport: str, token: bytes, identity: Identity | None
) -> RayServers:
    """Return new servers' actors; dead ones start again if there are copies."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(ServerActor).options(
        num_cpus=0,
        scheduling_strategy=here if transport == "shared" else "SPREAD",
        max_concurrency=THREADS,
        max_restarts=-1 if copies > 1 else 0,
    )
    return RayServers(
        tuple(actor.remote(f"steepest server {i}", token, identity) for i in range(count))
    )


class RaySearch(Search):
    """Asks all servers' actors (`servers`: their handles), which Ray starts again under the same handles."""

    def __init__(self, token: bytes, servers: Sequence[Any], name: str) -> None:
        super().__init__(token, name)
        self._servers = tuple(servers)
        self._asked: dict[Call, Any] = {}  # the server, by the call

    def look(self, seconds: float) -> Succession | None:
        """Return a succession that this connection has not taken part in."""
        waiting = set(self._asked.values())
        for server in self._servers:
            if server not in waiting:
                self._asked[runtime().call(server, "succession", self._number)] = server
        newest, dead = None, None
        for call in runtime().wait(list(self._asked), seconds, 1):
            del self._asked[call]
            try:
                answer = call.get()
            except ProcessAwayError:
                continue  # Ray starts it again
            except ProcessDiedError as error:
                dead = error
                continue
            if answer is not None and (newest is None or answer.number > newest.number):
                newest = answer
        if dead is not None and newest is None and self._all_dead():
            raise PeerLostError(f"{self._name}: it was shut down or died ({dead})")
        if newest is None:
            time.sleep(min(seconds, _PAUSE_SECONDS))
        elif newest.failure:
            raise PeerLostError(f"{self._name}: {newest.failure}")
        return newest

    def _all_dead(self) -> bool:
        """Return whether no server's actor lives, or is being started again."""
        calls = [runtime().call(server, "succession", self._number) for server in self._servers]
        for call in calls:
            try:
                call.get(_ANSWER_SECONDS)
            except (ProcessAwayError, LateError):
                return False
            except ProcessDiedError:
                continue
            return False
        return True
