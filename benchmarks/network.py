"""Training over a network: steepest beside DistributedDataParallel on Gloo, one server on each host.

    python -m benchmarks.network                       # four hosts at 1 Gbit/s
    python -m benchmarks.network --hosts 2 --mbit 5000 --rounds 3

Hosts are network namespaces of this machine on one bridge, each link shaped by tbf; needs root, iproute2 and
tc. Each has ``--workers`` workers and, for steepest, one server (`ps`). All contenders stay alive, blocked while
idle, and take turns; odd rounds run in reverse order. The model is a perceptron of 10,091,610 parameters at batch 8.
A ratio is the median over rounds of our time over the rival's, with its range. The floor is the time that the
least bytes, 2 (n - 1) / n of the parameters out of each host, take on its link.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import contextlib
import secrets
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import compute, sgd
from benchmarks.namespaces import DEADLINE, Member, Namespace, Orders, Team, star
from benchmarks.overhead import positive, ratios
from benchmarks.training_bodies import MLP10, serve, work

WORKLOAD = MLP10
BYTES = 4 * WORKLOAD.parameters()
OVERHEAD = 1538 / 1448  # of Ethernet, IP and TCP


def ddp(orders: Orders, namespace: Namespace, url: str, rank: int, world: int, half: bool) -> None:
    """One process of DistributedDataParallel."""
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.device
    limit = timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world, timeout=limit)
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


def steepest_team(spaces: list[Namespace], name: str, each: int, wire_dtype: str | None, meeting: str) -> Team:
    workers = len(spaces) * each
    job = {"workload": WORKLOAD.name, "workers": workers, "servers": len(spaces), "wire_dtype": wire_dtype}
    common = {"job": job, "meeting": meeting, "token": secrets.token_bytes(32)}
    return Team(
        name,
        [
            Member(spaces[i % len(spaces)], body, common | {"namespace": spaces[i % len(spaces)], "index": i})
            for body, count in ((serve, len(spaces)), (work, workers))
            for i in range(count)
        ],
    )


def ddp_team(spaces: list[Namespace], name: str, each: int, port: int, half: bool) -> Team:
    common = {"url": f"tcp://{spaces[0].address}:{port}", "world": len(spaces) * each, "half": half}
    ranks = [(rank, spaces[rank % len(spaces)]) for rank in range(len(spaces) * each)]
    return Team(name, [Member(space, ddp, common | {"namespace": space, "rank": rank}) for rank, space in ranks])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__.split("\n")[0])
    parser.add_argument("--hosts", type=positive, default=4)
    parser.add_argument("--workers", type=positive, default=1, help="on each host")
    parser.add_argument("--mbit", type=positive, default=1000)
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(options.hosts, options.mbit))

        def directory() -> str:
            return stack.enter_context(tempfile.TemporaryDirectory())

        teams = {
            "ddp": ddp_team(spaces, "ddp", options.workers, 29520, half=False),
            "ddp fp16": ddp_team(spaces, "ddp fp16", options.workers, 29521, half=True),
            "steepest": steepest_team(spaces, "steepest", options.workers, None, directory()),
            "steepest fp16": steepest_team(spaces, "steepest fp16", options.workers, "fp16", directory()),
        }
        for team in teams.values():
            stack.enter_context(team)
            team.turn(2)
        times: dict[str, list[float]] = {name: [] for name in teams}
        for number in range(options.rounds):
            for name in teams if number % 2 == 0 else reversed(teams):
                teams[name].turn(1)  # connections that have been idle begin slowly
                times[name].append(max(teams[name].turn(WORKLOAD.steps)))
    least = 8 * OVERHEAD * 2 * (options.hosts - 1) / options.hosts * BYTES / (options.mbit * 1e6)
    hosts = f"{options.hosts} hosts x {options.workers} at {options.mbit} Mbit/s"
    print(f"{hosts}, {BYTES / 1e6:.1f} MB of parameters, {options.rounds} rounds")
    print(f"{'':16}{'ms/step':>10}{'floor':>8}{'over ddp':>11}{'min..max':>14}{'over ddp fp16':>15}")
    for name, seconds in times.items():
        floor = least / 2 if "fp16" in name else least
        both = [ratios(seconds, times[rival]) for rival in ("ddp", "ddp fp16")]
        cells = f"{1e3 * statistics.median(seconds):10.0f}{1e3 * floor:8.0f}{both[0]['median']:11.2f}"
        print(f"{name:16}{cells}{both[0]['min']:8.2f}..{both[0]['max']:.2f}{both[1]['median']:15.2f}")


if __name__ == "__main__":
    main()
