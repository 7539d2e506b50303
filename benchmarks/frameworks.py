"""The step of workers of steepest over the same model's own step, for other frameworks.

    python -m benchmarks.frameworks                      # JAX: from its environment, make test-jax makes it
    python -m benchmarks.frameworks --framework tensorflow              # make test-tensorflow makes its own
    python -m benchmarks.frameworks --framework tensorflow --workers 2  # beside MultiWorkerMirroredStrategy
    python -m benchmarks.frameworks --workload mlp --rounds 9 --json frameworks.json

Both take turns of ``--steps`` steps, in reverse order in odd rounds; each process has one thread. A ratio is
that of one round. ``plain`` is the framework's usual loop in one process: with JAX, one compiled function computes
the gradients and applies the optimizer, in memory that it reuses; with TensorFlow, Keras' `fit`. Two workers are
two processes on this machine, under ``allreduce``.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["PJRT_NPROC"] = "1"  # before they start, and inherited
os.environ["TF_NUM_INTRAOP_THREADS"] = os.environ["TF_NUM_INTEROP_THREADS"] = "1"
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import argparse
import importlib
import json
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from steepest import AllreduceStrategy, DistributedSGD, ParameterServerStrategy


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frameworks")
    parser.add_argument("--framework", choices=("jax", "tensorflow"), default="jax")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=1)
    parser.add_argument(
        "--workload", choices=("convnet", "mlp", "large", "small", "all"), default="all"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of a turn (default: the workload's)")
    parser.add_argument("--chunk-bytes", type=int, help="of our strategy (default: its own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement there")
    options = parser.parse_args(arguments)
    if options.workers > 1 and options.framework == "jax":
        parser.error("--workers 2 has no rival with JAX: give --framework tensorflow")
    framework = importlib.import_module(f"benchmarks.frameworks_{options.framework}")
    names = list(framework.WORKLOADS) if options.workload == "all" else [options.workload]
    begun = not ray.is_initialized()
    if begun:
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        found = {name: measure(framework, name, options) for name in names}
    finally:
        if begun:
            ray.shutdown()
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


def measure(framework: Any, name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step of each contender, one entry a round; prints the table."""
    workload, workers = framework.WORKLOADS[name], options.workers
    steps = options.steps or workload.steps
    rivals = start_rivals(framework, workload, workers)
    times: dict[str, list[float]] = {"plain": [], "steepest": []}
    ours = ParameterServerStrategy if workers == 1 else AllreduceStrategy
    strategy = ours(chunk_bytes=options.chunk_bytes)
    with DistributedSGD(
        framework.model_creator(workload), num_workers=workers, strategy=strategy
    ) as sgd:
        turns: dict[str, Callable[[], float]] = {
            "plain": lambda: max(ray.get([rival.run.remote(steps) for rival in rivals])),
            "steepest": lambda: seconds_of(sgd, steps),
        }
        for turn in turns.values():
            turn()  # compiles
        for number in range(options.rounds):
            for who in turns if number % 2 == 0 else reversed(turns):
                times[who].append(turns[who]() / steps)
    for rival in rivals:
        ray.kill(rival)
    ratios = [b / a for a, b in zip(times["plain"], times["steepest"], strict=True)]
    shown = {who: f"{1e3 * statistics.median(own):.2f} ms" for who, own in times.items()}
    load = os.getloadavg()[0]
    print(
        f"{name} ({workload.says}): plain {shown['plain']}, steepest {shown['steepest']}, ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), load {load:.1f}",
        flush=True,
    )
    return times


def start_rivals(framework: Any, workload: Any, workers: int) -> list[Any]:
    """The processes of the rival."""
    if workers == 1:
        return [ray.remote(num_cpus=1)(framework.Plain).remote(workload)]
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(workers)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    actor = ray.remote(num_cpus=1)(framework.Mirrored)
    return [actor.remote(workload, index, addresses) for index in range(workers)]


def seconds_of(sgd: DistributedSGD, steps: int) -> float:
    """Seconds of some steps, as the driver sees them."""
    began = time.perf_counter()
    sgd.fit(steps=steps, progress=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
