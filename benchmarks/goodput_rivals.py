"""One training loop whose workers get SIGKILL, under steepest, Ray Train and torchft: see ``benchmarks.goodput``.

Each worker writes down the samples of each batch before ``optimizer.step()``, and when that has returned; what counts
is read from these notes alone, in the same way for all. A step that was taken again counts as it was taken last.

The loops are as the documentation of each has them. Ray Train's has a checkpoint every 20 steps and goes on in the
middle of the epoch. torchft's is that of its example ``train_ddp.py``, with torch's DataLoader; a replica that was
killed is started again within a tenth of a second, and the lighthouse has its own defaults.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import itertools
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.recovery_rivals import load_checkpoint, network, save_checkpoint

BATCH = 32
SAMPLES = 1408  # 22 steps of two batches
SECONDS = 0.05  # that a gradient takes at least
CHECKPOINT_STEPS = 20
EPOCHS = 1_000_000
END = "end"  # a file with the number of steps after which all workers return
MODULES = {"ray-train": ["ray.train", "pandas", "pyarrow"], "torchft": ["torchft"]}
INSTALL = {"ray-train": "pip install 'ray[train]==2.60.0'", "torchft": "pip install torchft==0.2.0"}
POLL_SECONDS = 0.1


def missing(rival: str) -> str:
    """What to do for a rival that is not installed; "" if it is."""
    for module in MODULES.get(rival, []):
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"{rival} is left out: {error}; {INSTALL[rival]}"
    return ""


def data() -> TensorDataset:
    """Digits, their classes and their numbers."""
    from benchmarks.recovery_bodies import digits

    x, y = digits()[0]
    return TensorDataset(x[:SAMPLES], y[:SAMPLES], torch.arange(SAMPLES))


class Notes:
    """What a worker writes down of its steps, a line each."""

    def __init__(self, folder: str) -> None:
        self._end = Path(folder, END)
        path = Path(folder, f"worker {os.getpid()}")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def begin(self, step: int, rank: int, size: int, index: torch.Tensor, counts: bool) -> None:
        """A batch whose gradient is here.

        Args:
            step: number of the job's steps before.
            rank, size: which of how many workers this is.
            index: of the batch's samples.
            counts: whether the gradient is part of the update.
        """
        numbers = " ".join(map(str, index.tolist()))
        self._write(f"b {time.monotonic()} {step} {rank} {size} {int(counts)} {numbers}\n")

    def done(self, step: int) -> bool:
        """Note that so many steps are committed; return whether the job has no more."""
        self._write(f"d {time.monotonic()} {step}\n")
        return self._end.exists() and step >= int(self._end.read_text() or math.inf)

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode())


@dataclass(frozen=True)
class Batch:
    """A line that a worker has written before a step, see `Notes.begin`."""

    when: float
    step: int
    rank: int
    size: int
    counts: bool
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Found:
    """What the notes of a job say.

    Attributes:
        done: when each step was committed for the first time, by the number of steps before it.
        batches: those of each step, as it was taken last.
        computed: samples of which a gradient was computed.
    """

    done: dict[int, float]
    batches: dict[int, list[Batch]]
    computed: int

    def samples(self, step: int) -> int:
        """How many samples a step has."""
        return sum(len(batch.samples) for batch in self.batches.get(step, []))

    def steps(self, begin: float, end: float) -> list[int]:
        """The steps that were new between two moments."""
        return [step for step, when in self.done.items() if begin <= when < end]

    @property
    def counts(self) -> Counter[int]:
        """By sample, in how many updates it is."""
        every = itertools.chain.from_iterable(self.batches.values())
        return Counter(itertools.chain.from_iterable(batch.samples for batch in every))

    def uneven(self, samples: int = SAMPLES) -> tuple[int, int]:
        """How many samples are lost, and doubled.

        If each sample is in one update of each pass over the data, all are in equally many updates, but for those of
        the last pass, which have one more. Lost is what samples lack of that number, doubled what is beyond it and one.
        """
        counts = self.counts
        least = counts.total() // samples
        most = -(-counts.total() // samples)
        lost = sum(max(least - counts[i], 0) for i in range(samples))
        return lost, sum(max(counts[i] - most, 0) for i in range(samples))

    @property
    def in_vain(self) -> int:
        """Samples whose gradient was computed and is in no update."""
        return self.computed - self.counts.total()


def read(folder: str) -> Found:
    """What all workers of a job have written."""
    done: dict[int, float] = {}
    begun: list[Batch] = []
    for path in Path(folder).glob("worker *"):
        for line in path.read_text().splitlines(keepends=True):
            if not line.endswith("\n"):
                continue  # its writer was killed
            kind, when, *words = line.split()
            if kind == "d":
                step = int(words[0]) - 1
                done[step] = min(float(when), done.get(step, math.inf))
            else:
                step, rank, size, counts, *samples = map(int, words)
                batch = Batch(float(when), step, rank, size, bool(counts), tuple(samples))
                begun.append(batch)
    by_step: dict[int, list[Batch]] = {}
    for batch in sorted(begun, key=lambda each: each.when):
        by_step.setdefault(batch.step, []).append(batch)
    last = max(done, default=-1)
    batches = {step: _last(each) for step, each in by_step.items() if step <= last}
    return Found(done, batches, sum(len(b.samples) for b in begun if b.step <= last))


def _last(batches: list[Batch]) -> list[Batch]:
    """The batches of one step as it was taken last; they are in order."""
    taken = [batch for batch in batches if batch.counts]
    by_rank = {batch.rank: batch for batch in taken if batch.size == taken[-1].size}
    return list(by_rank.values())


def alive(folder: str) -> list[int]:
    """The process ids of a job's workers that live, in order."""
    pids = [int(path.name.split()[1]) for path in Path(folder).glob("worker *")]
    return sorted(pid for pid in pids if _lives(pid))


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "XZ"
    return False


