"""The rivals of ``benchmarks.parameter_server``: what one would use, or write, in place of ours.

``ShardedActors`` and ``ActorCall`` are plain Ray actors, ``AsyncTutorial`` is the asynchronous loop
of Ray's parameter-server tutorial, ``Gloo`` is torch.distributed between two network namespaces, or
inside one host.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist

from benchmarks.models import Workload
from benchmarks.namespaces import Member, Namespace, Orders, Pair, Team, joined
from benchmarks.overhead import deadline
from benchmarks.rivals import DEADLINE, WORKERS, Contender, Server, Worker

VECTOR_BYTES = 100_000_000
SHARDS = 2
SHARDED_WORKERS = 4
SHARDED_ROUNDS = 5
SMALL_BYTES = 1000
RAY_CPUS = 8  # a logical number: room for the contenders of one table, of which one works at a time


def doubles() -> np.ndarray:
    """The 100 MB vector of ``sharded``."""
    return np.zeros(VECTOR_BYTES // 8)


def small() -> np.ndarray:
    """The 1 kB vector of ``small``."""
    return np.zeros(SMALL_BYTES // 4, dtype=np.float32)


def expect(name: str, value: float, expected: float) -> None:
    """A contender that lost or doubled an update has not done the work."""
    if value != expected:
        raise RuntimeError(f"{name}: the weights are {value:g} after {expected:g} updates of one")


def kill(*actors: Any) -> None:
    for actor in actors:
        if actor is not None and ray.is_initialized():
            ray.kill(actor)


@contextlib.contextmanager
def ray_started(cpus: int) -> Iterator[None]:
    with deadline("ray.init"):
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@ray.remote
def import_all() -> int:
    """Import what tasks will need, and stay long enough for the next such task to need another process."""
    importlib.import_module("benchmarks.parameter_server_rivals")
    importlib.import_module("steepest")
    time.sleep(0.5)
    return os.getpid()


def import_everywhere(processes: int) -> None:
    """Import torch and the rest in Ray's idle processes: a task that meets a fresh one waits seconds for it."""
    warm: set[int] = set()
    while len(warm) < processes:
        warm |= set(ray.get([import_all.remote() for _ in range(processes)], timeout=DEADLINE))


# --- sharded: the vector in two actors, and tasks that pull and push all of it ---


@ray.remote(num_cpus=0)
class Shard:
    """One part of the vector."""

    def __init__(self, part: np.ndarray) -> None:
        self._values = part.copy()  # what Ray hands over is read-only

    def pull(self) -> np.ndarray:
        return self._values

    def push(self, update: np.ndarray) -> None:
        self._values += update


@ray.remote
def push_rounds(shards: list[Any]) -> None:
    """One worker of the exercise."""
    for _ in range(SHARDED_ROUNDS):
        _push(shards, np.ones_like(_pull(shards)))  # nothing lives on into the next round


def _pull(shards: list[Any]) -> np.ndarray:
    return np.concatenate(ray.get([shard.pull.remote() for shard in shards], timeout=DEADLINE))


def _push(shards: list[Any], update: np.ndarray) -> None:
    parts = np.array_split(update, len(shards))
    ray.get(
        [shard.push.remote(part) for shard, part in zip(shards, parts, strict=True)],
        timeout=DEADLINE,
    )


class ShardedActors(Contender):
    """The classic exercise: an actor for each shard, a task for each worker."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._shards: list[Any] = []
        self._pushed = 0

    def start(self) -> None:
        self._shards = [Shard.remote(part) for part in np.array_split(doubles(), SHARDS)]
        ray.get([shard.pull.remote() for shard in self._shards], timeout=DEADLINE)

    def run(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            ray.get(
                [push_rounds.remote(self._shards) for _ in range(SHARDED_WORKERS)], timeout=DEADLINE
            )
        seconds = time.perf_counter() - begin
        self._pushed += steps * SHARDED_WORKERS * SHARDED_ROUNDS
        for part in ray.get([shard.pull.remote() for shard in self._shards], timeout=DEADLINE):
            expect(self.name, part[-1], self._pushed)
        return seconds / steps

    def close(self) -> None:
        kill(*self._shards)
        self._shards = []


@ray.remote
def plain_rounds() -> float:
    """What the exercise moves, on memory of this task's process: weights out, an update of ones, a sum."""
    if not _PLAIN:
        _PLAIN.extend(doubles() for _ in range(3))
    weights, pulled, update = _PLAIN
    for _ in range(SHARDED_ROUNDS):
        np.copyto(pulled, weights)
        update.fill(1.0)
        weights += update
    return float(weights[-1] - pulled[-1])


