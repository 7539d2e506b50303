"""A training job without Ray: processes of servers and workers, put together from the core's own parts."""

from __future__ import annotations

import functools
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import MLP, WORKLOADS, Modelled, Workload
from benchmarks.namespaces import DEADLINE, Member, Namespace, Orders, Team
from benchmarks.parameter_server_bodies import read, write
from benchmarks.step_clock import CLOCK
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
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Result
from steepest.core.messages.message import (
    COORDINATOR,
    Peer,
    aggregator_peer,
    server_peer,
    worker_peer,
)
from steepest.core.models.protocol import Model
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.allocator import keep_freed_memory, start_thread
from steepest.core.tensors.shared_memory import allocate
from steepest.core.transport.router import Router
from steepest.core.transport.sockets import WireTransport
from steepest.extensions import EXTENSIONS
from steepest.runtime.scheduling import give_way
from steepest.strategies.aggregation.host_aggregator import host_aggregator
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.tables.modules.torch_model import TorchModel

MLP10 = Workload(
    "mlp10", functools.partial(MLP, hidden=2000), (1024,), batch_size=8, samples=512, steps=6
)
ALL = {**WORKLOADS, MLP10.name: MLP10}
STRATEGIES = ("ps", "allreduce")
HYBRID = 2  # updates that rows may lack under "hybrid"
RESULT_SECONDS = 0.02  # as in the processes of a trainer
CLIENT = Peer("client", 0)
#: Of the last turn, in the process of the client.
results: list[Result] = []


class Apart(Job):
    """A job whose only worker, too, has its server in another process; a trainer's has it inside."""

    @property
    def servers_in_workers(self) -> bool:
        """Whether no process is a server only."""
        return self.strategy.in_workers


def job_team(  # noqa: PLR0913 - each is given by name
    spaces: list[Namespace],
    workload: str | Modelled,
    strategy: str | Strategy,
    meeting: str,
    *,
    workers: int = 1,
    servers: int = 1,
    alone: int = 0,
    wire_dtype: str | None = None,
    compression: str | None = None,
    profile: str = "",
    body: Callable[..., None] | None = None,
) -> Team:
    """All processes of a job, one host in each namespace.

    Args:
        strategy: one of the library's; or "ps"; "hybrid", the same with rows of tables asked for beforehand; or
            "allreduce", where each worker's process has a server.
        meeting: an empty folder in which servers write where they listen.
        workers, servers: on each host; servers for "ps".
        alone: how many of the namespaces, the last ones, have a server and no worker.
        profile: a folder for what `benchmarks.profile_step` finds; empty to measure nothing.
        body: what each process runs instead of `take_part`.
    """
    count = len(spaces) - alone
    everybody = range(workers * count)
    in_workers = strategy.in_workers if isinstance(strategy, Strategy) else strategy == "allreduce"
    job = {
        "workload": workload,
        "strategy": strategy,
        "workers": len(everybody),
        "servers": len(everybody) if in_workers else servers * count,
        "hosts": count,
        "alone": alone,
        "wire_dtype": wire_dtype,
        "compression": compression,
    }
    common = {"job": job, "meeting": meeting, "token": secrets.token_bytes(32), "profile": profile}

    def member(space: Namespace, **roles: int | None) -> Member:
        return Member(space, body or take_part, {"namespace": space, **roles, **common})

    beside = [] if in_workers else [spaces[i % count] for i in range(servers * count)]
    serving = enumerate([*beside, *spaces[count:]])
    served = [member(space, server=i, worker=None) for i, space in serving]
    working = [
        member(spaces[i % count], server=i if in_workers else None, worker=i) for i in everybody
    ]
    name = strategy.name if isinstance(strategy, Strategy) else strategy
    return Team(f"steepest {name}", served + working)


