"""The scripts that ``benchmarks.startup`` runs, each in an interpreter of its own.

    python -m benchmarks.startup_scripts steepest FILE
    RAY_ADDRESS=host:port python -m benchmarks.startup_scripts train FILE

Two train the network of 1,960 parameters with two workers for one step, and write to FILE the time
of day at which that step was committed. ``plain`` has as many processes of Ray as steepest, two
workers and a server, import torch, and writes when they have. Imports are inside, as each script
has its own.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORKERS = 2
DEADLINE = 60.0  # seconds in which plain actors start


def steepest() -> float:
    """The time at which the first step of `DistributedSGD` was committed; it starts Ray, or connects, by itself."""
    import torch.nn.functional as F

    from benchmarks.models import WORKLOADS
    from steepest import DistributedSGD, TorchModel

    workload = WORKLOADS["convnet"]

    def creator(worker_index: int, device_index: int) -> Any:
        return TorchModel(
            workload.build(),
            loss=F.nll_loss,
            data=workload.data(),
            batch_size=workload.batch_size,
            optimizer=workload.optimizer,
        )

    with DistributedSGD(creator, num_workers=WORKERS) as sgd:
        sgd.step()
        return time.time()


def train() -> float:
    """The time at which the first step of Ray Train's `TorchTrainer` was taken by all workers."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    _start_ray()
    with tempfile.TemporaryDirectory() as directory:
        stepped = Path(directory, "stepped")
        TorchTrainer(
            _train_loop,
            train_loop_config={"stepped": str(stepped)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORKERS),
            run_config=RunConfig(storage_path=directory),
        ).fit()
        return float(stepped.read_text())


def _start_ray() -> None:
    """Start Ray as steepest starts it, or connect."""
    import ray

    if "RAY_ADDRESS" in os.environ:
        ray.init(logging_level=logging.WARNING)
    else:
        ray.init(address="local", include_dashboard=False, logging_level=logging.WARNING)


def plain() -> float:
    """The time at which plain actors of Ray had imported torch, as many as steepest starts."""
    import ray
    import torch

    _start_ray()

    class Process:
        def version(self) -> str:
            import torch

            return str(torch.__version__)

    actor = ray.remote(Process).options(num_cpus=0)
    processes = [actor.remote() for _ in range(WORKERS + 1)]
    asked = [process.version.remote() for process in processes]
    for version in ray.get(asked, timeout=DEADLINE):
        assert version == torch.__version__
    return time.time()


def _train_loop(config: dict[str, str]) -> None:
    """What each of Ray Train's workers does; they are on this host."""
    import ray.train.torch
    import torch.distributed as dist

    from benchmarks.models import WORKLOADS, compute

    workload = WORKLOADS["convnet"]
    rank = ray.train.get_context().get_world_rank()
    network = ray.train.torch.prepare_model(workload.build())
    optimizer = workload.optimizer(network)
    compute(network, workload.batches(rank))
    optimizer.step()
    dist.barrier()
    if rank == 0:
        Path(config["stepped"]).write_text(repr(time.time()))


SCRIPTS = {"steepest": steepest, "train": train, "plain": plain}

if __name__ == "__main__":
    name, file = sys.argv[1:]
    Path(file).write_text(repr(SCRIPTS[name]()))
