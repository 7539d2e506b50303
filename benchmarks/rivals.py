"""The contenders of ``benchmarks.overhead``, and the interface of all contenders.

A contender starts its processes when entered, keeps them blocked (never spinning) while it is idle,
and ends them when left. ``run(steps)`` does that many units of its work and returns the seconds for
one. Every process computes with one torch thread.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import Workload, compute

WORKERS = 2
DEADLINE = 120.0  # seconds that one wait of a contender may take
IDLE_DEADLINE = 3600.0  # seconds after which a local process without orders ends by itself
JOIN_DEADLINE = 5.0


class Contender(ABC):
    """One way to do some work again and again."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Contender:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def start(self) -> None:
        """Start the processes of this contender."""

    @abstractmethod
    def run(self, steps: int) -> float:
        """Do ``steps`` units of the work; the seconds that one took."""

    @abstractmethod
    def close(self) -> None:
        """End the processes of this contender; harmless when it never started."""


class Trainer(Contender):
    """One way to train a workload with so many workers; a unit is a synchronous step."""

    def __init__(self, name: str, workload: Workload, workers: int = WORKERS) -> None:
        super().__init__(name)
        self.workload, self.workers = workload, workers

    def pids(self) -> list[int]:
        """The processes that train, each once; none where they are not known."""
        return []


# --- free, free+sgd (or +adam) and ddp: two spawned processes that take orders from pipes ---

Step = Callable[[], None]


def _free(workload: Workload, rank: int, store: Path) -> Step:
    return functools.partial(compute, workload.build(), workload.batches(rank))


def _free_with_optimizer(workload: Workload, rank: int, store: Path) -> Step:
    return _with_optimizer(workload.build(), workload, rank)


def _ddp(workload: Workload, rank: int, store: Path) -> Step:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=store.as_uri(),
        rank=rank,
        world_size=WORKERS,
        timeout=timedelta(seconds=DEADLINE),
    )
    return _with_optimizer(
        DistributedDataParallel(workload.build(), gradient_as_bucket_view=True), workload, rank
    )


def _with_optimizer(network: torch.nn.Module, workload: Workload, rank: int) -> Step:
    batches, optimizer = workload.batches(rank), workload.optimizer(network)

    def step() -> None:
        compute(network, batches)
        optimizer.step()

    return step


LOCAL_STEPS = {
    "free": _free,
    "free+sgd": _free_with_optimizer,
    "free+adam": _free_with_optimizer,
    "ddp": _ddp,
}


KEPT = " kept"  # with the C library told to keep freed memory, as steepest's workers do


#: Makes what a local process does in a step: of a workload, as one of the processes, which meet in a file.
StepMaker = Callable[[Workload, int, Path], Step]


