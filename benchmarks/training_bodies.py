"""A training job without Ray: processes of servers and workers, put together from the core's own parts."""

from __future__ import annotations

import contextlib
import functools
import json
import time
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.models import MLP, WORKLOADS, Workload
from benchmarks.namespaces import DEADLINE, Namespace, Orders
from benchmarks.parameter_server_bodies import read, write
from benchmarks.step_clock import CLOCK
from steepest.allocator import keep_freed_memory, start_thread
from steepest.comm.message import COORDINATOR, Kind, Peer, relay_peer, server_peer, worker_peer
from steepest.comm.router import Router
from steepest.comm.shared import allocate
from steepest.comm.wire import WireTransport
from steepest.config import ParameterServerStrategy
from steepest.hosts import Hosts
from steepest.job import (
    Job,
    build_models,
    build_replicas,
    host_client,
    host_coordinator,
    host_relay,
    host_server,
    host_worker,
)
from steepest.model import Model
from steepest.models.torch import TorchModel

MLP10 = Workload("mlp10", functools.partial(MLP, hidden=2000), (1024,), batch_size=8, samples=512, steps=6)
ALL = {**WORKLOADS, MLP10.name: MLP10}
CLIENT = Peer("client", 0)


def make_job(workload: str, workers: int, servers: int, wire_dtype: str | None) -> tuple[Job, list[Model]]:
    """A job whose hosts have one server and equally many workers each."""
    chosen = ALL[workload]

    def creator(worker: int, device: int) -> TorchModel:
        return TorchModel(
            chosen.build(),
            loss=F.nll_loss,
            data=chosen.data(),
            batch_size=chosen.batch_size,
            optimizer=functools.partial(chosen.optimizer, fused=None),
        )

    config = ParameterServerStrategy(num_servers=servers, wire_dtype=wire_dtype)
    models, description = build_models(creator, 0, 1, 0, None)
    hosts = Hosts(tuple(worker % servers for worker in range(workers)), tuple(range(servers)), gathers=True)
    return Job(description, config, workers, 1, servers, 0, DEADLINE, hosts=hosts), models


def serve(
    orders: Orders, namespace: Namespace, index: int, job: dict[str, Any], meeting: str, token: bytes, profile: str = ""
) -> None:
    """A server's process; the coordinator lives beside the first.

    Args:
        job: of `make_job`.
        meeting: a folder in which servers write where they listen.
        profile: a folder for what `benchmarks.profile_step` finds; empty to measure nothing.
    """
    if profile:
        CLOCK.install()
    plan, models = make_job(**job)
    initial = build_replicas(plan, 0, models, [torch.device("cpu")]).weights
    weights = allocate(initial.numel())
    weights.copy_(initial)
    router = Router()
    peers = (server_peer(index), COORDINATOR) if index == 0 else (server_peer(index),)
    if index == 0:
        host_coordinator(router, plan)
    relay = index in plan.places.relays
    host_server(router, plan, index, weights, shared=relay)
    if relay:
        host_relay(router, plan, index, weights)
        peers = (*peers, relay_peer(index))
    wire = WireTransport(token, peers, namespace.name, router.destination)
    router.transport = wire
    write(Path(meeting) / str(index), wire.listen(namespace.address))
    for other in range(index):
        router.attach(wire.connect(read(Path(meeting) / str(other))))
    router.start("server")
    _idle(orders, router, f"{profile}/server {index}" if profile else "")


def work(
    orders: Orders, namespace: Namespace, index: int, job: dict[str, Any], meeting: str, token: bytes, profile: str = ""
) -> None:
    """A worker's process; beside the first lives the client, which asks for steps. Arguments as of `serve`."""
    if profile:
        CLOCK.install()
    keep_freed_memory()  # as the workers of a trainer do
    plan, models = make_job(**job)
    replicas = build_replicas(plan, index, models, [torch.device("cpu")])
    router = Router()
    peers = (worker_peer(index), CLIENT) if index == 0 else (worker_peer(index),)
    worker = host_worker(router, plan, index, replicas)
    client = host_client(router, plan, 0) if index == 0 else None
    wire = WireTransport(token, peers, namespace.name, router.destination)
    router.transport = wire
    for server in range(plan.num_servers):
        router.attach(wire.connect(read(Path(meeting) / str(server))))
    router.call(worker.join)
    where = f"{profile}/worker {index}" if profile else ""
    if client is None:
        router.start("worker", start_thread)
        _idle(orders, router, where)
        return
    orders.ready()
    for steps in orders:
        _report(where)
        begin, taken = time.perf_counter(), 0
        if steps:
            client.ask(steps, True)
        while taken < steps:
            router.turn(0.5)
            with contextlib.suppress(Empty):
                outcome = client.outcomes.get_nowait()
                if isinstance(outcome, Exception) or outcome.kind is not Kind.RESULT:
                    raise RuntimeError(f"the step was not committed: {outcome}")
                taken += 1
        if taken:  # the last weights belong to this turn, not to whoever is next on this network
            arrived = worker.at_version(outcome.generation, outcome.version, lambda replicas: None)
            while not arrived.done():
                router.turn(0.5)
        orders.done((time.perf_counter() - begin) / max(steps, 1))


def _idle(orders: Orders, router: Router, where: str) -> None:
    """The router's own thread does everything."""
    orders.ready()
    for _ in orders:
        router.call(lambda: _report(where)).result()
        orders.done(0.0)
    router.stop()


def _report(where: str) -> None:
    """Writes what was measured in this process since the last time, if that is wanted."""
    if where:
        Path(where).write_text(json.dumps(CLOCK.take()))
