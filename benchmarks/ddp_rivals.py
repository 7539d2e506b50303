"""DistributedDataParallel whose processes are killed, and that a script starts again from the last checkpoint.

    python -m benchmarks.ddp_rivals    # has a pickle of the arguments of `train` as input, prints its result as JSON

What a user does without an elastic library, as well as it can be done simply: the parent waits for
the death of any process, kills the others at once, and starts all of them again with another
rendezvous; the first process has written a checkpoint with `torch.save` every 50 steps, from which
all go on. With ``warm`` new processes are forked from one that has imported torch (with what its
optimizers import when they are made), so that they
start in tenths of a second; without, they are started as `torch.multiprocessing.spawn` does it. The
parent is a program of its own, so that its processes import torch and nothing of Ray or steepest.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.recovery_rivals import CHECKPOINT_STEPS, batch_of

WAIT_SECONDS = 120.0


Heard = tuple[list[tuple[int, float]], float]


def train_with_ddp(
    config: dict[str, Any], workers: int, victims: Sequence[int], warm: bool
) -> Heard:
    """The same as `train`, whose processes import what this program does."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ddp_rivals"],
        input=pickle.dumps((config, workers, list(victims), warm)),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # survivors complain of the dead
        check=True,
        timeout=2 * WAIT_SECONDS,
    )
    heard, killed = json.loads(done.stdout)
    return [(step, when) for step, when in heard], killed


def train(config: dict[str, Any], workers: int, victims: Sequence[int], warm: bool) -> Heard:
    """Trains with the death of some processes at one moment.

    Args:
        config: as of `benchmarks.recovery_rivals.train_with_ray`.
        victims: ranks of the processes that are killed when the first has taken step "kill_step".
        warm: whether processes are forked from one that has imported torch.

    Returns:
        (step, when it was over) for each that the first process took, and when they were killed.

    Raises:
        TimeoutError: the processes have not ended in time.
    """
    context = multiprocessing.get_context("forkserver" if warm else "spawn")
    if warm:
        context.set_forkserver_preload(["benchmarks.ddp_rivals", "torch._dynamo"])
    killed, end = 0.0, time.monotonic() + WAIT_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder, "steps")
        steps.touch()
        for life in range(2):
            team = [
                context.Process(
                    target=_train, args=({**config, "folder": folder}, rank, workers, life)
                )
                for rank in range(workers)
            ]
            for process in team:
                process.start()
            try:
                if life == 0:
                    _until_step(steps, config["kill_step"], end)
                    killed = time.monotonic()
                    for rank in victims:
                        os.kill(team[rank].pid or 0, signal.SIGKILL)
                _until_one_ends([process.sentinel for process in team], end)
                if life == 1:
                    for process in team:
                        process.join(max(0.0, end - time.monotonic()))
            finally:
                for process in team:
                    process.kill()
                    process.join()
        lines = [line.split() for line in steps.read_text().splitlines()]
        return [(int(step), float(when)) for step, when in lines], killed


def _until_step(steps: Path, wanted: int, end: float) -> None:
    while not any(line.split()[0] == str(wanted) for line in steps.read_text().splitlines()):
        if time.monotonic() > end:
            raise TimeoutError(f"step {wanted} was not taken within {WAIT_SECONDS:g} s")
        time.sleep(0.002)


def _until_one_ends(sentinels: list[int], end: float) -> None:
    if not multiprocessing.connection.wait(sentinels, max(0.0, end - time.monotonic())):
        raise TimeoutError(f"no process has ended within {WAIT_SECONDS:g} s")


def _train(config: dict[str, Any], rank: int, workers: int, life: int) -> None:
    """What each process does; they are on this host."""
    torch.set_num_threads(1)
    folder = Path(config["folder"])
    store = dist.FileStore(str(folder / f"store {life}"), workers)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
    network = config["network"]()
    optimizer = torch.optim.SGD(network.parameters(), lr=config["rate"])
    begin = 0
    with contextlib.suppress(FileNotFoundError):
        state = torch.load(folder / "checkpoint", weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    parallel = torch.nn.parallel.DistributedDataParallel(network)
    with (folder / "steps").open("a", buffering=1) as file:
        for step in range(begin + 1, config["steps"] + 1):
            time.sleep(config["seconds"])
            x, y = batch_of(config["data"], config["batch"], step * workers + rank)
            optimizer.zero_grad()
            F.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            if rank == 0:
                file.write(f"{step} {time.monotonic()}\n")
                if step % CHECKPOINT_STEPS == 0:
                    _save(folder, network, optimizer, step)
    dist.destroy_process_group()


def _save(
    folder: Path, network: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, folder / "checkpoint.new")
    os.replace(folder / "checkpoint.new", folder / "checkpoint")


if __name__ == "__main__":
    print(json.dumps(train(*pickle.load(sys.stdin.buffer))))  # noqa: S301 - from our own parent