def make_job(
    workload: str | Modelled,
    strategy: str | Strategy,
    workers: int,
    servers: int,
    hosts: int,
    alone: int = 0,
    wire_dtype: str | None = None,
    compression: str | None = None,
) -> tuple[Job, list[Model]]:
    """A job whose hosts have equally many workers and servers each, and further hosts a server alone."""
    chosen: Modelled = ALL[workload] if isinstance(workload, str) else workload

    def creator(worker: int, device: int) -> TorchModel:
        return chosen.model()

    allreduce = strategy == "allreduce"
    config: Strategy = ParameterServerStrategy(
        num_servers=servers + alone,
        wire_dtype=wire_dtype,
        compression=compression,
        table_staleness=HYBRID if strategy == "hybrid" else None,
    )
    if allreduce:
        config = AllreduceStrategy(wire_dtype=wire_dtype, compression=compression)
    if isinstance(strategy, Strategy):
        config = strategy
    models, description = build_models(creator, 0, 1, 0, config.cut, None, EXTENSIONS)
    worker_hosts, server_hosts = (
        tuple(index % hosts for index in range(count)) for count in (workers, servers)
    )
    gathers = not (
        allreduce and hosts == 1
    )  # there each member updates its own weights, and nothing has to cross
    server_hosts += tuple(range(hosts, hosts + alone))
    places = HostMap(worker_hosts, server_hosts, gathers)
    return Apart(
        description, config, workers, 1, servers + alone, 0, DEADLINE, hosts=places
    ), models


def take_part(
    orders: Orders,
    namespace: Namespace,
    server: int | None,
    worker: int | None,
    job: dict[str, Any],
    meeting: str,
    token: bytes,
    profile: str,
) -> None:
    """One process: a server, a worker, or a worker with a server on its own weights.

    The coordinator lives beside the first server, a host's aggregator beside its first, the client,
    which asks for steps, beside the first worker. A turn ends when this process' worker has the
    last weights: they belong to it, not to whoever is next on this network.

    Args:
        job: of `make_job`; the others as of `job_team`.
    """
    if profile:
        CLOCK.install()
    if worker is not None:
        keep_freed_memory()  # as the workers of a trainer do
    plan, models = make_job(**job)
    replicas = build_replicas(
        plan, worker or 0, models, [torch.device("cpu")], extensions=EXTENSIONS
    )
    router = Router()
    peers = (
        []
        if server is None
        else _host_servers(
            router,
            plan,
            server,
            replicas,
            beside=worker is not None and plan.strategy.in_place,
        )
    )
    client, member = None, None
    if worker is not None:
        peers.append(worker_peer(worker))
        member = host_worker(router, plan, worker, replicas, extensions=EXTENSIONS)
    if worker == 0:
        peers.append(CLIENT)
        client = host_client(router, plan, CLIENT.index)
    wire = WireTransport(token, tuple(peers), namespace.name, router.destination)
    router.use(wire)
    if server is not None:
        write(Path(meeting) / str(server), wire.listen(namespace.address))
    for other in range(plan.num_servers if server is None else server):
        router.attach(wire.connect(read(Path(meeting) / str(other))))
    if member is None:
        router.start("server")
    else:
        router.start("worker", start_thread)
        router.call(give_way)
        router.call(member.join)
    where = f"{profile}/server {server}" if worker is None else f"{profile}/worker {worker}"
    orders.ready()
    taken = 0
    for steps in orders:
        if profile:
            router.call(lambda: Path(where).write_text(json.dumps(CLOCK.take()))).result(DEADLINE)
        begin = time.perf_counter()
        if client is not None:
            results[:] = _take_steps(router, client, steps)
        taken += steps
        if member is not None:
            router.call(functools.partial(member.at_version, 0, taken, _nothing)).result(
                DEADLINE
            ).result(DEADLINE)
        orders.done(0.0 if member is None else (time.perf_counter() - begin) / max(steps, 1))
    router.stop()


def _host_servers(
    router: Router, plan: Job, index: int, replicas: Replicas, *, beside: bool
) -> list[Peer]:
    """A server, and who lives beside it; `beside` a worker it updates that worker's own weights."""
    peers, aggregator = [server_peer(index)], index in plan.places.aggregators
    weights = replicas.weights if beside else allocate(replicas.weights.numel())
    if not beside:
        weights.copy_(replicas.weights)
    if index == 0:
        peers.append(COORDINATOR)
        host_coordinator(router, plan, RESULT_SECONDS)
    host_server(router, plan, index, weights, shared=aggregator or beside)
    if aggregator:
        peers.append(aggregator_peer(index))
        host_aggregator(router, plan, index, weights)
    return peers


def _take_steps(router: Router, client: Client, steps: int) -> list[Result]:
    if steps:
        router.call(lambda: client.ask(steps, True))
    found = []
    for _ in range(steps):
        outcome = client.outcomes.get(timeout=DEADLINE)
        if not isinstance(outcome, Result):
            raise RuntimeError(f"the step was not committed: {outcome}")
        found.append(outcome)
    return found


def _nothing(replicas: object) -> None:
    """The weights are here."""
