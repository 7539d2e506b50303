"""How a process reaches the servers of a parameter server."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from steepest.core.transport.channel import Address
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.errors import DeadlineError, PeerLostError, ProtocolError
from steepest.parameter_server.connection import Connection, Reach
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.pusher import Pusher
from steepest.parameter_server.servers import Search, Servers
from steepest.parameter_server.succession import newest
from steepest.runtime.tls.connections import Identity, encryption_with

_PAUSE_SECONDS = 0.05  # between two attempts to connect
_CONNECT_SECONDS = 5.0  # for a user to connect to servers that have just begun to serve


@dataclass(frozen=True)
class Access:
    """What a process needs to use a parameter server."""

    group: ServerGroup
    servers: Servers
    # at which servers listen
    addresses: tuple[Address, ...]
    # the secret by which processes of this parameter server know each other
    token: bytes = field(repr=False)
    timeout: float  # seconds that a call may take
    max_in_flight: int  # asynchronous pushes of one process that may be uncommitted
    ways: str  # the transport, see `ParameterServer`
    # the certificate of processes of this parameter server; None without TLS
    identity: Identity | None = None

    @property
    def name(self) -> str:
        """Name of the parameter server in error messages."""
        return f"parameter server of {self.group.num_servers} servers"

    def connect(self) -> Connection:
        """Connect this process to all servers within `timeout` seconds; return the connection.

        Raises:
            PeerLostError: a server was shut down or died.
            DeadlineError: a server does not answer.
            ConfigurationError: this process is on another node, which the transport excludes, or
                the certificate cannot be read there.
        """
        deadline, group = time.monotonic() + self.timeout, self.group
        router = Router()
        pusher = group.host_user(router, secrets.randbelow(1 << 31))
        # Without copies not of `self`, whose actors the connection would keep alive.
        reach, search = Reach(_always), None
        if group.replication > 1:
            search = self.servers.search(self.token, self.name)
            reach = Reach(mend=functools.partial(self._mend, router, pusher, search))
        connection = Connection(
            router,
            pusher,
            lambda: group.host_client(router, pusher.index),
            name=self.name,
            timeout=self.timeout,
            max_in_flight=self.max_in_flight,
            reach=reach,
        )
        try:
            if search is None:
                self._open(router, pusher, self.addresses, deadline)
            else:
                addresses = newest(self.token, self.addresses)
                try:
                    self._open(router, pusher, addresses, deadline)
                except (PeerLostError, ProtocolError) as error:  # others listen there by now
                    pusher.broken = f"{self.name}: {error}"
        except PeerLostError as error:
            connection.close()
            raise PeerLostError(f"{self.name}: {error}: it was shut down or died") from error
        except DeadlineError as error:
            connection.close()
            raise DeadlineError(f"{self.name}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _open(
        self, router: Router, pusher: Pusher, others: Sequence[Address], deadline: float
    ) -> None:
        """Use a new transport, and connect to all servers before the deadline (monotonic); errors: see `connect`."""
        peers = self.group.user_peers(pusher.index)
        transport = WireTransport(
            self.token,
            peers,
            self.servers.node,
            router.destination,
            self.ways,
            encryption=encryption_with(self.identity),
        )
        router.use(transport)
        for other in others:
            router.attach(transport.connect(other, max(deadline - time.monotonic(), 0.001)))

    def _mend(self, router: Router, pusher: Pusher, search: Search, seconds: float) -> bool:
        """Look for the servers' successors, connect to them, and go on with a user's requests.

        Return whether that is done. Otherwise try again, as long as a caller waits.
        """
        if not self.servers.names_successors:
            pusher.fail(f"{pusher.broken}; a forked child cannot ask Ray for its successor")
            return False
        try:
            succession = search.look(seconds)
        except PeerLostError as error:
            pusher.fail(str(error))
            return False
        if succession is None:
            return False
        before, index = pusher.index, secrets.randbelow(1 << 31)
        router.clear()
        self.group.rehost_user(pusher, router, index)
        try:
            self._open(router, pusher, succession.addresses, time.monotonic() + _CONNECT_SECONDS)
        except (PeerLostError, DeadlineError, ProtocolError):  # another server has died meanwhile
            pusher.use(before, router.sender(self.group.user_peers(before)[0]))
            time.sleep(min(seconds, _PAUSE_SECONDS))
            return False
        search.done(succession)
        pusher.resume(succession.committed, before)
        return True


def _always() -> bool:
    """Return True: sockets are usable whatever Ray does."""
    return True
