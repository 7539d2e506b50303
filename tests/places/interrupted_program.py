"""Ten steps on MNIST on the Ray that is there; in the first run a worker and then the program itself are killed.

Run by the tests of each place; the second run goes on where the checkpoints of the first end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from data import load_mnist
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn
from torch.nn import functional as F

from steepest import Callback, Checkpoints, DistributedSGD, StepResult, TorchModel
from steepest.places import existing, local
from steepest.testing import InProcessCluster

WORKERS, STEPS, BATCH = 2, 10, 20


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def creator() -> Callable[[int, int], TorchModel]:
    images, classes = load_mnist().train
    data = (torch.as_tensor(images[:600]), torch.as_tensor(classes[:600]))

    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            nn.Sequential(nn.Flatten(), nn.Linear(data[0][0].numel(), 10)),
            loss=F.cross_entropy,
            data=data,
            batch_size=BATCH,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        )

    return create


def where(_: Any) -> tuple[str, int]:
    return ray.get_runtime_context().get_node_id(), os.getpid()


@ray.remote(num_cpus=0)
def killing(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


class Kill(Callback):
    """Kills a worker after the third step, and then this process, or has it wait to be ended."""

    def __init__(self, worker: tuple[str, int], *, waits: bool) -> None:
        self.worker, self.waits = worker, waits

    def on_step(self, sgd: Any, result: StepResult) -> None:
        if result.step == 3:
            node, pid = self.worker  # processes of another host may have numbers of their own
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.get(killing.options(scheduling_strategy=there).remote(pid))
        if result.step == 7:
            say(f"after step 7, {sgd.stats().replaced} replaced")
            if self.waits:
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)


def main(place: str) -> None:
    places = {"local": lambda: local(WORKERS), "existing": existing}
    first = not Path("kept").exists()
    create = creator()
    with (
        places.get(place, contextlib.nullcontext)(),
        DistributedSGD(create, WORKERS, checkpoints=Checkpoints("kept", every=2)) as sgd,
    ):
        say(f"from step {sgd.stats().step}")
        _, worker = sgd.foreach_worker(where)
        kill = Kill(worker, waits=place == "slurm")
        sgd.fit(steps=STEPS, callbacks=[kill] if first else [], progress=False)
        say(f"to step {sgd.stats().step}")
        weights = sgd.weights()
    alone = InProcessCluster(create, num_workers=WORKERS)
    alone.step(STEPS)
    same = [torch.equal(weights[name], each) for name, each in alone.weights().items()]
    say("the weights of an uninterrupted run" if all(same) else "other weights")


if __name__ == "__main__":
    main(sys.argv[1])
