"""Training over a network: steepest beside DistributedDataParallel on Gloo, one host per worker.

    python -m benchmarks.network                       # four hosts at 1 Gbit/s
    python -m benchmarks.network --hosts 2 --mbit 5000 --rounds 3

Hosts are network namespaces of this machine on one bridge, each link shaped by tbf; needs root, iproute2 and
tc. Each has one worker and, for steepest, one server (`ps`). All contenders stay alive, blocked while idle, and
take turns; odd rounds run in reverse order. The model is a perceptron of 10,091,610 parameters at batch 8, float32.
A ratio is the median over rounds of our time over the rival's, with its range. The floor is the time that the
least bytes, 2 (n - 1) / n of the parameters out of each host, take on its link.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import contextlib
import functools
import secrets
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from queue import Empty

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import MLP, Workload, compute, sgd
from benchmarks.namespaces import DEADLINE, Member, Namespace, Orders, Team, star
from benchmarks.overhead import positive, ratios
from benchmarks.parameter_server_bodies import read, write
from steepest.comm.message import COORDINATOR, Kind, Peer, server_peer, worker_peer
from steepest.comm.router import Router
from steepest.comm.shared import allocate
from steepest.comm.wire import WireTransport
from steepest.config import ParameterServerStrategy
from steepest.job import Job, build_models, build_replicas, host_client, host_coordinator, host_server, host_worker
from steepest.models.torch import TorchModel

WORKLOAD = Workload("mlp10", functools.partial(MLP, hidden=2000), (1024,), batch_size=8, samples=512, steps=3)
BYTES = 4 * WORKLOAD.parameters()
OVERHEAD = 1538 / 1448  # of Ethernet, IP and TCP
CLIENT = Peer("client", 0)


def creator(worker: int, device: int) -> TorchModel:
    return TorchModel(
        WORKLOAD.build(), loss=F.nll_loss, data=WORKLOAD.data(), batch_size=WORKLOAD.batch_size, optimizer=sgd
    )


def make_job(hosts: int, wire_dtype: str | None) -> tuple[Job, list[TorchModel]]:
    config = ParameterServerStrategy(num_servers=hosts, wire_dtype=wire_dtype)
    models, description = build_models(creator, 0, 1, 0, None)
    return Job(description, config, hosts, 1, hosts, 0, DEADLINE), models  # type: ignore[return-value]


def serve(
    orders: Orders, namespace: Namespace, index: int, hosts: int, wire_dtype: str | None, meeting: str, token: bytes
) -> None:
    """A host's server; the coordinator lives beside the first."""
    job, models = make_job(hosts, wire_dtype)
    initial = build_replicas(job, 0, models, [torch.device("cpu")]).weights
    weights = allocate(initial.numel())
    weights.copy_(initial)
    router = Router()
    peers = (server_peer(index), COORDINATOR) if index == 0 else (server_peer(index),)
    if index == 0:
        host_coordinator(router, job)
    host_server(router, job, index, weights)
    wire = WireTransport(token, peers, namespace.name, router.destination)
    router.transport = wire
    write(Path(meeting) / str(index), wire.listen(namespace.address))
    if index:
        router.attach(wire.connect(read(Path(meeting) / "0")))
    router.start("server")
    orders.serve(lambda: None)
    router.stop()


def work(
    orders: Orders, namespace: Namespace, index: int, hosts: int, wire_dtype: str | None, meeting: str, token: bytes
) -> None:
    """A host's worker; beside the first lives the client, which asks for steps."""
    job, models = make_job(hosts, wire_dtype)
    replicas = build_replicas(job, index, models, [torch.device("cpu")])
    router = Router()
    peers = (worker_peer(index), CLIENT) if index == 0 else (worker_peer(index),)
    worker = host_worker(router, job, index, replicas)
    client = host_client(router, job, 0) if index == 0 else None
    wire = WireTransport(token, peers, namespace.name, router.destination)
    router.transport = wire
    for server in range(hosts):
        router.attach(wire.connect(read(Path(meeting) / str(server))))
    router.call(worker.join)
    if client is None:
        router.start("worker")
        orders.serve(lambda: None)
        router.stop()
        return
    orders.ready()
    for steps in orders:
        begin, taken = time.perf_counter(), 0
        client.ask(steps, True)
        while taken < steps:
            router.turn(0.5)
            with contextlib.suppress(Empty):
                outcome = client.outcomes.get_nowait()
                if isinstance(outcome, Exception) or outcome.kind is not Kind.RESULT:
                    raise RuntimeError(f"the step was not committed: {outcome}")
                taken += 1
        orders.done((time.perf_counter() - begin) / steps)


