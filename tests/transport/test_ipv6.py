"""IPv6 between two hosts: namespaces joined by a veth pair, for the transport alone and for a Ray cluster."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks.namespaces import enter
from steepest.core.messages.message import COORDINATOR, Kind, worker_peer
from steepest.errors import AuthenticationError, PeerLostError
from tests.network_namespaces import NEEDS_NAMESPACES, namespaces, ray_nodes
from tests.ray_hosts import Place
from tests.said import said
from tests.socket_ends import (
    certificate,
    node,  # noqa: F401 - a fixture
    together,
    until,
)

pytestmark = NEEDS_NAMESPACES
ADDRESSES = ("fd00::1", "fd00::2")
WORKER = worker_peer(0)


def inside(space: str, work: Callable[[], Any]) -> Any:
    """What a function returns that runs in a namespace, in which its sockets stay."""

    def run() -> Any:
        enter(space)
        return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@pytest.fixture
def spaces() -> Iterator[tuple[str, str]]:
    with namespaces(secrets.token_hex(4), ADDRESSES) as found:
        yield found


@pytest.mark.parametrize("tls", [False, True])
def test_the_transport_between_two_hosts(node: Any, spaces: tuple[str, str], tls: bool) -> None:  # noqa: F811
    mine = certificate() if tls else None
    server = node(COORDINATOR, identity=mine)
    client = node(WORKER, node="elsewhere", identity=mine)
    address = inside(spaces[0], lambda: server.transport.listen(ADDRESSES[0]))
    assert address.host == ADDRESSES[0]
    connect = client.transport.connect
    near = together(lambda: inside(spaces[1], lambda: connect(address)), server)
    assert f"[{ADDRESSES[0]}]:{address.port}" in near.name
    assert near._socket.getpeername()[0] == ADDRESSES[0]
    assert near._socket.getsockname()[0] == ADDRESSES[1]
    payload = (torch.arange(1_000_000) % 251).to(torch.uint8)
    near.send(said(Kind.PUSH, payload, WORKER, COORDINATOR))
    until(lambda: server.messages, server, client)
    assert torch.equal(server.messages[0].payload, payload)
    stranger = node(worker_peer(1), node="elsewhere", token=b"another" * 5, identity=mine)
    with pytest.raises(AuthenticationError, match="different tokens"):
        together(lambda: inside(spaces[1], lambda: stranger.transport.connect(address)), server)
    with pytest.raises(PeerLostError, match=r"cannot connect to coordinator at \[fd00::1\]"):
        stranger.transport.connect(address)  # from here it cannot be reached


@pytest.fixture
def nodes() -> Iterator[tuple[Place, tuple[str, str]]]:
    """As in `tests.network_namespaces`, at IPv6 addresses."""
    with ray_nodes(ADDRESSES) as found:
        yield found


@pytest.mark.full
def test_a_ray_cluster_on_ipv6(nodes: tuple[Place, tuple[str, str]]) -> None:
    place, spaces = nodes
    program = place.script(
        f"""
        from steepest import AllreduceStrategy, ResourceConfig, RunConfig
        if __name__ == "__main__":
            for tls in (False, True):
                one_each = RunConfig(resources=ResourceConfig(cpus_per_worker=2), tls=tls)
                for strategy in ("ps", AllreduceStrategy()):
                    check(train(strategy, run_config=one_each))
            with DistributedSGD(linear_model_creator(), num_workers=2, run_config=one_each) as sgd:
                hosts = {{place.host for place in sgd._live().places.values()}}
                assert hosts == set({ADDRESSES!r}), hosts
                sgd.fit(steps=5, progress=False)
                check(sgd.weights())
                kinds = {{
                    channel._socket.family.name for channel in sgd._live().router.transport._channels
                }}
                assert kinds == {{"AF_UNIX", "AF_INET6"}}, kinds
            print("all is well")
        """
    )
    output = place.run("ip", "netns", "exec", spaces[0], sys.executable, program)
    assert "all is well" in output
