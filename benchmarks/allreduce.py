"""Strategy "allreduce" beside its rivals, with what is wanted of it.

    python -m benchmarks.allreduce                       # everything, about ten minutes
    python -m benchmarks.allreduce --only mlp convnet --rounds 3

Tables on one host, over Ray, with two workers (`benchmarks.overhead` describes workloads and
contenders): ``mlp``, 25 million parameters at batch 8, and ``convnet``, 1,960 parameters at batch
128: ours, our parameter server, and DistributedDataParallel on Gloo, also with the C library told
to keep freed memory.

Tables between network namespaces at 1 Gbit/s, without Ray (`benchmarks.network`; root, iproute2 and
tc needed), a perceptron of ten million parameters: ``network-4x1``, four hosts of one worker, and
``network-2x2``, two hosts of two: ours and DistributedDataParallel, both plain and with fp16 on the
wire; and at 100 Mbit/s, ``compressed``, four hosts of one worker: DistributedDataParallel with its
PowerSGD hook, ours with PowerSGD, both of rank 4, and with the top 1 %.

Tables of one tensor of 100 MB, without Ray: `steepest.collectives.all_reduce` beside
`dist.all_reduce` on Gloo, among 2 and 4 processes of this host (``tensor-2``, ``tensor-4``) and of
4 namespaces without a limit (``tensor-4-hosts``).

Rivals take turns in each round, odd rounds in reverse order; a ratio is the median over rounds,
with its range. What is wanted is a share of the rival's time. For one tensor the worst round counts
too: memory that has to be taken anew, or a message that waits, shows in few calls, and there alone.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import contextlib
import functools
import tempfile
from collections.abc import Callable

import torch

from benchmarks import all_reduce_bodies, network, overhead
from benchmarks.models import WORKLOADS
from benchmarks.namespaces import HOST, Team, UnavailableError, star
from benchmarks.overhead import DDP, alternate, compare, comparison, positive
from benchmarks.rivals import KEPT, Local, Steepest, Trainer

OURS = "steepest allreduce"
MBIT = 1000
CALLS = 5  # in a turn
WORST = 1.0  # of a rival's time in the same round, for one tensor


def on_one_host(name: str, goal: float, rounds: int) -> str:
    workload = WORKLOADS[name]
    contenders: list[Trainer] = [Local(DDP, workload), Local(DDP + KEPT, workload)]
    contenders += [
        Steepest(f"steepest {strategy}", workload, strategy) for strategy in ("ps", "allreduce")
    ]
    with overhead.ray_started(contenders):
        times = overhead.measure(contenders, rounds, workload.steps)
    title = (
        f"{name}: {workload.parameters():,} parameters, batch {workload.batch_size}, "
        f"{contenders[0].workers} workers, one host, median of {rounds} rounds of {workload.steps} "
        "steps"
    )
    return comparison(
        title, compare(times, [DDP, DDP + KEPT, "steepest ps"]), {OURS: f"{goal:g} of {DDP}"}
    )


def between_hosts(hosts: int, each: int, goals: dict[str, str], rounds: int) -> str:
    where = (hosts, each, MBIT)
    return network.report(
        network.measure(*where, rounds, network.plain_and_fp16(["allreduce"])), *where, goals
    )


def compressed(hosts: int, mbit: int, goals: dict[str, str], rounds: int) -> str:
    where = (hosts, 1, mbit)
    return network.report(network.measure(*where, rounds, ["ddp powersgd", *goals]), *where, goals)


def tensor(members: int, hosts: int, goal: float, rounds: int) -> str:
    """One tensor among processes of this host, or of so many namespaces without a limit."""
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(hosts)) if hosts > 1 else [HOST]
        meeting = stack.enter_context(tempfile.TemporaryDirectory())
        members_of = [spaces[rank % len(spaces)] for rank in range(members)]
        found = all_reduce_bodies.teams(members_of, 29540, meeting)
        for team in found.values():
            stack.enter_context(team)
            team.turn(2)

        def turn(team: Team) -> float:
            return max(team.turn(CALLS)) / CALLS

        times = alternate(
            {name: functools.partial(turn, team) for name, team in found.items()}, rounds
        )
    where = "one host" if hosts == 1 else f"{hosts} hosts without a limit"
    title = (
        f"all_reduce of 100 MB, {members} processes, {where}, median of {rounds} rounds of {CALLS}"
    )
    rows = compare(times, ["gloo"])
    worst = next(row["over"]["gloo"]["max"] for row in rows if row["name"] == "steepest")
    table = comparison(title, rows, {"steepest": f"{goal:g} of gloo"})
    return f"{table}\nsteepest's worst round: {worst:.2f} of gloo's time (wanted: {WORST:g})"


TABLES: dict[str, Callable[[int], str]] = {
    "mlp": functools.partial(on_one_host, "mlp", 0.8),
    "convnet": functools.partial(on_one_host, "convnet", 0.9),
    "network-4x1": functools.partial(
        between_hosts, 4, 1, {OURS: "0.95 of ddp", f"{OURS} fp16": "0.85 of ddp fp16"}
    ),
    "network-2x2": functools.partial(between_hosts, 2, 2, {OURS: "0.75 of ddp"}),
    "compressed": functools.partial(
        compressed, 4, 100, {f"{OURS} powersgd": "1 of ddp powersgd", f"{OURS} topk": "1 of ddp powersgd"}
    ),
    "tensor-2": functools.partial(tensor, 2, 1, 0.6),
    "tensor-4": functools.partial(tensor, 4, 1, 0.6),
    "tensor-4-hosts": functools.partial(tensor, 4, 4, 1.1),
}  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.allreduce", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for table in options.only:
        try:
            print(TABLES[table](options.rounds), flush=True)
        except UnavailableError as error:
            print(f"\n{table}: not measured ({error})", flush=True)


if __name__ == "__main__":
    main()