def _serve(
    kind: str,
    make: StepMaker,
    workload: Workload,
    rank: int,
    store: Path,
    barrier: Barrier,
    pipe: Connection,
) -> None:
    """Body of a local process: answer each number of steps with the seconds they took, until None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    torch.set_num_threads(1)
    try:
        if kind.endswith(KEPT):
            from steepest.core.tensors.allocator import keep_freed_memory

            keep_freed_memory()
        step = make(workload, rank, store)
        pipe.send(0.0)
        while pipe.poll(IDLE_DEADLINE) and (steps := pipe.recv()) is not None:
            barrier.wait(DEADLINE)
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            pipe.send(time.perf_counter() - begin)
    except (EOFError, ConnectionError):
        return  # the parent is gone
    except Exception:  # noqa: BLE001 - whatever it is, the parent reports it
        pipe.send(traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Local(Trainer):
    """Two processes without Ray, started together by a barrier; the time is that of the slower one.

    Args:
        name: of one of `LOCAL_STEPS`, perhaps with `KEPT` behind it.
        workload: that it trains.
        make: instead of that of `LOCAL_STEPS`.
    """

    def __init__(self, name: str, workload: Workload, make: StepMaker | None = None) -> None:
        super().__init__(name, workload)
        self._make = make or LOCAL_STEPS[name.removesuffix(KEPT)]
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        barrier = context.Barrier(WORKERS)
        self._directory = tempfile.TemporaryDirectory()
        store = Path(self._directory.name, "store")
        for rank in range(WORKERS):
            mine, theirs = context.Pipe()
            arguments = (self.name, self._make, self.workload, rank, store, barrier, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            self._pipes.append(mine)
            process.start()
            self._processes.append(process)
            theirs.close()
        self._answers()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def run(self, steps: int) -> float:
        with contextlib.suppress(ConnectionError):  # a process that died is reported below
            for pipe in self._pipes:
                pipe.send(steps)
        return max(self._answers()) / steps

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(ConnectionError):  # this process has ended already
                pipe.send(None)
        for process in self._processes:
            process.join(JOIN_DEADLINE)
            if process.is_alive():
                process.kill()
                process.join(JOIN_DEADLINE)
        for pipe in self._pipes:
            pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes, self._pipes, self._directory = [], [], None

    def _answers(self) -> list[float]:
        end = time.monotonic() + DEADLINE
        return [self._answer(pipe, end - time.monotonic()) for pipe in self._pipes]

    def _answer(self, pipe: Connection, seconds: float) -> float:
        if not pipe.poll(max(0.0, seconds)):
            raise TimeoutError(f"{self.name}: a process gave no answer in {DEADLINE:g} s")
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"{self.name}: a process died") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self.name}: a process failed\n{answer}")
        return float(answer)


# --- tutorial: a parameter-server actor and worker actors, with the driver in the loop ---

Weights = dict[str, torch.Tensor] | dict[str, np.ndarray]
Gradients = list[np.ndarray]


@ray.remote(num_cpus=0)
class Server:
    """Holds the model and applies the averaged gradients of the workers."""

    def __init__(self, workload: Workload, arrays: bool) -> None:
        torch.set_num_threads(1)
        self._arrays = arrays
        self._network = workload.build()
        self._optimizer = workload.optimizer(self._network)

    def get_weights(self) -> Weights:
        weights = self._network.state_dict()
        return (
            {name: tensor.numpy() for name, tensor in weights.items()} if self._arrays else weights
        )

    def apply_gradients(self, *gradients: Gradients) -> Weights:
        for parameter, parts in zip(
            self._network.parameters(), zip(*gradients, strict=True), strict=True
        ):
            parameter.grad = torch.from_numpy(
                functools.reduce(np.add, parts) / np.float32(len(parts))
            )
        self._optimizer.step()
        return self.get_weights()


@ray.remote(num_cpus=0)
class Worker:
    """Computes the gradients of one batch at the given weights."""

    def __init__(self, workload: Workload, rank: int) -> None:
        torch.set_num_threads(1)
        self._network = workload.build()
        self._batches = workload.batches(rank)

    def compute_gradients(self, weights: Weights) -> Gradients:
        self._network.load_state_dict(
            {name: torch.as_tensor(values) for name, values in weights.items()}
        )
        compute(self._network, self._batches)
        return [p.grad.numpy() for p in self._network.parameters() if p.grad is not None]


class Tutorial(Trainer):
    """The design of Ray's parameter-server tutorial, waiting for the new weights once every step.

    The tutorial sends its weights as torch tensors, which Ray copies and pickles; with ``arrays``
    they travel as numpy arrays, which Ray shares through its object store.
    """

    def __init__(self, name: str, workload: Workload, arrays: bool = False) -> None:
        super().__init__(name, workload)
        self._arrays = arrays
        self._server: Any = None
        self._workers: list[Any] = []
        self._weights: Any = None

    def start(self) -> None:
        self._server = Server.remote(self.workload, self._arrays)
        self._workers = [Worker.remote(self.workload, rank) for rank in range(WORKERS)]
        self._weights = self._server.get_weights.remote()
        ray.get(self._weights, timeout=DEADLINE)

    def run(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            gradients = [worker.compute_gradients.remote(self._weights) for worker in self._workers]
            self._weights = self._server.apply_gradients.remote(*gradients)
            if not ray.wait([self._weights], timeout=DEADLINE)[0]:
                raise TimeoutError(f"{self.name}: a step took more than {DEADLINE:g} s")
        seconds = time.perf_counter() - begin
        ray.get(self._weights, timeout=DEADLINE)  # raises what a step has raised
        return seconds / steps

    def close(self) -> None:
        for actor in (self._server, *self._workers):
            if actor is not None and ray.is_initialized():
                ray.kill(actor)
        self._server, self._workers, self._weights = None, [], None


# --- steepest itself ---


class Steepest(Trainer):
    """``DistributedSGD`` under one strategy; a turn is one ``fit``, its start and end included."""

    def __init__(
        self, name: str, workload: Workload, strategy: Any, workers: int = WORKERS
    ) -> None:
        super().__init__(name, workload, workers)
        self._strategy = strategy
        self._sgd: Any = None

    def start(self) -> None:
        from steepest import DistributedSGD

        workload = self.workload

        def creator(worker_index: int, device_index: int) -> Any:
            torch.set_num_threads(1)
            return workload.model()

        self._sgd = DistributedSGD(creator, num_workers=self.workers, strategy=self._strategy)

    def pids(self) -> list[int]:
        return list({process.pid for process in self._sgd.processes()})

    def run(self, steps: int) -> float:
        begin = time.perf_counter()
        self._sgd.fit(steps=steps, progress=False)
        return (time.perf_counter() - begin) / steps

    def close(self) -> None:
        if self._sgd is not None:
            self._sgd.shutdown()
            self._sgd = None
