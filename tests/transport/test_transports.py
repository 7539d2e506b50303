"""`transport=`: the way by which processes talk, forced; on the wire, in training, for a parameter server."""

from __future__ import annotations

import builtins
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from steepest import DistributedSGD, ParameterServer, ParameterServerStrategy, TorchModel
from steepest.core.messages.message import COORDINATOR, Kind, Message, worker_peer
from steepest.core.tensors import shared_memory
from steepest.core.tensors.shared_memory import SHARED_FROM, allocate
from steepest.core.transport import sockets
from steepest.errors import ConfigurationError
from steepest.runtime import cluster as launch
from steepest.runtime.room import Seat
from steepest.testing import InProcessCluster, linear_model_creator
from steepest.testing.network import _SimulatedLoan
from tests.ray_hosts import (
    Place,
    place,  # noqa: F401 - a fixture
)
from tests.reference import same_bits
from tests.said import said
from tests.socket_ends import (
    FAMILIES,
    Node,
    node,  # noqa: F401 - a fixture
    together,
    until,
)

pytestmark = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="memfd is Linux'")
WORKER = worker_peer(0)
WAYS = ("wire", "shared", "unix", "tcp")
LENDING = ("wire", "shared")
SIZE = 300_000


def borrowed(pid: int) -> int:
    """How often a process maps memory of ours that another one made: that is mapped privately."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return sum(line.split()[1].endswith("p") and "memfd:steepest" in line for line in lines)


def sockets_of(pids: Iterable[int]) -> list[str]:
    """Names of the Unix-domain sockets of ours that processes listen on, and are connected to."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    return [name for name in names if any(name.startswith(f"@steepest-{pid}-") for pid in pids)]


def message_of(payload: torch.Tensor) -> Message:
    return said(Kind.PUSH, payload, WORKER, COORDINATOR)


def lent(near: Any, far: Node, *nodes: Node) -> bool:
    """Whether a payload that can be lent is read where it lies; it arrives in any case."""
    memory = allocate(SHARED_FROM).fill_(5)
    far.place = lambda message, size: (
        torch.empty(size, dtype=torch.uint8) if (m := message.payload) is None else m
    )
    near.send(message_of(memory))
    until(lambda: far.messages, far, *nodes)
    arrived = far.messages.pop().payload
    assert torch.equal(arrived, memory)
    memory[0] = 9
    return bool(arrived[0] == 9)


# -- on the wire -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place_of_client", ["here", "elsewhere"])
@pytest.mark.parametrize("ways", WAYS)
def test_each_way_has_its_sockets_and_lends_or_does_not(
    node: Any,  # noqa: F811
    ways: str,
    place_of_client: str,
) -> None:
    before = set(sockets_of([os.getpid()]))
    server, client = node(COORDINATOR, ways=ways), node(WORKER, place_of_client, ways=ways)
    address = server.transport.listen("127.0.0.1")
    assert bool(address.port) == (ways != "shared")
    assert len(set(sockets_of([os.getpid()])) - before) == (ways != "tcp")
    local = place_of_client == "here" and ways != "tcp"
    if ways == "shared" and not local:
        with pytest.raises(
            ConfigurationError,
            match="node elsewhere and node here share no memory: have all .* one",
        ):
            client.transport.connect(address)
        return
    near = together(lambda: client.transport.connect(address), server)
    assert near._socket.family == FAMILIES["unix" if local else "tcp"]
    assert lent(near, server, client) == (local and ways in LENDING)
    assert near.pending == 0
    until(lambda: server.opened, server)
    assert lent(server.opened[0], client, server) == (local and ways in LENDING), (
        "the other way too"
    )


@pytest.mark.parametrize(("lender", "reader"), [("wire", "unix"), ("unix", "wire")])
def test_the_sender_decides_whether_it_lends(node: Any, lender: str, reader: str) -> None:  # noqa: F811
    server, client = node(COORDINATOR, ways=reader), node(WORKER, ways=lender)
    address = server.transport.listen("127.0.0.1")
    near = together(lambda: client.transport.connect(address), server)
    assert lent(near, server, client) == (lender == "wire")


def test_a_platform_without_what_a_way_needs_is_refused_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(ways: str) -> None:
        made = Node(WORKER, ways=ways)
        Node.alive.clear()
        address = made.transport.listen("127.0.0.1")
        made.transport.close()
        assert address.port
        assert not address.unix

    monkeypatch.setattr(sockets, "AVAILABLE", False)
    with pytest.raises(
        ConfigurationError, match=r'transport="shared" needs shared memory .* give "wire"'
    ):
        make("shared")
    with pytest.raises(ConfigurationError, match='transport="shared" needs shared memory'):
        ParameterServer(np.zeros(3), transport="shared")
    monkeypatch.setattr(sockets, "_has_unix", lambda: False)
    for ways in ("shared", "unix"):
        with pytest.raises(
            ConfigurationError, match=f'transport="{ways}" needs Unix-domain sockets .* or "tcp"'
        ):
            make(ways)
    for ways in ("wire", "tcp"):
        make(ways)


# -- in training -------------------------------------------------------------------------------------


