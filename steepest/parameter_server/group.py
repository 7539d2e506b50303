"""A parameter server by itself: the facts that all its processes share, and its roles put together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from steepest.engine.client import Client
from steepest.engine.coordinator_role import CoordinatorRole
from steepest.engine.server import Server, ServerMode
from steepest.engine.topology import Hosts, Topology
from steepest.messages.fields import Limits
from steepest.messages.message import COORDINATOR, Peer, server_peer, worker_peer
from steepest.messages.permissions import OPEN, Admission
from steepest.parameter_server.arrays import Arrays
from steepest.parameter_server.pusher import Pusher
from steepest.protocol.commit_rules import CommitEach
from steepest.protocol.open_coordinator import OpenCoordinator
from steepest.transport.router import Router


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
        return self.arrays.layout.deal(self.num_servers)

    @cached_property
    def holders(self) -> tuple[tuple[int], ...]:
        """The servers of each chunk: that one."""
        return tuple((owner,) for owner in self.owners)

    @property
    def admission(self) -> Admission:
        """What its processes take from others: nobody takes the place of anybody."""
        limits = Limits(servers=self.num_servers, chunks=len(self.arrays.layout.chunks))
        return Admission(OPEN, limits, succeeded=())

    def host_server(self, router: Router, index: int, weights: torch.Tensor) -> Server:
        """Makes a server live in this process; `weights` is the flat vector with the initial values.

        The coordinator lives beside the first.
        """
        peer = server_peer(index)
        server = Server(
            index,
            Topology(self.arrays.layout, self.holders, Hosts.apart(0, self.num_servers)),
            self.arrays.spec,
            weights,
            router.sender(peer),
            router.in_use,
            mode=ServerMode(together=False, open_to_all=True, checked=self.nonfinite != "pass"),
        )
        router.host(peer, server)
        router.admit(self.admission)
        if index == 0:
            self._host_coordinator(router)
        return server

    def _host_coordinator(self, router: Router) -> None:
        coordinator = OpenCoordinator(
            members=frozenset(),
            servers=tuple(range(self.num_servers)),
            holding=frozenset(self.owners),
            rule=CommitEach(),
            hyperparameters=lambda step: [],
            step_timeout=float("inf"),
            nonfinite=self.nonfinite,
        )
        router.host(COORDINATOR, CoordinatorRole(coordinator, router.sender(COORDINATOR)))

    def host_user(self, router: Router, index: int) -> tuple[Pusher, Client]:
        """Makes a user's end live in this process: a pusher, and a client for state."""
        worker, client = self.user_peers(index)
        layout = self.arrays.layout
        pusher = Pusher(index, self.arrays, self.owners, self.num_servers, router.sender(worker))
        reader = Client(layout, self.holders, self.num_servers, router.sender(client))
        router.host(worker, pusher)
        router.host(client, reader)
        router.admit(self.admission)
        return pusher, reader

    @staticmethod
    def user_peers(index: int) -> tuple[Peer, Peer]:
        """The roles of a user's end."""
        return worker_peer(index), Peer("client", index)
