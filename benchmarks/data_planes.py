"""Where workers add up gradients: the library's own connections beside a process group of torch.distributed.

    python -m benchmarks.data_planes                         # about ten minutes
    python -m benchmarks.data_planes --only convnet --rounds 11

``mlp``, 25 million parameters at batch 8, and ``convnet``, 1,960 parameters at batch 128 (`benchmarks.models`), with
two workers on one host, over Ray: DistributedDataParallel on Gloo; ours under `AllreduceStrategy`, with shared memory,
over TCP alone as between hosts, and over TCP with the whole of the optimizer's state in each worker; and ours with
``data_plane="gloo"``, whose group is over TCP, too, with the whole of that state in each worker and in slices.
Contenders take turns in each round, odd rounds in reverse order; a ratio is the median over rounds, with its range.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and inherited by every process

import argparse

import torch

from benchmarks import overhead
from benchmarks.models import WORKLOADS
from benchmarks.overhead import DDP, compare, comparison, positive
from benchmarks.rivals import KEPT, Local, Steepest, Trainer
from steepest import AllreduceStrategy

OURS, TCP, WHOLE = "own, shared memory", "own, tcp", "own, tcp, whole state"
GLOO, SHARDED = "gloo group", "gloo group, sharded"
STRATEGIES = {
    OURS: AllreduceStrategy(),
    TCP: AllreduceStrategy(transport="tcp"),
    WHOLE: AllreduceStrategy(transport="tcp", sharded=False),
    GLOO: AllreduceStrategy(transport="tcp", data_plane="gloo"),
    SHARDED: AllreduceStrategy(transport="tcp", data_plane="gloo", sharded=True),
}


def table(name: str, rounds: int, steps: int | None) -> str:
    workload = WORKLOADS[name]
    steps = steps or workload.steps
    contenders: list[Trainer] = [Local(DDP + KEPT, workload)]
    contenders += [Steepest(each, workload, strategy) for each, strategy in STRATEGIES.items()]
    with overhead.ray_started(contenders):
        times = overhead.measure(contenders, rounds, steps)
    title = (
        f"{name}: {workload.parameters():,} parameters, batch {workload.batch_size}, "
        f"{contenders[0].workers} workers, one host, median of {rounds} rounds of {steps} steps"
    )
    return comparison(title, compare(times, [DDP + KEPT, OURS, TCP, WHOLE]))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data_planes", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--only", nargs="+", choices=("mlp", "convnet"), default=["mlp", "convnet"])
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, help="of a turn, instead of the workload's own")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in options.only:
        print(table(name, options.rounds, options.steps), flush=True)


if __name__ == "__main__":
    main()
