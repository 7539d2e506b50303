"""From a script's start to its first committed step, with two workers: steepest beside Ray Train.

    python -m benchmarks.startup                         # both tables, about six minutes
    python -m benchmarks.startup --only own --rounds 3

Two tables: ``own``, where the script starts Ray, and ``running``, where it joins a cluster that
runs already. The contenders are ``DistributedSGD`` and Ray Train's ``TorchTrainer`` on Gloo, on the
network of 1,960 parameters and random data: `benchmarks.startup_scripts`. ``plain`` is what of our
time is not ours: a script that imports torch and Ray, and starts as many plain actors that import
torch. Each is run as ``python -m``, in a fresh interpreter; the time is taken from before that
process exists until its first step is committed. They take turns, odd rounds in reverse order, and
each has ended before the next begins. A ratio is the median over rounds of our time over another's
in the same round, with its range. Ray Train needs pandas and pyarrow: ``pip install 'ray[train]'``;
the ``dev`` extra has it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # inherited by every process
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.pop(
    "PYTHONDONTWRITEBYTECODE", None
)  # what is installed is compiled already, a checkout is once

import argparse
import contextlib
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from benchmarks.overhead import machine, positive, progress, ratios
from benchmarks.parameter_server_rivals import ray_started
from benchmarks.rivals import DEADLINE

OURS, RIVAL, FLOOR = "steepest", "train", "plain"
TITLES = {"own": "Ray started by the script", "running": "a Ray cluster that runs already"}
GOAL = 0.35
CPUS = 4  # of the cluster that runs already; a logical number
Times = dict[str, list[float]]  # contender -> seconds, one entry a round


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write every measurement to this file"
    )
    options = parser.parse_args(arguments)
    try:
        importlib.import_module("ray.train.torch")
    except ImportError as error:
        parser.exit(1, f"Ray Train cannot be imported ({error}): pip install 'ray[train]'\n")
    reports = {}
    for table in options.only:
        with cluster() if table == "running" else contextlib.nullcontext() as address:
            reports[table] = measure(table, address, options.rounds)
        print(text(table, reports[table]), flush=True)
    if options.json:
        options.json.write_text(
            json.dumps({"machine": machine(), "seconds": reports}, indent=2) + "\n"
        )


@contextlib.contextmanager
def cluster() -> Iterator[str]:
    """A cluster of this process; the address for others."""
    with ray_started(CPUS):
        yield ray.get_runtime_context().gcs_address


def measure(table: str, address: str | None, rounds: int) -> Times:
    times: Times = {OURS: [], RIVAL: [], FLOOR: []}
    for name in times:
        start(name, address)  # files come into the kernel's memory, modules are compiled
    for number in range(rounds):
        for name in times if number % 2 == 0 else reversed(times):
            times[name].append(start(name, address))
        progress(f"{table}: round {number + 1} of {rounds}")
    return times


def start(name: str, address: str | None) -> float:
    """Run a script to its end; the seconds to its first committed step."""
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    if address is not None:
        environment["RAY_ADDRESS"] = address
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "stepped")
        begin = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.startup_scripts", name, str(file)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{name} failed\n{done.stdout}{done.stderr}")
        return float(file.read_text()) - begin


def text(table: str, times: Times) -> str:
    title = (
        f"{table}: {TITLES[table]}, seconds to the first step, median of {len(times[OURS])} rounds"
    )
    lines = [
        "",
        title,
        f"{'':17}{'s':>11}{'min..max':>18}{'ours/this':>11}{'min..max':>14}{'wanted':>8}",
    ]
    for name, seconds in times.items():
        spread = f"{min(seconds):.2f}..{max(seconds):.2f}"
        line = f"{name:17}{statistics.median(seconds):11.2f}{spread:>18}"
        if name != OURS:
            ratio = ratios(times[OURS], seconds)
            spread = f"{ratio['min']:.2f}..{ratio['max']:.2f}"
            line += f"{ratio['median']:11.2f}{spread:>14}"
        if name == RIVAL:
            line += f"{GOAL:8.2f}"
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