def creator(worker_index: int, device_index: int) -> TorchModel:
    """Its chunks are large enough to be lent."""
    x = torch.randn(24, 96, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TorchModel(
        torch.nn.Sequential(
            torch.nn.Linear(96, 96), torch.nn.Tanh(), torch.nn.Linear(96, 96)
        ).double(),
        loss=torch.nn.functional.mse_loss,
        data=(x, x),
        batch_size=4,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
    )


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("ways", ["shared", "unix", "tcp"])
def test_training_gives_the_same_bits_whichever_way(ways: str) -> None:
    in_process = InProcessCluster(creator, num_workers=2)
    in_process.step(6)
    strategy = ParameterServerStrategy(transport=ways, num_servers=1, chunk_bytes=2 * SHARED_FROM)
    with DistributedSGD(creator, num_workers=2, strategy=strategy) as sgd:
        sgd.fit(steps=6, progress=False)
        assert sgd._cluster is not None
        pids = [place.pid for place in sgd._cluster.places.values()]
        assert len(pids) == 3
        assert bool(sockets_of(pids)) == (ways != "tcp")
        assert {borrowed(pid) > 0 for pid in pids} == {ways in LENDING}
        assert same_bits(sgd.weights(), in_process.weights())


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_workers_on_other_nodes_are_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a process is started")

    here = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(Seat, "node", "f" * 56)
    monkeypatch.setattr(launch.Cluster, "start_process", refuse)
    strategy = ParameterServerStrategy(transport="shared")
    with pytest.raises(
        ConfigurationError, match=f"node {here[:12]} and node {'f' * 12} share no memory"
    ):
        DistributedSGD(linear_model_creator(), num_workers=2, strategy=strategy)


# -- a parameter server ------------------------------------------------------------------------------


@ray.remote(
    max_calls=1
)  # a process of its own: one that Ray uses again may still borrow from a server before
def add(server: ParameterServer, times: int) -> tuple[float, int, list[str]]:
    """The last that it saw, what it borrows, and the sockets of ours that it is connected to."""
    for _ in range(times):
        pulled = server.push_pull(np.ones(SIZE))
    families = [
        channel._socket.family.name for channel in server._connection()._router.transport._channels
    ]
    return float(pulled.max()), borrowed(os.getpid()), families


@pytest.mark.few(2)
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("ways", WAYS)
def test_a_handle_carries_the_way_to_wherever_it_goes(ways: str) -> None:
    with ParameterServer(np.zeros(SIZE), num_servers=2, transport=ways) as server:
        seen = ray.get([add.remote(server, 5) for _ in range(2)])
        pulled = server.push_pull(np.ones(SIZE))
        assert pulled.min() == pulled.max() == server.version == 11
        assert max(last for last, _, _ in seen) == 10
        assert [bool(count) for _, count, _ in seen] == [ways in LENDING] * 2
        assert [families for _, _, families in seen] == [
            ["AF_INET" if ways == "tcp" else "AF_UNIX"] * 2
        ] * 2
        pids = [
            place.pid
            for place in ray.get([actor.place.remote() for actor in server._access.servers.handles])
        ]
        assert {borrowed(pid) > 0 for pid in pids} == {ways in LENDING}
        assert bool(sockets_of(pids)) == (ways != "tcp")


@pytest.mark.full
@pytest.mark.cluster
def test_shared_keeps_servers_on_the_drivers_node_and_refuses_users_on_others(place: Place) -> None:  # noqa: F811
    place.python(
        """
        import numpy as np
        import pytest
        from ray.cluster_utils import Cluster
        from steepest import ParameterServer, ParameterServerStrategy
        from steepest.errors import ConfigurationError
        if __name__ == "__main__":
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
            other = cluster.add_node(num_cpus=1, resources={"other": 1})
            ray.init(address=cluster.address)
            here = ray.get_runtime_context().get_node_id()

            @ray.remote(num_cpus=0)
            def add(server):
                server.push(np.ones(40_000))

            with ParameterServer(np.zeros(40_000), num_servers=4, transport="shared") as server:
                actors = server._access.servers.handles
                nodes = {place.node for place in ray.get([actor.place.remote() for actor in actors])}
                assert nodes == {here}, nodes
                ray.get(add.options(resources={f"node:{ray.util.get_node_ip_address()}": 0}).remote(server))
                said = f"node {other.node_id[:12]} and node {here[:12]} share no memory"
                with pytest.raises(ConfigurationError, match=said):
                    ray.get(add.options(resources={"other": 1}).remote(server))
            said = f"node {here[:12]} and node {other.node_id[:12]} share no memory"
            with pytest.raises(ConfigurationError, match=said):
                train(ParameterServerStrategy(transport="shared"))
            ray.shutdown()
            cluster.shutdown()
        """
    )


def test_a_loan_that_ends_with_the_interpreter_imports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It cannot then; an error in its `__del__` would be a warning, which is an error of this test."""
    lent: Counter[int] = Counter()
    loan = _SimulatedLoan(torch.zeros(3, dtype=torch.uint8), lent)
    assert lent.total() == 1

    def refuse(name: str, *arguments: object) -> None:
        raise ImportError(name)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", refuse)
        del loan
    assert lent.total() == 0
