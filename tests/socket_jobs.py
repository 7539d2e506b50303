"""A job of two workers whose processes are threads that talk over real sockets, without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.engine.client import Client
from steepest.core.engine.hosting import (
    build_replicas,
    host_client,
    host_coordinator,
    host_server,
    host_worker,
)
from steepest.core.engine.job import Job
from steepest.core.engine.model_building import build_models
from steepest.core.engine.topology import HostMap
from steepest.core.engine.worker import Worker
from steepest.core.messages.driver import Result
from steepest.core.messages.message import (
    COORDINATOR,
    Peer,
    aggregator_peer,
    server_peer,
    worker_peer,
)
from steepest.core.strategies.strategy import Strategy
from steepest.core.transport.channel import Address
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.extensions import EXTENSIONS
from steepest.strategies.aggregation.host_aggregator import host_aggregator
from steepest.testing.models import linear_model_creator

STEPS = 20
WORKERS = 2
SECONDS = 60.0
TOKEN = b"correct horse battery staple"
STRATEGIES: dict[str, Strategy] = {
    "ps": ParameterServerStrategy(num_servers=1),
    "allreduce": AllreduceStrategy(),
}


@contextmanager
def running(name: str) -> Iterator[tuple[Router, Client]]:
    """A job of two workers on one host over real sockets, each process a thread; its client, and the router of that."""
    config = STRATEGIES[name]
    servers = WORKERS if name == "allreduce" else 1
    _, description = build_models(linear_model_creator(), 0, 1, 0, config.cut)
    places = HostMap((0,) * WORKERS, (0,) * servers, name == "ps")
    job = Job(description, config, WORKERS, 1, servers, 0, SECONDS, hosts=places)
    addresses: list[Address] = []
    members: list[tuple[Router, Worker]] = []
    clients: list[Client] = []
    with ExitStack() as stack:
        for worker in [None, *range(WORKERS)] if name == "ps" else range(WORKERS):
            router = Router()
            stack.callback(router.stop)
            server = 0 if worker is None else worker if name == "allreduce" else None
            peers: list[Peer] = []
            replicas = build_replicas(
                job,
                worker or 0,
                build_models(linear_model_creator(), worker or 0, 1, 0, job.strategy.cut)[0],
                [torch.device("cpu")],
                extensions=EXTENSIONS,
            )
            if server is not None:
                peers.append(server_peer(server))
                host_server(router, job, server, replicas.weights, shared=True)
            if server == 0:
                peers.append(COORDINATOR)
                host_coordinator(router, job, SECONDS)
            if server in places.aggregators:
                peers.append(aggregator_peer(server))
                host_aggregator(router, job, server, replicas.weights)
            if worker is not None:
                peers.append(worker_peer(worker))
                members.append(
                    (router, host_worker(router, job, worker, replicas, extensions=EXTENSIONS))
                )
            if worker == 0:
                peers.append(Peer("client", 0))
                clients.append(host_client(router, job, 0))
            wire = WireTransport(TOKEN, tuple(peers), "here", router.destination, "unix")
            router.use(wire)
            if server is not None:
                here = wire.listen("127.0.0.1")
            router.start(f"process of {peers[0]}")
            for address in addresses:
                router.call(
                    partial(lambda w, r, a: r.attach(w.connect(a)), wire, router, address)
                ).result(SECONDS)
            if server is not None:
                addresses.append(here)
        for router, member in members:
            router.call(member.join).result(SECONDS)
        steps(members[0][0], clients[0], STEPS)
        yield members[0][0], clients[0]


def steps(router: Router, client: Client, count: int) -> None:
    """Has so many steps taken."""
    router.call(lambda: client.ask(count, True)).result(SECONDS)
    for _ in range(count):
        assert isinstance(client.outcomes.get(timeout=SECONDS), Result)
