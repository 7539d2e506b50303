"""Our side of the ``network`` and ``host`` tables without Ray: servers and workers, from the core's own parts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch

from benchmarks.namespaces import DEADLINE, Namespace, Orders
from steepest.core.messages.message import COORDINATOR, Peer, server_peer
from steepest.core.tensors.shared_memory import allocate
from steepest.core.transport.channel import Address
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.parameter_server.arrays import Arrays
from steepest.parameter_server.connection import Connection
from steepest.parameter_server.group import ServerGroup
from steepest.parameter_server.hosting import host_server

LOOK_SECONDS = 0.02


def group(elements: int, servers: int) -> ServerGroup:
    return ServerGroup(Arrays.plan(torch.zeros(elements), None, None), servers)


def serve(
    orders: Orders,
    namespace: Namespace,
    index: int,
    servers: int,
    elements: int,
    meeting: str,
    token: bytes,
) -> None:
    """One server; the coordinator lives beside the first."""
    servers_group = group(elements, servers)
    peers = (server_peer(index), COORDINATOR) if index == 0 else (server_peer(index),)
    router = Router()
    weights = allocate(servers_group.arrays.layout.nbytes)
    host_server(servers_group, None, router, index, weights)
    wire = WireTransport(token, peers, namespace.name, router.destination)
    router.use(wire)
    write(Path(meeting) / str(index), wire.listen(namespace.address))
    if index:
        router.attach(wire.connect(read(Path(meeting) / "0")))
    router.start("server")
    orders.ready()
    for _ in orders:
        orders.done(0.0)
    router.stop()


def work(
    orders: Orders,
    namespace: Namespace,
    index: int,
    servers: int,
    elements: int,
    meeting: str,
    token: bytes,
    in_place: bool = False,
) -> None:
    """One worker: a round is a push_pull into an array that is there already.

    Args:
        in_place: push an array as `ParameterServer.empty` makes it, which servers of the same host
            read where it lies.
    """
    servers_group = group(elements, servers)
    router = Router()
    peers = servers_group.user_peers(index)
    wire = WireTransport(token, peers, namespace.name, router.destination)
    router.use(wire)
    pusher = servers_group.host_user(router, index)
    for server in range(servers):
        router.attach(wire.connect(read(Path(meeting) / str(server))))
    connection = Connection(
        router,
        pusher,
        lambda: servers_group.host_client(router, index),
        name="network",
        timeout=DEADLINE,
        max_in_flight=8,
    )
    update, out = torch.ones(elements), torch.zeros(elements)
    if in_place:
        _, update = servers_group.arrays.request(None, None, None, connection.updates)
        update.fill_(1.0)
    pushed = 0

    def step() -> None:
        nonlocal pushed
        memory = servers_group.arrays.bytes_of(update, "update")
        wanted, _ = servers_group.arrays.request(None, None, out)
        connection.run(lambda: pusher.push(memory, wanted), "a push to be committed")
        pushed += 1
        if out[0] != out[-1] or out[0] < pushed:
            raise RuntimeError(
                f"the answer is {out[0]:g} to {out[-1]:g} after {pushed} updates of one"
            )

    orders.serve(step)
    connection.close()


def write(path: Path, address: Address) -> None:
    text = json.dumps([address.node, address.host, address.port, address.unix, address.peers])
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def read(path: Path) -> Address:
    end = time.monotonic() + DEADLINE
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no server has written {path.name}")
        time.sleep(LOOK_SECONDS)
    node, host, port, unix, peers = json.loads(path.read_text())
    return Address(node, host, port, unix, tuple(Peer(*peer) for peer in peers))
