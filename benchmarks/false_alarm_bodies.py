"""What a job of `benchmarks.false_alarms` runs: models that hold Python's lock now and then, and its driver."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.parameter_server_rivals import ray_started
from benchmarks.recovery_bodies import BATCH, LEARNING_RATE, digits, network
from steepest import Callback, DistributedSGD, ParameterServerStrategy, StepResult, TorchModel

STEP_SECONDS = 0.02


@dataclass(frozen=True)
class Alarms:
    """How often and for how long processes look dead.

    Attributes:
        minutes: of training.
        workers, servers: numbers of processes.
        lock: "computing" or "sleeping": what a call that holds Python's lock does.
        held, every: seconds that it takes, and from one such call of a process to the next.
        paused, pause_every: the same of the driver's pauses.
    """

    minutes: float = 30.0
    workers: int = 6
    servers: int = 2
    lock: str = "computing"
    held: float = 10.0
    every: float = 90.0
    paused: float = 5.0
    pause_every: float = 30.0


@dataclass(frozen=True)
class Seen:
    """What a job showed.

    Attributes:
        steps: that were committed.
        gap: the longest time between two of them that the driver heard of, in seconds.
        holds: how often each process held the lock.
        events: the lines of all events; each is a false alarm.
        replaced: the number of processes that were replaced.
    """

    steps: int
    gap: float
    holds: dict[str, int]
    events: tuple[str, ...]
    replaced: int


def hold_computing(seconds: float) -> None:
    """Hold Python's lock for some seconds in one call of C code that computes."""
    end = time.monotonic() + seconds
    any(map(end.__lt__, iter(time.monotonic, None)))


def hold_sleeping(seconds: float) -> None:
    """Hold Python's lock for some seconds in one call of C code that sleeps."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


HOLDS: dict[str, Callable[[float], None]] = {
    "computing": hold_computing,
    "sleeping": hold_sleeping,
}


class Holder:
    """Holds Python's lock when it is called and some time has passed; notes that in a file."""

    def __init__(self, alarms: Alarms, folder: str, name: str, first: float) -> None:
        self._alarms, self._folder, self._name, self._first = alarms, folder, name, first
        self._next: float | None = None

    def __call__(self, step: int = 0) -> float:
        now = time.monotonic()
        if self._next is None:
            self._next = now + self._first
        if now >= self._next:
            self._next = now + self._alarms.every
            HOLDS[self._alarms.lock](self._alarms.held)
            with Path(self._folder, self._name).open("a") as file:
                file.write(f"{now}\n")
        return LEARNING_RATE

    def __reduce__(self) -> tuple[Any, ...]:
        return Holder, (self._alarms, self._folder, self._name, self._first)


class HoldingModel(TorchModel):
    """A model whose gradient takes a little longer, and now and then holds Python's lock."""

    holder: Holder

    def compute_gradients(self, *arguments: Any, **named: Any) -> Any:
        time.sleep(STEP_SECONDS)
        self.holder()
        return super().compute_gradients(*arguments, **named)


class Heard(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        self.times.append(time.monotonic())


def model_creator(alarms: Alarms, folder: str) -> Callable[[int, int], TorchModel]:
    """Makes models that hold the lock in turn; so does the process of the coordinator, which asks the schedule."""
    data = digits()[0]
    apart = alarms.every / (alarms.workers + 1)
    schedule = Holder(alarms, folder, "coordinator", alarms.every)

    def create(worker: int, device: int) -> TorchModel:
        model = HoldingModel(
            network(),
            loss=F.cross_entropy,
            data=data,
            batch_size=BATCH,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=LEARNING_RATE),
            learning_rate=schedule,
        )
        model.holder = Holder(alarms, folder, f"worker {worker}", apart * (worker + 1))
        return model

    return create


def drive(alarms: Alarms, pipe: Connection) -> None:
    """The driver: trains, and says what was seen."""
    torch.set_num_threads(1)
    strategy = ParameterServerStrategy(num_servers=alarms.servers)
    with tempfile.TemporaryDirectory() as folder, ray_started(alarms.workers + alarms.servers):
        with DistributedSGD(
            model_creator(alarms, folder), num_workers=alarms.workers, strategy=strategy
        ) as trainer:
            heard = Heard()
            trainer.fit(steps=1, progress=False)
            pipe.send("training")
            end = time.monotonic() + 60 * alarms.minutes
            while time.monotonic() < end:
                trainer.fit(steps=20, callbacks=[heard], progress=False)
            stats = trainer.stats()
        holds = Counter(
            {each.name: len(each.read_text().splitlines()) for each in Path(folder).iterdir()}
        )
    gap = max(later - sooner for sooner, later in pairwise(heard.times))
    lines = tuple(f"step {event.step}: {event.line}" for event in stats.events)
    pipe.send(Seen(stats.step, gap, dict(holds), lines, stats.replaced))
