"""Ray Train's `TorchTrainer` whose worker is killed: the same network, data and pace as in ``recovery_bodies``.

A checkpoint every 50 steps, as its documentation has it: the first worker writes it, all report it.
What goes on after a death is a new group of workers, from the last checkpoint. Workers have the
same imports as a script of Ray Train's would have: nothing of steepest.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

CHECKPOINT_STEPS = 50
Arrays = tuple[torch.Tensor, torch.Tensor]


def network() -> torch.nn.Module:
    """A perceptron of 4,810 parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train_with_ray(config: dict[str, Any], workers: int) -> tuple[list[tuple[int, float]], float]:
    """Trains with one death.

    Args:
        config: "network", "data", "batch", "rate", "seconds" (of a step), "steps", "kill_step", and
            "victims": how many workers are killed, the last ones; 1 without it.

    Returns:
        (step, when it was over) for each that the first worker took, and when the first of the
        victims was killed.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            _train_loop,
            train_loop_config={**config, "folder": folder},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(storage_path=folder, failure_config=FailureConfig(max_failures=1)),
        ).fit()
        lines = [line.split() for line in Path(folder, "steps").read_text().splitlines()]
        killed = [float(each.read_text()) for each in Path(folder).glob("killed *")]
        return [(int(step), float(when)) for step, when in lines], min(killed)


def _train_loop(config: dict[str, Any]) -> None:
    """What each of Ray Train's workers does; they are on this host."""
    import ray.train.torch

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    network = ray.train.torch.prepare_model(config["network"]())
    optimizer = torch.optim.SGD(network.parameters(), lr=config["rate"])
    begin = load_checkpoint(network, optimizer)
    killed, steps = (Path(config["folder"], name) for name in (f"killed {rank}", "steps"))
    dies = rank >= world - config.get("victims", 1)
    with steps.open("a", buffering=1) as file:
        for step in range(begin + 1, config["steps"] + 1):
            time.sleep(config["seconds"])
            x, y = batch_of(config["data"], config["batch"], step * world + rank)
            if dies and step == config["kill_step"] + 1 and not killed.exists():
                killed.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
            optimizer.step()
            if rank == 0:
                file.write(f"{step} {time.monotonic()}\n")
            if step % CHECKPOINT_STEPS == 0:
                save_checkpoint(network, optimizer, step, rank)


def batch_of(data: Arrays, size: int, number: int) -> Arrays:
    x, y = data
    chosen = torch.arange(number * size, (number + 1) * size) % len(x)
    return x[chosen], y[chosen]


def save_checkpoint(
    network: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int
) -> None:
    import ray.train

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:
            state = {
                "network": network.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
            }
            torch.save(state, Path(folder, "state"))
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step}, checkpoint=checkpoint)


def load_checkpoint(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    import ray.train

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state"), weights_only=True)
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