# The loops


def own_loop(folder: str) -> None:
    """A script's loop with `steepest.prepare` around it."""
    import steepest

    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(data(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = steepest.prepare(model, optimizer, loader)
    kept = steepest.register(step=0)
    notes = Notes(folder)
    for _ in steepest.epochs(EPOCHS):
        for x, y, index in loader:
            time.sleep(SECONDS)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            notes.begin(kept.step, steepest.rank(), steepest.size(), index, True)
            optimizer.step()
            kept.step += 1
            if notes.done(kept.step):
                return


def train_with_steepest(
    folder: str, workers: int, strategy: str = "ps", patience: float = math.inf
) -> None:
    """`steepest.run`; `patience` as of `FailureConfig`, by default that of `run`: a step waits for a successor."""
    import steepest

    failure = steepest.FailureConfig(max_failures=1_000_000, patience=patience)
    steepest.run(
        functools.partial(own_loop, folder),
        num_workers=workers,
        strategy=strategy,
        run_config=steepest.RunConfig(failure=failure),
        progress=False,
    )


def train_with_ray(folder: str, workers: int) -> None:
    """Ray Train's `TorchTrainer`, which begins again from its last checkpoint."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    results, failure = str(Path(folder, "results")), FailureConfig(max_failures=-1)
    TorchTrainer(
        ray_loop,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=results, failure_config=failure),
    ).fit()


def ray_loop(config: dict[str, Any]) -> None:
    """What each of Ray Train's workers does."""
    import ray.train.torch
    from torch.utils.data.distributed import DistributedSampler

    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(data(), size, rank)
    loader = DataLoader(data(), batch_size=BATCH, sampler=sampler)
    notes = Notes(config["folder"])
    step = load_checkpoint(model, optimizer)
    while True:
        epoch, behind = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for x, y, index in itertools.islice(loader, behind, None):
            time.sleep(SECONDS)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            notes.begin(step, rank, size, index, True)
            optimizer.step()
            step += 1
            if notes.done(step):
                return
            if step % CHECKPOINT_STEPS == 0:
                save_checkpoint(model, optimizer, step, rank)


def train_with_torchft(folder: str, workers: int) -> None:
    """Replicas of torchft, each in a process that is started again when it was killed."""
    address = Path(folder, "lighthouse")

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with Path(folder, f"log of {arguments[0]}").open("ab") as log:
            command = [sys.executable, "-m", "benchmarks.goodput_rivals", folder, *arguments]
            return subprocess.Popen(command, stdout=log, stderr=log)

    lighthouse = start("lighthouse")
    replicas: dict[str, subprocess.Popen[bytes]] = {}
    try:
        while not address.exists():
            time.sleep(POLL_SECONDS)
        ranks = [str(rank) for rank in range(workers)]
        replicas |= {rank: start(rank, address.read_text(), str(workers)) for rank in ranks}
        while not any(each.poll() == 0 for each in replicas.values()):
            for rank, each in replicas.items():
                if each.poll() is not None:
                    replicas[rank] = start(rank, address.read_text(), str(workers))
            time.sleep(POLL_SECONDS)
        time.sleep(10 * POLL_SECONDS)  # who has not ended by now is a successor that comes too late
    finally:
        for each in [lighthouse, *replicas.values()]:
            each.kill()
            each.wait()


def lighthouse_of_torchft(folder: str) -> None:
    """The process that tells replicas who takes part; it writes down its address."""
    coordination = importlib.import_module("torchft.coordination")
    server = coordination.LighthouseServer(bind="[::]:0", min_replicas=1)
    Path(folder, "address").write_text(server.address())
    Path(folder, "address").rename(Path(folder, "lighthouse"))
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)


def torchft_loop(folder: str, rank: int, lighthouse: str, workers: int) -> None:
    """What one replica does, until so many steps are committed."""
    from torch.distributed import TCPStore

    torchft: Any = importlib.import_module("torchft")
    torch.set_num_threads(1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    plain = network()
    sampler = torchft.DistributedSampler(
        data(),
        replica_rank=rank,
        num_replica_groups=workers,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    loader = DataLoader(data(), batch_size=BATCH, sampler=sampler)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=lambda state: (
            plain.load_state_dict(state["model"]),
            optimizer.load_state_dict(state["optimizer"]),
        ),
        state_dict=lambda: {"model": plain.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"train_{rank}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="localhost",
    )
    model = torchft.DistributedDataParallel(manager, plain)
    optimizer = torchft.Optimizer(
        manager, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    )
    notes = Notes(folder)
    for x, y, index in _endless(loader):
        time.sleep(SECONDS)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        step = manager.current_step()
        notes.begin(step, rank, manager.num_participants(), index, manager.is_participating())
        optimizer.step()
        if manager.current_step() > step and notes.done(manager.current_step()):
            break
    manager.shutdown(wait=False)


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


#: Each is called with a folder for its workers' notes, and the number of workers.
RIVALS: dict[str, Callable[[str, int], None]] = {
    "steepest": train_with_steepest,
    "steepest-allreduce": functools.partial(train_with_steepest, strategy="allreduce"),
    "steepest-goes-on": functools.partial(train_with_steepest, patience=0.0),
    "ray-train": train_with_ray,
    "torchft": train_with_torchft,
}


if __name__ == "__main__":
    if sys.argv[2] == "lighthouse":
        lighthouse_of_torchft(sys.argv[1])
    else:
        torchft_loop(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # threads of its Rust part wait for others
