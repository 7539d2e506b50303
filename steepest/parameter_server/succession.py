"""How users find the successors of a parameter server's servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from steepest.core.transport.channel import Address


@dataclass(frozen=True)
class Succession:
    """The data with which users go on after a server's death."""

    number: int  # from 1
    addresses: tuple[Address, ...] = ()  # at which all servers listen since then
    # pushes of earlier connections: by user's index and push's number, the version
    committed: Mapping[tuple[int, int], int] = field(default_factory=dict)
    failure: str = ""  # why there are no successors; empty if there are


# The newest one that this process knows, by token of the parameter server.
_newest: dict[bytes, Succession] = {}


def newest(token: bytes, addresses: Sequence[Address]) -> tuple[Address, ...]:
    """Return the addresses of servers as this process knows them; `addresses` are the first ones."""
    succession = _newest.get(token)
    return tuple(addresses) if succession is None else succession.addresses


def number_of(token: bytes) -> int:
    """Return the number of the newest succession that this process knows."""
    known = _newest.get(token)
    return 0 if known is None else known.number


def learn(token: bytes, succession: Succession) -> None:
    """Note a succession."""
    if number_of(token) < succession.number:
        _newest[token] = succession
