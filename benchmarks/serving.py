"""Hosts that only serve: the step of a job whose servers are all on them, and of one that has none of them.

    python -m benchmarks.serving                       # four hosts with a worker each, 1 Gbit/s
    python -m benchmarks.serving --alone 0 2 --mbit 500 --rounds 3

Hosts are network namespaces of this machine, as those of `benchmarks.network`, with its model of 40 MB and its batch
of 8. Each of n hosts has a worker; with k = 0 also a server, otherwise k further hosts have a server each. All jobs
stay alive, blocked while idle, and take turns; odd rounds run in reverse order. ``BytePS`` is the optimum for n and k
of a design whose weights leave chunk by chunk, t = 2 n (n - 1) M / ((n^2 + k n - 2 k) B) (Jiang et al. 2020);
``floor`` is the least in ours, where weights leave when all gradients have come: twice what the busiest link takes in
one direction. ``busy`` is the part of this machine's processors that the job used: near 1 it is they that are measured.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.namespaces import Team, star
from benchmarks.network import BYTES, OVERHEAD, WORKLOAD, turn
from benchmarks.overhead import alternate, positive
from benchmarks.training_bodies import job_team

TICKS = os.sysconf("SC_CLK_TCK")


def optimum(hosts: int, alone: int, mbit: int) -> float:
    """Return the least seconds for the bytes of a step of BytePS."""
    alone = min(alone, hosts)
    parts = hosts * hosts + alone * hosts - 2 * alone
    return _seconds(2 * hosts * (hosts - 1) / parts, mbit)


def floor(hosts: int, alone: int, mbit: int) -> float:
    """Return the least seconds for the bytes of a step in which weights leave after all gradients."""
    return _seconds(2 * (max(1, hosts / alone) if alone else (hosts - 1) / hosts), mbit)


def _seconds(models: float, mbit: int) -> float:
    return 8 * OVERHEAD * models * BYTES / (mbit * 1e6)


def processor_seconds(team: Team) -> float:
    """Return what a team's processes have used so far."""
    stats = [
        Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in team.pids()
    ]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) / TICKS


def measure(hosts: int, numbers: list[int], mbit: int, rounds: int) -> str:
    """Return the table."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(star(hosts + max(numbers), mbit))
        teams: dict[str, Team] = {}
        for alone in numbers:
            meeting = stack.enter_context(tempfile.TemporaryDirectory())
            team = job_team(
                spaces[: hosts + alone],
                WORKLOAD.name,
                "ps",
                meeting,
                servers=0 if alone else 1,
                alone=alone,
            )
            teams[str(alone)] = stack.enter_context(team)
            team.turn(4)
        busy: dict[str, list[float]] = {name: [] for name in teams}

        def timed(name: str) -> float:
            before, begin = processor_seconds(teams[name]), time.perf_counter()
            seconds = turn(teams[name])
            used = processor_seconds(teams[name]) - before
            busy[name].append(used / (time.perf_counter() - begin) / (os.cpu_count() or 1))
            return seconds

        times = alternate({name: lambda name=name: timed(name) for name in teams}, rounds)  # type: ignore[misc]
    lines = [
        f"{hosts} hosts x 1 at {mbit} Mbit/s, {BYTES / 1e6:.1f} MB of parameters, median of {rounds} rounds",
        f"{'k':>3}{'ms/step':>10}{'BytePS':>8}{'floor':>8}{'over it':>9}{'min..max':>14}{'busy':>7}",
    ]
    for name, found in times.items():
        least = floor(hosts, int(name), mbit)
        over = [seconds / least for seconds in found]
        spread = f"{min(over):.2f}..{max(over):.2f}"
        lines.append(
            f"{name:>3}{1e3 * median(found):>10.0f}{1e3 * optimum(hosts, int(name), mbit):>8.0f}"
            f"{1e3 * least:>8.0f}{median(over):>9.2f}{spread:>14}{median(busy[name]):>7.2f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__.split("\n")[0] if __doc__ else ""
    )
    parser.add_argument("--hosts", type=positive, default=4, help="with a worker each")
    parser.add_argument("--alone", type=int, nargs="+", default=[0, 4], help="k, that serve")
    parser.add_argument("--mbit", type=positive, default=1000)
    parser.add_argument("--rounds", type=positive, default=5)
    options = parser.parse_args(arguments)
    print("\n" + measure(options.hosts, options.alone, options.mbit, options.rounds))


if __name__ == "__main__":
    main()