_PLAIN: list[np.ndarray] = []  # kept from one turn to the next


class PlainPasses(Contender):
    """The same four tasks without a server: three passes through 100 MB of their own in each round."""

    def start(self) -> None:
        self.run(1)

    def close(self) -> None:
        """End nothing: there is no server."""

    def run(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            rounds = [plain_rounds.remote() for _ in range(SHARDED_WORKERS)]
            for last in ray.get(rounds, timeout=DEADLINE):
                expect(self.name, last, 1)
        return (time.perf_counter() - begin) / steps


# --- mnist_async: a server actor that applies gradients as they arrive, and the driver between ---


class AsyncTutorial(Contender):
    """The asynchronous loop of Ray's tutorial: each gradient goes to the server when it is there.

    The worker that computed it gets the weights after its own update. A turn of ``steps`` is
    ``steps`` updates for each worker, and ends when all are applied. With ``arrays`` the weights
    travel as numpy arrays, which Ray moves faster than the tutorial's tensors.
    """

    def __init__(self, name: str, workload: Workload, arrays: bool) -> None:
        super().__init__(name)
        self._workload, self._arrays = workload, arrays
        self._server: Any = None
        self._workers: list[Any] = []

    def start(self) -> None:
        self._server = Server.remote(self._workload, self._arrays)
        self._workers = [Worker.remote(self._workload, rank) for rank in range(WORKERS)]
        ray.get(self._server.get_weights.remote(), timeout=DEADLINE)

    def run(self, steps: int) -> float:
        updates = steps * WORKERS
        begin = time.perf_counter()
        weights = self._server.get_weights.remote()
        working = {worker.compute_gradients.remote(weights): worker for worker in self._workers}
        for number in range(updates):
            ready, _ = ray.wait(list(working), num_returns=1, timeout=DEADLINE)
            if not ready:
                raise TimeoutError(f"{self.name}: an update took more than {DEADLINE:g} s")
            worker = working.pop(ready[0])
            weights = self._server.apply_gradients.remote(ready[0])
            if number < updates - WORKERS:  # the others are on their way already
                working[worker.compute_gradients.remote(weights)] = worker
        ray.get(weights, timeout=DEADLINE)
        return (time.perf_counter() - begin) / updates

    def close(self) -> None:
        kill(self._server, *self._workers)
        self._server, self._workers = None, []


# --- small: one actor call ---


@ray.remote(num_cpus=0)
class Adder:
    """Adds what it is sent, and returns the sum."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values.copy()

    def push_pull(self, update: np.ndarray) -> np.ndarray:
        self._values += update
        return self._values


class ActorCall(Contender):
    """A call of an actor that takes 1 kB and returns 1 kB; the driver waits for each."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._actor: Any = None
        self._pushed = 0

    def start(self) -> None:
        self._actor = Adder.remote(small())

    def run(self, steps: int) -> float:
        update = np.ones_like(small())
        begin = time.perf_counter()
        for _ in range(steps):
            values = ray.get(self._actor.push_pull.remote(update), timeout=DEADLINE)
        seconds = time.perf_counter() - begin
        self._pushed += steps
        expect(self.name, values[-1], self._pushed)
        return seconds / steps

    def close(self) -> None:
        kill(self._actor)
        self._actor = None


# --- network and host: a server process in one namespace, worker processes in the other or the same ---


class Network(Contender):
    """A team of servers and some workers; a turn is as long as its slowest worker's.

    ``place`` makes its two ends: ``joined`` or ``one_host``.
    """

    def __init__(
        self, name: str, workers: int, place: Callable[[], AbstractContextManager[Pair]] = joined
    ) -> None:
        super().__init__(name)
        self.workers = workers
        self._place = place
        self._stack = contextlib.ExitStack()
        self._team: Team | None = None

    @abstractmethod
    def members(self, pair: Pair) -> list[Member]:
        """The server's processes in ``pair.first``, then ``self.workers`` of them in ``pair.second``."""

    def start(self) -> None:
        members = self.members(self._stack.enter_context(self._place()))
        self._team = self._stack.enter_context(Team(self.name, members))

    def run(self, steps: int) -> float:
        assert self._team is not None
        return max(self._team.turn(steps)[-self.workers :]) / steps

    def close(self) -> None:
        self._stack.close()
        self._team = None


class Gloo(Network):
    """torch.distributed's Gloo: each worker sends 100 MB to the server and receives 100 MB from it.

    The vector goes in ``pieces``, each answered as soon as it is there, so that both directions are
    busy at once; the server has receives posted for all workers. Without ``add`` it answers what it
    was sent: the network alone. With it, it is a parameter server: it adds the piece and answers
    the sum.
    """

    def __init__(
        self,
        name: str,
        workers: int,
        pieces: int,
        add: bool,
        place: Callable[[], AbstractContextManager[Pair]] = joined,
    ) -> None:
        super().__init__(name, workers, place)
        self._pieces, self._add = pieces, add

    def members(self, pair: Pair) -> list[Member]:
        url = Path(self._stack.enter_context(tempfile.TemporaryDirectory()), "store").as_uri()
        settings = {"url": url, "workers": self.workers, "pieces": self._pieces, "add": self._add}
        server = Member(pair.first, _gloo_member, settings | {"namespace": pair.first, "rank": 0})
        workers = [
            Member(pair.second, _gloo_member, settings | {"namespace": pair.second, "rank": rank})
            for rank in range(1, self.workers + 1)
        ]
        return [server, *workers]


def _gloo_member(
    orders: Orders, namespace: Namespace, url: str, rank: int, workers: int, pieces: int, add: bool
) -> None:
    """Body of a process of ``Gloo``; the server has rank 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = namespace.device
    limit = timedelta(seconds=DEADLINE)
    dist.init_process_group(
        "gloo", init_method=url, rank=rank, world_size=workers + 1, timeout=limit
    )
    try:
        orders.serve(_gloo_worker(pieces, add) if rank else _gloo_server(workers, pieces, add))
    finally:
        dist.destroy_process_group()


def _gloo_server(workers: int, pieces: int, add: bool) -> Callable[[], None]:
    weights = _vector(0.0).chunk(pieces)
    buffers = [_vector(0.0).chunk(pieces) for _ in range(workers)]
    pushed = 0

    def step() -> None:
        nonlocal pushed
        arriving = [
            (number, buffer[number], source, dist.irecv(buffer[number], source, tag=number))
            for number in range(pieces)
            for source, buffer in enumerate(buffers, start=1)
        ]
        leaving = []
        for number, piece, worker, arrival in arriving:
            arrival.wait()
            if add:
                weights[number].add_(piece)
                piece.copy_(
                    weights[number]
                )  # the next worker's update changes the weights while this leaves
            leaving.append(dist.isend(piece, worker, tag=number))
        for departure in leaving:
            departure.wait()
        pushed += workers
        expect("the server", weights[-1][-1].item(), pushed if add else 0)

    return step


def _gloo_worker(pieces: int, add: bool) -> Callable[[], None]:
    update, answer = _vector(1.0).chunk(pieces), _vector(0.0).chunk(pieces)
    pushed = 0

    def step() -> None:
        nonlocal pushed
        arriving = [dist.irecv(piece, 0, tag=number) for number, piece in enumerate(answer)]
        leaving = [dist.isend(piece, 0, tag=number) for number, piece in enumerate(update)]
        for transfer in (*leaving, *arriving):
            transfer.wait()
        pushed += 1
        last = answer[-1][-1].item()
        if (
            last < pushed if add else last != 1.0
        ):  # the sum holds this worker's updates, and others'
            raise RuntimeError(f"the answer is {last:g} after {pushed} updates of one")

    return step


def _vector(value: float) -> torch.Tensor:
    return torch.full((VECTOR_BYTES // 4,), value)
