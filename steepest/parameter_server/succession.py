"""How users find the successors of a parameter server's servers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from steepest.core.transport.channel import Address
from steepest.errors import PeerLostError


@dataclass(frozen=True)
class Succession:
    """What users need to go on after a server's death."""

    number: int  # from 1
    addresses: tuple[Address, ...] = ()  # at which all servers listen since then
    # pushes of earlier connections: by user's index and push's number, the version
    committed: Mapping[tuple[int, int], int] = field(default_factory=dict)
    failure: str = ""  # why there are no successors; empty if there are


# The newest one that this process knows, by token of the parameter server.
_newest: dict[bytes, Succession] = {}


def newest(token: bytes, addresses: Sequence[Address]) -> tuple[Address, ...]:
    """Return the addresses of servers as this process knows them; `addresses` are the first ones."""
    found = _newest.get(token)
    return tuple(addresses) if found is None else found.addresses


class Search:
    """The search of one connection for the successors of servers; used by one thread at a time.

    It asks all servers' actors, which keep their handles as Ray starts them again.

    Args:
        token: of the parameter server.
        servers: handles of the actors.
        name: of the parameter server in error messages.
    """

    def __init__(self, token: bytes, servers: Sequence[Any], name: str) -> None:
        self._token, self._servers, self._name = token, tuple(servers), name
        known = _newest.get(token)
        self._number = 0 if known is None else known.number
        self._asked: dict[Any, Any] = {}  # the server, by reference of its answer

    def look(self, seconds: float) -> Succession | None:
        """Return a succession that this connection has not taken part in, if one comes within `seconds`."""
        # PeerLostError: there will be none: the servers were shut down, or too many have died.
        waiting = set(self._asked.values())
        for server in self._servers:
            if server not in waiting:
                self._asked[server.succession.remote(self._number)] = server
        ready, _ = ray.wait(list(self._asked), num_returns=1, timeout=seconds)
        found, dead = None, 0
        for reference in ready:
            del self._asked[reference]
            try:
                answer = ray.get(reference)
            except ray.exceptions.ActorUnavailableError:
                continue  # Ray starts it again
            except ray.exceptions.RayActorError as error:
                dead += 1
                found_dead = error
                continue
            if answer is not None and (found is None or answer.number > found.number):
                found = answer
        if dead and found is None and self._all_dead():
            raise PeerLostError(f"{self._name}: it was shut down or died ({found_dead})")
        if found is None:
            time.sleep(min(seconds, 0.05))
        elif found.failure:
            raise PeerLostError(f"{self._name}: {found.failure}")
        return found

    def _all_dead(self) -> bool:
        """Return whether no server's actor lives, or is being started again."""
        references = [server.succession.remote(self._number) for server in self._servers]
        for reference in references:
            try:
                ray.get(reference, timeout=5.0)
            except ray.exceptions.ActorUnavailableError:
                return False
            except ray.exceptions.RayActorError:
                continue
            except ray.exceptions.GetTimeoutError:
                return False
            return False
        return True

    def done(self, found: Succession) -> None:
        """Note that the connection has taken part in a succession."""
        self._number = found.number
        known = _newest.get(self._token)
        if known is None or known.number < found.number:
            _newest[self._token] = found
