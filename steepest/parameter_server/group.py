"""A parameter server by itself: the facts that all its processes share, and what a user's process hosts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from steepest.messages.fields import Limits
from steepest.messages.message import Peer, worker_peer
from steepest.messages.permissions import OPEN, Admission
from steepest.parameter_server.arrays import Arrays
from steepest.parameter_server.pusher import Pusher
from steepest.transport.router import Router

if TYPE_CHECKING:
    from steepest.engine.client import Client


@dataclass(frozen=True)
class ServerGroup:
    """The servers of some arrays, which anybody may push to; every push is an update of its own.

    Attributes:
        arrays: what they hold.
        num_servers: how many they are.
        nonfinite: "refuse", "skip" or "pass" updates with NaN or infinity.
    """

    arrays: Arrays
    num_servers: int
    nonfinite: str = "refuse"

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The server of each chunk."""
        return self.arrays.layout.assign_servers(self.num_servers)

    @cached_property
    def holders(self) -> tuple[tuple[int], ...]:
        """The servers of each chunk: that one."""
        return tuple((owner,) for owner in self.owners)

    @property
    def admission(self) -> Admission:
        """What its processes take from others: nobody takes the place of anybody."""
        limits = Limits(servers=self.num_servers, chunks=len(self.arrays.layout.chunks))
        return Admission(OPEN, limits, succeeded=())

    def host_user(self, router: Router, index: int) -> Pusher:
        """Host a user's end in this process: what pushes and pulls."""
        worker, _ = self.user_peers(index)
        pusher = Pusher(index, self.arrays, self.owners, self.num_servers, router.sender(worker))
        router.host(worker, pusher)
        router.admit(self.admission)
        return pusher

    def host_client(self, router: Router, index: int) -> Client:
        """Host a client of a user's in this process, which reads and installs state; imports torch."""
        from steepest.engine.client import Client

        _, peer = self.user_peers(index)
        client = Client(self.arrays.layout, self.holders, self.num_servers, router.sender(peer))
        router.host(peer, client)
        return client

    @staticmethod
    def user_peers(index: int) -> tuple[Peer, Peer]:
        """The roles of a user's end."""
        return worker_peer(index), Peer("client", index)
