"""What all processes of a parameter server know of it, and the roles in a user's process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from steepest.core.messages.fields import Limits
from steepest.core.messages.message import Peer, worker_peer
from steepest.core.messages.permissions import MessageCheck
from steepest.core.messages.users import OPEN
from steepest.core.transport.router import Router
from steepest.parameter_server.arrays import Arrays
from steepest.parameter_server.pusher import Pusher

if TYPE_CHECKING:
    from steepest.core.engine.client import Client


@dataclass(frozen=True)
class ServerGroup:
    """The servers of some arrays, to which any user may push; every push is an update of its own."""

    arrays: Arrays
    num_servers: int
    nonfinite: str = "refuse"  # "refuse", "skip" or "pass" updates with NaN or infinity
    replication: int = 1  # how many servers hold each chunk

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The index of the server that holds each chunk."""
        return self.arrays.layout.assign_servers(self.num_servers)

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """The indices of the servers that hold each chunk: its owner, and those after it."""
        return tuple(
            tuple((owner + copy) % self.num_servers for copy in range(self.replication))
            for owner in self.owners
        )

    @property
    def admission(self) -> MessageCheck:
        """The messages that its processes accept; no process succeeds another."""
        limits = Limits(servers=self.num_servers, chunks=len(self.arrays.layout.chunks))
        return MessageCheck(OPEN, limits, succeeded=())

    def host_user(self, router: Router, index: int) -> Pusher:
        """Host the role that pushes and pulls on a router, under the index of a user; return it."""
        pusher = Pusher(self.arrays, self.holders, self.num_servers, router.drop_arriving)
        self.rehost_user(pusher, router, index)
        return pusher

    def rehost_user(self, pusher: Pusher, router: Router, index: int) -> None:
        """Host a role as `host_user` does; it may have been the role of another user of other servers."""
        worker, _ = self.user_peers(index)
        pusher.use(index, router.sender(worker))
        router.host(worker, pusher)
        router.admit(self.admission)

    def host_client(self, router: Router, index: int) -> Client:
        """Host a client on a router, which reads and installs state for a user; return it; imports torch."""
        from steepest.core.engine.client import Client

        _, peer = self.user_peers(index)
        client = Client(self.arrays.layout, self.holders, self.num_servers, router.sender(peer))
        router.host(peer, client)
        return client

    @staticmethod
    def user_peers(index: int) -> tuple[Peer, Peer]:
        """Return the peers of a user's process: the worker that pushes, and the client."""
        return worker_peer(index), Peer("client", index)
