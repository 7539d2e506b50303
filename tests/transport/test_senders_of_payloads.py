"""Payloads land where they belong as they arrive, so whoever is not their sender is refused before that."""

from __future__ import annotations

import pytest
import torch

from steepest.core.messages.message import (
    COORDINATOR,
    Kind,
    Message,
    Peer,
    server_peer,
    worker_peer,
)
from steepest.core.transport.channel import Channel
from steepest.core.transport.router import Router
from steepest.errors import ProtocolError
from steepest.testing import InProcessCluster, Network
from tests.modes import make, trained
from tests.reference import Task, same_bits, sgd
from tests.said import said
from tests.socket_ends import (
    Node,
    family,  # noqa: F401 - a fixture
    node,  # noqa: F401 - a fixture
    server,  # noqa: F401 - a fixture
    together,
    until,
)

STEPS = 3


def job(name: str) -> InProcessCluster:
    return make(name, Task(optimizer=sgd(momentum=0.9)))


@pytest.mark.few(4)
@pytest.mark.parametrize("role", ["worker", "client", "member"])
@pytest.mark.parametrize("name", ["sync", "copies", "allreduce", "async"])
def test_weights_in_the_name_of_a_server_are_written_nowhere(name: str, role: str) -> None:
    undisturbed, cluster = job(name), job(name)
    trained(undisturbed, STEPS)
    for _ in range(STEPS):
        cluster.network.settle()
        own = cluster.workers[0].at_version(0, -1, lambda replicas: replicas.weights)
        weights = cluster.wait(own, "the weights where they lie")
        before = weights.clone()
        tell_weights(cluster, Peer(role, 77), server_peer(1 if name == "allreduce" else 0))
        assert torch.equal(weights, before)
        trained(cluster, 1)
    if name != "async":  # there the order of what workers push may be another
        assert same_bits(cluster.weights(), undisturbed.weights())


def tell_weights(cluster: InProcessCluster, stranger: Peer, source: Peer) -> None:
    """A stranger sends a worker other weights of every chunk; all of it is refused."""
    near = cluster.worker_routers[0]
    newer = {
        "generation": cluster.coordinator.generation + 1,
        "version": cluster.coordinator.version + 1,
    }
    for chunk in cluster.job.description.layout.chunks:
        router = cluster.network.router()
        link = cluster.network.connect(router, (stranger,), near, tuple(near._roles))
        payload = torch.full((chunk.nbytes,), 63, dtype=torch.uint8)
        named = {**newer, "chunk": chunk.index}
        message = said(Kind.WEIGHTS, payload, source, worker_peer(0), **named)
        link.send(message)
        cluster.network.settle()
        assert link.closed
        cluster.network.remove(router)


class Taker:
    """A role that has a place for everything."""

    def __init__(self) -> None:
        self.place = torch.zeros(8, dtype=torch.uint8)

    def destination(self, message: Message, size: int) -> torch.Tensor:
        return self.place

    def handle(self, source: Peer, message: Message) -> None:
        """Takes all."""

    def lost(self, peer: Peer, reason: str) -> None:
        """Bears it."""

    def tick(self, now: float) -> None:
        """Has no deadlines."""


def weights_of(source: Peer) -> Message:
    payload = torch.ones(8, dtype=torch.uint8)
    return said(Kind.WEIGHTS, payload, source, worker_peer(0))


@pytest.fixture
def near() -> Router:
    network = Network()
    router = network.router()
    router.host(worker_peer(0), Taker())
    network.connect(network.router(), (server_peer(0), COORDINATOR), router, (worker_peer(0),))
    return router


class Unattached:
    """The end of a channel whose opening was not delivered yet."""

    name, pending = "somebody", 0

    def __init__(self, *peers: Peer) -> None:
        self.peers = peers

    def send(self, message: Message) -> None:
        """Sends nothing."""

    def own_pending(self, memory: torch.Tensor) -> None:
        """Has nothing."""

    def drop_arriving(self, memory: torch.Tensor) -> None:
        """Receives nothing."""

    def close(self) -> None:
        """Is not open."""


@pytest.mark.parametrize(
    "channel",
    [
        Unattached(server_peer(0)),
        Unattached(server_peer(1), COORDINATOR),
        Unattached(server_peer(1), worker_peer(0)),
    ],
)
def test_a_channel_that_will_be_refused_is_given_no_place(near: Router, channel: Channel) -> None:
    with pytest.raises(ProtocolError, match="connected"):
        near.destination(channel, weights_of(channel.peers[0]), 8)


def test_what_follows_an_opening_at_once_has_its_place(near: Router) -> None:
    assert near.destination(Unattached(server_peer(1)), weights_of(server_peer(1)), 8) is not None


def test_over_sockets_too(node, server: Node, family: str) -> None:  # noqa: F811
    """A router behind a real transport refuses a payload in the name of another, and closes the channel."""
    router, taker = Router(), Taker()
    router.host(COORDINATOR, taker)
    server.transport.sink = router.destination
    place = "here" if family == "unix" else "elsewhere"
    client = node(worker_peer(2), node=place, identity=server.identity)
    channel = together(lambda: client.transport.connect(server.address), server)
    for source in (worker_peer(2), server_peer(0)):
        payload = torch.ones(8, dtype=torch.uint8)
        channel.send(said(Kind.JOIN, payload, source, COORDINATOR))
    until(lambda: server.lost, server)
    assert [message.source for message in server.messages] == [worker_peer(2)]
    assert server.transport.refused == 1
