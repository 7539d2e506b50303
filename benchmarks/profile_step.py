"""Where the time of a synchronous step goes, in each process.

    python -m benchmarks.profile_step
    python -m benchmarks.profile_step --workload convnet --workers 2 --servers 1 --steps 200
    python -m benchmarks.profile_step --strategy allreduce
    python -m benchmarks.profile_step --workload mlp10 --hosts 4 --mbit 1000 --wire-dtype fp16

Processes are put together from the core's parts, without Ray, in network namespaces (root and
iproute2 needed): on one host payloads are lent in shared memory. Times are milliseconds per step of
each process: they overlap between processes, and "wait" is idle or waiting for a core. Below stands
the floor: computing alone, and bytes over bandwidth.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.models import compute
from benchmarks.namespaces import star
from benchmarks.overhead import positive
from benchmarks.step_clock import PARTS
from benchmarks.training_bodies import ALL, STRATEGIES, job_team


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile_step", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--workload", choices=sorted(ALL), default="mlp")
    parser.add_argument("--strategy", choices=STRATEGIES, default="ps")
    parser.add_argument("--workers", type=positive, default=2, help="on each host")
    parser.add_argument("--servers", type=positive, default=1, help="on each host, with ps")
    parser.add_argument("--hosts", type=positive, default=1)
    parser.add_argument("--mbit", type=positive, help="of each host's link; no limit by default")
    parser.add_argument("--wire-dtype", choices=("fp16", "bf16"))
    parser.add_argument("--compression", choices=("int8", "topk", "powersgd"))
    parser.add_argument("--steps", type=positive, default=20)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        spaces = stack.enter_context(star(options.hosts, options.mbit))
        meeting, found = (stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2))
        team = job_team(
            spaces,
            options.workload,
            options.strategy,
            meeting,
            workers=options.workers,
            servers=options.servers,
            wire_dtype=options.wire_dtype,
            compression=options.compression,
            profile=found,
        )
        stack.enter_context(team)
        team.turn(max(options.steps // 4, 2))
        seconds = max(team.turn(options.steps))
        team.turn(0)
        profiles = {
            path.name: json.loads(path.read_text()) for path in sorted(Path(found).iterdir())
        }
    parts = [*dict.fromkeys(part for part, _, _ in PARTS), "other"]
    each = f"{options.workers} workers" + (
        f" and {options.servers} servers" if options.strategy == "ps" else ""
    )
    print(
        f"{options.workload}, {options.strategy}, {options.hosts} hosts of {each}: "
        f"{1e3 * seconds:.1f} ms/step"
    )
    print(f"{'ms/step':12}" + "".join(f"{part:>9}" for part in parts))
    for name, spent in profiles.items():
        print(
            f"{name:12}"
            + "".join(f"{1e3 * spent.get(part, 0.0) / options.steps:9.1f}" for part in parts)
        )
    print(f"floor: computing alone {1e3 * alone(options.workload):.1f} ms", end="")
    if options.mbit and options.hosts > 1:
        width = 2 if options.wire_dtype else 4
        share = 2 * (options.hosts - 1) / options.hosts * width * ALL[options.workload].parameters()
        print(f", least bytes over bandwidth {8e3 * share / (options.mbit * 1e6):.1f} ms", end="")
    print()


def alone(name: str) -> float:
    """Seconds of one step's computation in this process, nothing else running."""
    workload = ALL[name]
    network, batches = workload.build(), workload.batches(0)
    compute(network, batches)
    begin = time.perf_counter()
    for _ in range(workload.steps):
        compute(network, batches)
    return (time.perf_counter() - begin) / workload.steps


if __name__ == "__main__":
    main()
