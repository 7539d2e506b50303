"""Training over a network: steepest beside DistributedDataParallel on Gloo.

    python -m benchmarks.network                       # four hosts at 1 Gbit/s
    python -m benchmarks.network --hosts 2 --mbit 5000 --rounds 3 --strategies allreduce

Hosts are network namespaces of this machine on one bridge, each link shaped by tbf; needs root,
iproute2 and tc. Each has ``--workers`` workers and, for `ps`, one server; with `allreduce` each
worker's process is one. All contenders stay alive, blocked while idle, and take turns; odd rounds
run in reverse order. The model is a perceptron of 10,091,610 parameters at batch 8. A ratio is the
median over rounds of the contender's time over another's, with its range. The floor is the time
that the least bytes, 2 (n - 1) / n of the parameters out of each host, take on its link.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import contextlib
import functools
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import compute, sgd
from benchmarks.namespaces import DEADLINE, Member, Namespace, Orders, Team, star
from benchmarks.overhead import Times, alternate, compare, comparison, positive
from benchmarks.training_bodies import MLP10, STRATEGIES, job_team

WORKLOAD = MLP10
BYTES = 4 * WORKLOAD.parameters()
OVERHEAD = 1538 / 1448  # of Ethernet, IP and TCP


RANK = 4  # of PowerSGD, here and there


def ddp(orders: Orders, namespace: Namespace, url: str, rank: int, world: int, hook: str) -> None:
    """One process of DistributedDataParallel."""
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.device
    limit = timedelta(seconds=DEADLINE)
    dist.init_process_group("gloo", init_method=url, rank=rank, world_size=world, timeout=limit)
    # Gloo's threads start the hook's later reductions of several buckets in an order of their own:
    # one bucket then
    cap = 1000 if hook == "powersgd" else None
    network = DistributedDataParallel(
        WORKLOAD.build(), gradient_as_bucket_view=True, bucket_cap_mb=cap
    )
    if hook == "fp16":
        network.register_comm_hook(None, fp16_compress_hook)
    elif (
        hook == "powersgd"
    ):  # from its third step on; the first two are there to settle the buckets
        state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        network.register_comm_hook(state, powerSGD_hook)
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


def ddp_team(spaces: list[Namespace], each: int, port: int, hook: str) -> Team:
    common = {"url": f"tcp://{spaces[0].address}:{port}", "world": len(spaces) * each, "hook": hook}
    ranks = [(rank, spaces[rank % len(spaces)]) for rank in range(len(spaces) * each)]
    members = [
        Member(space, ddp, common | {"namespace": space, "rank": rank}) for rank, space in ranks
    ]
    return Team(f"ddp {hook}", members)


def plain_and_fp16(strategies: Sequence[str]) -> list[str]:
    """The contenders of the usual table: `ddp` and every strategy, plain and with fp16 on the wire."""
    return [
        f"{name}{wire}"
        for name in ("ddp", *(f"steepest {s}" for s in strategies))
        for wire in ("", " fp16")
    ]


def measure(hosts: int, each: int, mbit: int, rounds: int, contenders: Sequence[str]) -> Times:
    """Seconds for a step, round by round.

    Args:
        contenders: "ddp" or "steepest STRATEGY", with or without what is on the wire: "fp16",
            "powersgd", "topk".
    """
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(hosts, mbit))
        teams: dict[str, Team] = {}
        for number, name in enumerate(contenders):
            kind, _, wire = name.removeprefix("steepest ").partition(" ")
            if kind == "ddp":
                teams[name] = ddp_team(spaces, each, 29520 + number, wire)
            else:
                meeting = stack.enter_context(tempfile.TemporaryDirectory())
                packed = (
                    {} if not wire else {"wire_dtype" if wire == "fp16" else "compression": wire}
                )
                teams[name] = job_team(spaces, WORKLOAD.name, kind, meeting, workers=each, **packed)
        for team in teams.values():
            stack.enter_context(team)
            team.turn(4)
        return alternate(
            {name: functools.partial(turn, team) for name, team in teams.items()}, rounds
        )


def turn(team: Team) -> float:
    team.turn(1)  # connections that have been idle begin slowly
    return max(team.turn(WORKLOAD.steps))


def report(
    times: Times, hosts: int, each: int, mbit: int, goals: Mapping[str, str] | None = None
) -> str:
    """The table of what `measure` returns, beside all of DistributedDataParallel."""
    rivals = [name for name in times if name.startswith("ddp")]
    floor = 1e3 * 8 * OVERHEAD * 2 * (hosts - 1) / hosts * BYTES / (mbit * 1e6)
    title = (
        f"{hosts} hosts x {each} at {mbit} Mbit/s, {BYTES / 1e6:.1f} MB of parameters, median of "
        f"{len(times[rivals[0]])} rounds of {WORKLOAD.steps} steps; floor {floor:.0f} ms, "
        f"{floor / 2:.0f} with fp16"
    )
    return comparison(title, compare(times, rivals), goals)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--hosts", type=positive, default=4)
    parser.add_argument("--workers", type=positive, default=1, help="on each host")
    parser.add_argument("--mbit", type=positive, default=1000)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=["ps"])
    options = parser.parse_args(arguments)
    where = (options.hosts, options.workers, options.mbit)
    print(report(measure(*where, options.rounds, plain_and_fp16(options.strategies)), *where))


if __name__ == "__main__":
    main()
