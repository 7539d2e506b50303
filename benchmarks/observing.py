"""What it costs to look at a job: the time of a step while its timeline is recorded, or its page is open.

    python -m benchmarks.observing                       # the ConvNet under "ps", about two minutes
    python -m benchmarks.observing --strategy allreduce --model mlp --rounds 9

One job of two workers trains in turns, odd rounds in reverse order: ``off``, ``timeline`` (recorded from before
the turn; the file is written after it, and is not timed) and, where plotly is installed, ``page``, whose data
another process fetches twice a second. The ratio is that of a turn to ``off`` of the same round. A second
table has the processor time of the job's processes and the driver instead of what a clock shows: other programs of
the machine disturb it less.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from benchmarks.models import WORKLOADS
from benchmarks.overhead import alternate, compare, comparison, positive
from benchmarks.rivals import WORKERS
from steepest import DistributedSGD, TorchModel
from steepest.errors import ConfigurationError

#: A program that fetches the page's data as an open page does, given its address, until it is killed.
LOOK = """
import json, sys, time, urllib.request
address, _, token = sys.argv[1].partition("#token=")
query = ""
while True:
    headers = {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(urllib.request.Request(f"{address}data{query}", headers=headers)) as answer:
        found = json.load(answer)
    curves = found["curves"]
    since = max(curves["from"] + len(curves["step"]) - 1, 0)
    query = f"?since={since}&revision={curves['revision']}&changes={found['changes']}"
    print("seen", flush=True)
    time.sleep(0.5)
"""
Spent = tuple[float, float]  # seconds of a step, by the clock and of processors


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.observing")
    parser.add_argument("--model", choices=[*WORKLOADS], default="convnet")
    parser.add_argument("--strategy", default="ps")
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--steps", type=positive, help="steps of one turn")
    options = parser.parse_args(arguments)
    workload = WORKLOADS[options.model]
    steps = options.steps or workload.steps

    def creator(worker_index: int, device_index: int) -> TorchModel:
        torch.set_num_threads(1)
        return workload.model()

    with (
        DistributedSGD(creator, WORKERS, strategy=options.strategy) as sgd,
        tempfile.TemporaryDirectory() as folder,
    ):
        trace = Path(folder) / "trace.json"
        turns: dict[str, Callable[[], Spent]] = {
            "off": functools.partial(seconds_of, sgd, steps),
            "timeline": functools.partial(with_timeline, sgd, steps, trace),
        }
        with contextlib.suppress(ConfigurationError):  # plotly is not installed
            turns["page"] = functools.partial(with_page, sgd, steps, sgd.page().url)
        for turn in turns.values():
            turn()
        spent = alternate(turns, options.rounds)
        size = trace.stat().st_size / 1e6
    title = f"{options.model}, {options.strategy}, {WORKERS} workers, turns of {steps} steps"
    for number, what in enumerate(("", ", processor time")):
        times = {name: [each[number] for each in found] for name, found in spent.items()}
        rows = compare(times, ["off"])
        print(comparison(title + what, rows, {"timeline": "1.02", "page": "1.01"}))
    print(f"the last trace has {size:.1f} MB")


def seconds_of(sgd: DistributedSGD, steps: int) -> Spent:
    """Take steps; return the seconds of one, by the clock and of processors."""
    pids = {os.getpid(), *(process.pid for process in sgd.processes())}
    begin, before = time.perf_counter(), processor_seconds(pids)
    sgd.fit(steps=steps, progress=False)
    return (time.perf_counter() - begin) / steps, (processor_seconds(pids) - before) / steps


def processor_seconds(pids: Collection[int]) -> float:
    """What the threads of some processes have used; one that ends meanwhile counts as nothing."""
    found = 0
    for task in (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()):
        with contextlib.suppress(OSError):
            found += int((task / "schedstat").read_text().split()[0])
    return found / 1e9


def with_timeline(sgd: DistributedSGD, steps: int, path: Path) -> Spent:
    with sgd.timeline(path):
        return seconds_of(sgd, steps)


def with_page(sgd: DistributedSGD, steps: int, url: str) -> Spent:
    looker = subprocess.Popen([sys.executable, "-c", LOOK, url], stdout=subprocess.PIPE)
    try:
        assert looker.stdout is not None
        looker.stdout.readline()  # it has the page
        return seconds_of(sgd, steps)
    finally:
        looker.kill()
        looker.communicate()


if __name__ == "__main__":
    main()
