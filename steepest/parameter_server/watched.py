"""The servers of a parameter server as a report sees them, see `steepest.runtime.activity`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from steepest.core.messages.message import Peer, server_peer
from steepest.core.status import Status
from steepest.parameter_server.access import Access
from steepest.parameter_server.connection import Connection
from steepest.runtime.places import Place


class WatchedServers:
    """The servers of a parameter server, for a report.

    Args:
        connection: returns this process' connection to them; None for none.
    """

    def __init__(self, access: Access, connection: Callable[[], Connection | None]) -> None:
        self._access = access
        self._connection = connection

    @property
    def places(self) -> Mapping[Peer, Place]:
        """Nothing: where servers run is not known before they answer."""
        return {}

    @property
    def actors(self) -> Mapping[Peer, Any]:
        """The handle of each server; none in a process that cannot ask servers."""
        servers = self._access.servers
        handles = servers.handles if servers.names_successors else ()
        return {server_peer(index): handle for index, handle in enumerate(handles)}

    def roles(self) -> list[tuple[Peer, Status]]:
        """Return what this process waits for, as a user of the servers."""
        connection = self._connection()
        return [] if connection is None else connection.doing()

    def processes(self) -> list[Any]:
        """Return the handles of the servers."""
        return list(self.actors.values())

    def silence(self, actor: Any) -> float:
        """Return 0: no signs of life are asked for between reports."""
        return 0.0
