"""Training on a GPU beside plain PyTorch and DistributedDataParallel, on processes of this machine, without Ray.

    python -m benchmarks.gpu                               # ResNet-101, some minutes on one GPU
    python -m benchmarks.gpu --device cpu --size small     # tries the script out where no GPU is

Random images in memory, plain SGD (`benchmarks.resnet101`). Four contenders, in turn in each round, odd rounds in
reverse order:

- ``plain``: one process of plain PyTorch;
- ``one worker``: ours with one worker and its server in one process, wanted within 1.01 of plain's time;
- ``ddp``: two processes of DistributedDataParallel on one GPU, on Gloo, since NCCL wants a GPU for each;
- ``two workers``: ours under "ps", two workers that share the GPU.

It prints images per second of all processes together, ratios of times, and the most memory of the GPU that one
process' tensors had. Without a GPU it says so, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import Workload
from benchmarks.resnet import ResNet
from steepest import Callback, DeadlineConfig, DistributedSGD, RunConfig, TorchModel

SECONDS = 600.0
SIZES = {
    "full": Workload("full", ResNet, (3, 224, 224), batch_size=32, samples=256, steps=20),
    "small": Workload(
        "small", functools.partial(ResNet, (1, 1, 2, 1), width=16), (3, 64, 64), batch_size=8, samples=64, steps=4
    ),
}  # fmt: skip


class Measured(TorchModel):
    """A model whose metrics say how much memory of the GPU its process' tensors had at most, in bytes."""

    def metrics(self, batch: Any) -> dict[str, float]:
        return {"memory": float(most_memory())}


def most_memory() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


def creator(size: str, worker: int, device: int) -> TorchModel:
    workload = SIZES[size]
    return Measured(
        workload.build(), loss=F.nll_loss, data=workload.data(), batch_size=workload.batch_size,
        optimizer=functools.partial(workload.optimizer, fused=None),
    )  # fmt: skip


#: Takes so many steps; returns the seconds that they took, and the most memory of the GPU so far.
Turn = Callable[[int], tuple[float, float]]


class Ends(Callback):
    """Notes when each step is committed, and its metrics."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.metrics: dict[str, float] = {}

    def on_step(self, sgd, result) -> None:
        self.ends.append(time.perf_counter())
        self.metrics = result.metrics or {}


@contextlib.contextmanager
def ours(size: str, workers: int, device: str) -> Iterator[Turn]:
    config = RunConfig(runtime="processes", deadlines=DeadlineConfig(step=SECONDS))
    with DistributedSGD(
        functools.partial(creator, size), workers, gpu=device != "cpu", run_config=config,
        strategy="allreduce" if workers == 1 else "ps",
    ) as trainer:  # fmt: skip

        def turn(steps: int) -> tuple[float, float]:
            seen = Ends()
            trainer.fit(steps=steps + 1, callbacks=[seen], progress=False)
            return seen.ends[-1] - seen.ends[0], seen.metrics.get("memory", 0.0)

        yield turn


def serve(size: str, device: str, rank: int, processes: int, store: Path, pipe: Connection) -> None:
    """Body of a rival's process: answers each number of steps with seconds and memory, until None."""
    torch.set_num_threads(1)
    workload = SIZES[size]
    network: torch.nn.Module = workload.build().to(device)
    if processes > 1:
        dist.init_process_group(
            "gloo", init_method=store.as_uri(), rank=rank, world_size=processes, timeout=timedelta(seconds=SECONDS)
        )  # fmt: skip
        network = DistributedDataParallel(network, gradient_as_bucket_view=True)
    batches, optimizer = workload.batches(rank), workload.optimizer(network)
    pipe.send((0.0, 0.0))
    while pipe.poll(SECONDS) and (steps := pipe.recv()) is not None:
        began = time.perf_counter()
        for _ in range(steps):
            x, y = batches.next()
            optimizer.zero_grad()
            loss = F.nll_loss(network(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            loss.item()  # as ours reports it
        pipe.send((time.perf_counter() - began, float(most_memory())))
    if processes > 1:
        dist.destroy_process_group()


@contextlib.contextmanager
def rival(size: str, processes: int, device: str) -> Iterator[Turn]:
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        store = Path(stack.enter_context(tempfile.TemporaryDirectory()), "store")
        pipes = []
        for rank in range(processes):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(size, device, rank, processes, store, theirs), daemon=True
            )
            process.start()
            stack.callback(process.join, 10.0)
            pipes.append(mine)

        def answers() -> tuple[float, float]:
            found = []
            for pipe in pipes:
                if not pipe.poll(SECONDS):
                    raise TimeoutError(f"a process gave no answer in {SECONDS:g} s")
                found.append(pipe.recv())
            return max(seconds for seconds, _ in found), max(memory for _, memory in found)

        def turn(steps: int) -> tuple[float, float]:
            for pipe in pipes:
                pipe.send(steps)
            return answers()

        answers()
        yield turn
        for pipe in pipes:
            pipe.send(None)


CONTENDERS: dict[str, tuple[Callable[..., Any], int]] = {
    "plain": (rival, 1),
    "one worker": (ours, 1),
    "ddp": (rival, 2),
    "two workers": (ours, 2),
}
OVER = {"one worker": "plain", "ddp": "plain", "two workers": "ddp"}


def measure(
    size: str, device: str, rounds: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of a step and bytes of the GPU, by contender and round."""
    with contextlib.ExitStack() as stack:
        turns = {
            name: stack.enter_context(make(size, processes, device))
            for name, (make, processes) in CONTENDERS.items()
        }
        for turn in turns.values():
            turn(max(2, steps // 4))
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        for number in range(rounds):
            for name in turns if number % 2 == 0 else reversed(turns):
                seconds, memory = turns[name](steps)
                found[name].append((seconds / steps, memory))
        return found


def report(size: str, found: dict[str, list[tuple[float, float]]]) -> str:
    """A line for each contender."""
    workload = SIZES[size]
    lines = [f"{'':12}{'images/s':>10}{'MB of GPU':>11}  times as long as"]
    for name, rounds in found.items():
        seconds = [each for each, _ in rounds]
        images = CONTENDERS[name][1] * workload.batch_size / statistics.median(seconds)
        line = f"{name:12}{images:10.1f}{max(memory for _, memory in rounds) / 1e6:11.0f}"
        if name in OVER:
            ratios = [mine / its for mine, (its, _) in zip(seconds, found[OVER[name]], strict=True)]
            line += (
                f"  {OVER[name]}: {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="of a turn")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "not measured: torch sees no GPU here (--device cpu --size small tries the script out)"
        )
        return
    workload = SIZES[options.size]
    card = torch.cuda.get_device_name() if options.device == "cuda" else f"{os.cpu_count()} cores"
    steps = options.steps or workload.steps
    print(
        f"{card}, torch {torch.__version__}: {workload.parameters():,} parameters, batch {workload.batch_size} a "
        f"process, {options.rounds} rounds of {steps} steps"
    )
    print(report(options.size, measure(options.size, options.device, options.rounds, steps)))


if __name__ == "__main__":
    main()
