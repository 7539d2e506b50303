"""What a step of a small model costs: system calls of its processes, and calls of the library's functions."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, DistributedSGD, ParameterServerStrategy
from steepest.config.strategies import StrategyConfig
from steepest.engine.client import Client
from steepest.engine.hosting import (
    build_replicas,
    host_aggregator,
    host_client,
    host_coordinator,
    host_server,
    host_worker,
)
from steepest.engine.job import Job, build_models
from steepest.engine.strategy import make_strategy
from steepest.engine.topology import HostMap
from steepest.engine.worker import Worker
from steepest.messages.driver import Result
from steepest.messages.message import COORDINATOR, Peer, aggregator_peer, server_peer, worker_peer
from steepest.testing import InProcessCluster
from steepest.testing.models import linear_model_creator
from steepest.testing.simulated_ray import SimulatedRay
from steepest.testing.simulation import Simulation, run_config
from steepest.transport.channel import Address
from steepest.transport.router import Router
from steepest.transport.sockets import WireTransport
from steepest.transport.stream import WireChannel

STEPS = 20
WORKERS = 2
SECONDS = 60.0
TOKEN = b"correct horse battery staple"
STRATEGIES: dict[str, StrategyConfig] = {
    "ps": ParameterServerStrategy(num_servers=1),
    "allreduce": AllreduceStrategy(),
}
#: The most calls of the library's own functions in a step of two workers, all processes together.
MOST_CALLS = {"ps": 1150, "allreduce": 1150}


@contextmanager
def running(name: str) -> Iterator[tuple[Router, Client]]:
    """A job of two workers on one host over real sockets, each process a thread; its client, and the router of that."""
    config = STRATEGIES[name]
    servers = WORKERS if name == "allreduce" else 1
    _, description = build_models(linear_model_creator(), 0, 1, 0, make_strategy(config).cut)
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
                members.append((router, host_worker(router, job, worker, replicas)))
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


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_process_sends_and_receives_once_for_each_message_that_it_waits_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()

    def count(method: str) -> None:
        original = getattr(WireChannel, method)

        def counting(channel: WireChannel, *arguments: Any) -> Any:
            counted[method] += 1
            return original(channel, *arguments)

        monkeypatch.setattr(WireChannel, method, counting)

    with running(name) as (router, client):
        count("_send_bytes")
        count("_receive")
        steps(router, client, STEPS)
    # A worker's gradient with its report, and its weights: without a server of its own for each
    # worker. Of an allreduce the second worker alone talks to another process; its server, which
    # holds nothing, is sent COMMIT with the weights.
    each = 2 * WORKERS if name == "ps" else 2
    others = 6  # ASK, GRANT, and the results, all of which leave together at the end
    assert STEPS * each <= counted["_send_bytes"] <= STEPS * each + others
    assert counted["_receive"] <= counted["_send_bytes"] + others


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_calls_no_more_functions_than_it_did(name: str) -> None:
    cluster = InProcessCluster(
        linear_model_creator(), num_workers=WORKERS, strategy=STRATEGIES[name]
    )
    cluster.step(STEPS)
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if (event == "call" and "/steepest/" in code.co_filename) or code.co_filename == "<string>":
            calls[f"{code.co_filename.rpartition('/steepest/')[2]}:{code.co_name}"] += 1

    sys.setprofile(see)
    try:
        cluster.step(STEPS)
    finally:
        sys.setprofile(None)
    inside = {who: count for who, count in calls.items() if not who.startswith("testing/")}
    most = sorted(inside.items(), key=lambda item: -item[1])[:20]
    assert sum(inside.values()) / STEPS <= MOST_CALLS[name], most


@pytest.mark.parametrize("workers", [1, 3])
def test_a_call_of_step_asks_ray_twice_who_is_dead_however_many_processes_there_are(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Simulation(seed=1, cpus=(8,)).running():
        config = run_config()
        with DistributedSGD(linear_model_creator(), workers, run_config=config) as trainer:
            trainer.step()
            waits: list[int] = []
            wait = SimulatedRay.wait

            def counting(self: SimulatedRay, refs: Any, **options: Any) -> Any:
                waits.append(len(refs))
                return wait(self, refs, **options)

            monkeypatch.setattr(SimulatedRay, "wait", counting)
            trainer.step()
            assert len(waits) == 2
            assert min(waits) >= workers