def ddp(orders: Orders, namespace: Namespace, url: str, rank: int, hosts: int, half: bool) -> None:
    """One process of DistributedDataParallel."""
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.device
    limit = timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=hosts, timeout=limit)
    network = DistributedDataParallel(WORKLOAD.build(), gradient_as_bucket_view=True)
    if half:
        network.register_comm_hook(None, fp16_compress_hook)
    batches, optimizer = WORKLOAD.batches(rank), sgd(network)

    def step() -> None:
        compute(network, batches)
        optimizer.step()

    orders.ready()
    for steps in orders:
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        orders.done((time.perf_counter() - begin) / steps)
    dist.destroy_process_group()


def steepest_team(spaces: list[Namespace], name: str, wire_dtype: str | None, meeting: str) -> Team:
    common = {"hosts": len(spaces), "wire_dtype": wire_dtype, "meeting": meeting, "token": secrets.token_bytes(32)}
    return Team(
        name,
        [
            Member(space, body, common | {"namespace": space, "index": i})
            for body in (serve, work)
            for i, space in enumerate(spaces)
        ],
    )


def ddp_team(spaces: list[Namespace], name: str, port: int, half: bool) -> Team:
    common = {"url": f"tcp://{spaces[0].address}:{port}", "hosts": len(spaces), "half": half}
    return Team(name, [Member(space, ddp, common | {"namespace": space, "rank": i}) for i, space in enumerate(spaces)])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=positive, default=4)
    parser.add_argument("--mbit", type=positive, default=1000)
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(options.hosts, options.mbit))

        def directory() -> str:
            return stack.enter_context(tempfile.TemporaryDirectory())

        teams = {
            "ddp": ddp_team(spaces, "ddp", 29520, half=False),
            "ddp fp16": ddp_team(spaces, "ddp fp16", 29521, half=True),
            "steepest": steepest_team(spaces, "steepest", None, directory()),
            "steepest fp16": steepest_team(spaces, "steepest fp16", "fp16", directory()),
        }
        for team in teams.values():
            stack.enter_context(team)
            team.turn(2)
        times: dict[str, list[float]] = {name: [] for name in teams}
        for number in range(options.rounds):
            for name in teams if number % 2 == 0 else reversed(teams):
                times[name].append(max(teams[name].turn(WORKLOAD.steps)))
    least = 8 * OVERHEAD * 2 * (options.hosts - 1) / options.hosts * BYTES / (options.mbit * 1e6)
    print(
        f"{options.hosts} hosts at {options.mbit} Mbit/s, {BYTES / 1e6:.1f} MB of parameters, {options.rounds} rounds"
    )
    print(f"{'':16}{'ms/step':>10}{'floor':>8}{'over ddp':>11}{'min..max':>14}{'over ddp fp16':>15}")
    for name, seconds in times.items():
        floor = least / 2 if "fp16" in name else least
        both = [ratios(seconds, times[rival]) for rival in ("ddp", "ddp fp16")]
        cells = f"{1e3 * statistics.median(seconds):10.0f}{1e3 * floor:8.0f}{both[0]['median']:11.2f}"
        print(f"{name:16}{cells}{both[0]['min']:8.2f}..{both[0]['max']:.2f}{both[1]['median']:15.2f}")


if __name__ == "__main__":
    main()
