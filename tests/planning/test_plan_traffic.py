"""A planned job sends what the engine's own roles send: the same bytes from each role to each other one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from steepest.cli.planning.events import Links
from steepest.cli.planning.profile import Profile
from steepest.cli.planning.roles import ModelledProcess, ModelledPush
from steepest.cli.planning.simulation import Simulation, make_job
from steepest.core.engine.job import Job
from steepest.core.engine.topology import HostMap
from steepest.core.messages.message import Kind, Message, Peer, server_peer, worker_peer
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.tables.modules.torch_model import TorchModel
from steepest.testing import InProcessCluster

CHUNK = 400  # bytes


def creator(worker: int, device: int) -> TorchModel:
    layers = [torch.nn.Linear(12, 12) for _ in range(4)]
    return TorchModel(
        torch.nn.Sequential(*layers, torch.nn.Linear(12, 2)),
        loss=torch.nn.functional.mse_loss,
        data=(torch.ones(64, 12), torch.ones(64, 2)),
        batch_size=2,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.01),
    )


def profile() -> Profile:
    model = creator(0, 0)
    names = [entry.name for entry in model.layout.entries]

    def layout(cut: ChunkSpec) -> ParameterLayout:
        model.relayout(cut)
        return model.layout

    times = {name: 0.001 * at for at, name in enumerate(names)}
    return Profile(2, 0.1, times, layout, model.optimizer_spec)


STRATEGIES: dict[str, Any] = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=CHUNK),
    "copies": ParameterServerStrategy(num_servers=3, replication=2, chunk_bytes=CHUNK),
    "fp16": ParameterServerStrategy(num_servers=2, chunk_bytes=CHUNK, wire_dtype="fp16"),
    "int8": ParameterServerStrategy(num_servers=2, chunk_bytes=CHUNK, compression="int8"),
    "async": ParameterServerStrategy(num_servers=2, chunk_bytes=CHUNK, mode="async"),
    "ssp": ParameterServerStrategy(num_servers=2, chunk_bytes=CHUNK, mode="ssp"),
    "allreduce": AllreduceStrategy(chunk_bytes=CHUNK),
    "whole state": AllreduceStrategy(chunk_bytes=CHUNK, sharded=False),
    "powersgd": AllreduceStrategy(chunk_bytes=CHUNK, compression="powersgd"),
    "simple": SimpleStrategy(),
    "local": LocalStrategy(sync_every=2, chunk_bytes=CHUNK),
    "fragments": LocalStrategy(sync_every=4, fragments=2, chunk_bytes=CHUNK),
    "delay": LocalStrategy(sync_every=4, fragments=2, delay=1, chunk_bytes=CHUNK),
    "packed": LocalStrategy(
        sync_every=2,
        num_servers=2,
        compression="int4",
        weights_compression="int4",
        chunk_bytes=CHUNK,
    ),
    "packed, no servers": LocalStrategy(sync_every=2, compression="int8", chunk_bytes=CHUNK),
    "quorum": LocalStrategy(sync_every=2, num_servers=1, quorum=3, chunk_bytes=CHUNK),
    "quorum, packed": LocalStrategy(
        sync_every=2, num_servers=1, quorum=3, weights_compression="int4", chunk_bytes=CHUNK
    ),
}


def engine_traffic(strategy: Strategy, workers: int, hosts: HostMap, steps: int) -> Counter[Any]:
    cluster = InProcessCluster(
        creator, num_workers=workers, strategy=strategy, hosts=hosts, lend=False
    )
    found: Counter[Any] = Counter()

    def count(message: Message) -> list[Message]:
        if message.kind in (Kind.PUSH, Kind.WEIGHTS) and message.payload is not None:
            found[message.source, message.target] += message.payload.nbytes
        return [message]

    cluster.network.settle()  # all weights are sent once, before the first step
    cluster.network.filter = count
    for _ in range(steps):
        cluster.step(1)
    cluster.network.settle()
    return found


class CountingSimulation(Simulation):
    """Counts the bytes of payloads that each role sends to each other one."""

    def __init__(self, job: Job, known: Profile) -> None:
        self.bytes: Counter[tuple[Peer, Peer]] = Counter()
        super().__init__(job, known, Links(1e9, 0.0))

    def _to_server(self, source: ModelledProcess, server: int, push: ModelledPush) -> None:
        self.bytes[worker_peer(push.worker), server_peer(server)] += push.size
        super()._to_server(source, server, push)

    def _to_worker(
        self, source: ModelledProcess, server: int, worker: int, version: int, chunk: int, size: int
    ) -> None:
        self.bytes[server_peer(server), worker_peer(worker)] += size
        super()._to_worker(source, server, worker, version, chunk, size)


def traffic(job: Job, known: Profile, steps: int) -> Counter[tuple[Peer, Peer]]:
    simulated = CountingSimulation(job, known)
    simulated.run(steps)
    simulated._last = -1  # what is on its way arrives
    simulated._events.run()
    return simulated.bytes


@pytest.mark.few(12)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_are_those_of_the_engine(name: str, workers: int) -> None:
    strategy, known = STRATEGIES[name], profile()
    if "quorum" in name and workers < 3:
        workers = 3
    job = make_job(known, strategy, workers, apart=True)
    steps = 2 * job.description.layout.fragments
    planned = {pair: size for pair, size in traffic(job, known, steps).items() if size}
    inside = {
        pair for pair in planned if job.places.host_of(pair[0]) == job.places.host_of(pair[1])
    }
    between = {pair: size for pair, size in planned.items() if pair not in inside}
    assert between == engine_traffic(job.config, workers, job.places, steps)
