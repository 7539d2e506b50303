"""The processes of a parameter server's servers, as holders of a handle reach them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from steepest.parameter_server.succession import Succession, learn, number_of
from steepest.runtime.job_runtime import Call, runtime

if TYPE_CHECKING:
    from steepest.runtime.places import Place

THREADS = 16  # of a server's process: calls that it may answer at once


class Search(ABC):
    """The search of one connection for the successors of servers; used by one thread at a time.

    Args:
        token: of the parameter server.
        name: of it, in errors.
    """

    def __init__(self, token: bytes, name: str) -> None:
        self._token, self._name = token, name
        self._number = number_of(token)

    @abstractmethod
    def look(self, seconds: float) -> Succession | None:
        """Return a succession that the connection has not taken part in, if one comes within some seconds.

        Raises:
            PeerLostError: there will be none: the servers were shut down, or too many have died.
        """

    def done(self, succession: Succession) -> None:
        """Note that the connection has taken part in a succession."""
        self._number = succession.number
        learn(self._token, succession)


class Servers(Protocol):
    """The servers' processes; it may be pickled."""

    @property
    def node(self) -> str:
        """A name that equals the servers' if this process is on their node.

        Raises:
            ConfigurationError: they cannot be reached from here.
        """

    @property
    def handles(self) -> Sequence[Any]:
        """The handles that `runtime()` calls, as far as this process may call them."""

    @property
    def names_successors(self) -> bool:
        """Whether this process can ask for the servers' successors."""

    def revive(self) -> None:
        """Start dead servers again; in the process that has made them."""

    def end_one(self, index: int) -> None:
        """End a server that is to be started again."""

    def announce(self, places: Sequence[Place], succession: Succession | None = None) -> None:
        """Tell users where the servers run, and of a succession; in the process that has made them."""

    def search(self, token: bytes, name: str) -> Search:
        """Return the search of a connection, which has the parameter server's token, and its name in errors."""

    def end(self) -> None:
        """End the servers for all users; SteepestError: this process cannot."""


def call_all(servers: Servers, method: str, *arguments: Any) -> list[Call]:
    """Call a method of each server's process."""
    return [runtime().call(handle, method, *arguments) for handle in servers.handles]
