"""Servers that are killed, a worker that joins, copies of everything, other sizes, checkpoints: turns of each.

They are sections of `benchmarks.recovery`.
"""

from __future__ import annotations

import functools
import logging
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import recovery_bodies as bodies
from benchmarks.models import LEARNING_RATE, MLP, Workload
from benchmarks.overhead import ratios
from benchmarks.recovery_bodies import Kill, Recovery
from steepest import (
    AllreduceStrategy,
    Callback,
    Checkpoints,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
    TorchModel,
)
from steepest.core.strategies.strategy import Strategy
from steepest.runtime.calls import has_answered

JOIN_STEP = 60
LARGE = Workload("mlp", MLP, (1024,), 64, 1024, 20)
WANTED = 1.35


def constant(step: int) -> float:
    return bodies.LEARNING_RATE


def server_deaths(workers: int) -> dict[str, Callable[[], Recovery]]:
    copies = ParameterServerStrategy(replication=2)
    spare, snapshots = (
        RunConfig(failure=FailureConfig(spares=1)),
        RunConfig(failure=FailureConfig(spares=1, snapshot_every=20)),
    )
    return {
        "server 0, copies": functools.partial(kill_server, copies, 0, workers, spare),
        "server 1, copies": functools.partial(kill_server, copies, 1, workers, spare),
        "server 1, no spare": functools.partial(
            kill_server, copies, 1, workers, RunConfig(failure=FailureConfig(spares=0))
        ),
        "server 0, snapshots": functools.partial(kill_server, "ps", 0, workers, snapshots),
    }


def kill_server(
    strategy: str | ParameterServerStrategy,
    index: int,
    workers: int,
    run_config: RunConfig,
    *,
    step: int = bodies.KILL_STEP,
    steps_after: int = bodies.STEPS_AFTER,
    seconds: float = bodies.STEP_SECONDS,
) -> Recovery:
    """Kills a server's process after a step; the coordinator lives beside the first."""
    creator = bodies.paced_creator(bodies.digits()[0], constant, seconds)
    with DistributedSGD(
        creator, num_workers=workers, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.warmup()
        kill = Kill(step, next(p.pid for p in trainer.processes() if p.name == f"server {index}"))
        trainer.fit(steps=step + steps_after, callbacks=[kill], progress=False)
        if trainer.stats().replaced != 1:
            raise RuntimeError(f"{trainer.stats().replaced} processes were replaced, not one")
    return Recovery(*bodies.pause_in(kill.heard, kill.killed))


class Join(Callback):
    """Asks for one more worker after a step; notes when each step was heard of, and how many workers took it."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.heard: list[tuple[int, float]] = []

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.heard.append((trainer.num_workers, time.monotonic()))
        if result.step == self._step:
            trainer.resize(num_workers=trainer.num_workers + 1)


def join(strategy: str, workers: int, seconds: float = bodies.STEP_SECONDS) -> float:
    """Seconds by which the step in which a worker joins is longer than the others."""
    creator = bodies.paced_creator(bodies.digits()[0], constant, seconds)
    with DistributedSGD(creator, num_workers=workers, strategy=strategy) as trainer:
        trainer.warmup()
        watch = Join(JOIN_STEP)
        while trainer.num_workers == workers:
            trainer.fit(steps=100, callbacks=[watch], progress=False)
        trainer.fit(steps=5, callbacks=[watch], progress=False)
    at = next(i for i, (count, _) in enumerate(watch.heard) if count > workers)
    times = [when for _, when in watch.heard]
    usual = statistics.median(b - a for a, b in pairwise(times))
    return times[at] - times[at - 1] - usual


def joins(workers: int) -> dict[str, Callable[[], float]]:
    return {name: functools.partial(join, name, workers) for name in ("ps", "async", "allreduce")}


def joins_text(pauses: Mapping[str, list[float]]) -> str:
    lines = ["", "a worker joins: seconds for which the others stop, medians (wanted: 0.2)"]
    for name, each in pauses.items():
        lines.append(f"{name:15}{statistics.median(each):8.3f}  {min(each):.3f}..{max(each):.3f}")
    return "\n".join(lines)


def large_model(worker: int, device: int, momentum: float = 0.0) -> TorchModel:
    def optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=momentum)

    return TorchModel(
        LARGE.build(),
        loss=F.nll_loss,
        data=LARGE.data(),
        batch_size=LARGE.batch_size,
        optimizer=optimizer,
    )


def step_seconds(
    strategy: ParameterServerStrategy, workers: int, run_config: RunConfig | None = None
) -> float:
    """The median step of a 25-million-parameter model."""
    times: list[float] = []
    torch.manual_seed(0)
    with DistributedSGD(
        large_model, num_workers=workers, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.fit(steps=5, progress=False)
        for _ in range(3):
            began = time.perf_counter()
            trainer.fit(steps=LARGE.steps, progress=False)
            times.append((time.perf_counter() - began) / LARGE.steps)
    return statistics.median(times)


ONE, COPIES, SNAPSHOTS = "ps", "ps, replication=2", "ps, snapshot_every=20"


def costs(workers: int) -> dict[str, Callable[[], float]]:
    return {
        ONE: functools.partial(step_seconds, ParameterServerStrategy(), workers),
        COPIES: functools.partial(step_seconds, ParameterServerStrategy(replication=2), workers),
        SNAPSHOTS: functools.partial(
            step_seconds,
            ParameterServerStrategy(),
            workers,
            RunConfig(failure=FailureConfig(snapshot_every=20)),
        ),
    }


def costs_text(seconds: Mapping[str, list[float]]) -> str:
    lines = ["", f"a step of 25 million parameters, medians; over {ONE} (copies wanted: {WANTED})"]
    for name, each in seconds.items():
        line = f"{name:24}{statistics.median(each) * 1e3:8.1f} ms"
        if name != ONE:
            ratio = ratios(each, seconds[ONE])
            line += f"{ratio['median']:8.2f}  {ratio['min']:.2f}..{ratio['max']:.2f}"
        lines.append(line)
    return "\n".join(lines)


EVERY = 50
FIRST, LAST = 60, 160  # between them two checkpoints are due
WITHOUT, KEPT = "ps, no checkpoints", f"ps, Checkpoints(every={EVERY})"


class Watch(Callback):
    """Notes when each step was heard of."""

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.heard[result.step] = time.perf_counter()


def kept_seconds(workers: int, keeps: bool, creator: Any = large_model) -> dict[str, float]:
    """The mean step from one to another, "step"; with checkpoints also the mean time for which training "paused".

    The mean, because a pause is in few of the steps.
    """
    watch = Watch()
    with (
        tempfile.TemporaryDirectory() as folder,
        told("steepest.runtime.driver.checkpoint_writer") as said,
    ):
        checkpoints = Checkpoints(folder, every=EVERY, keep=1) if keeps else None
        with DistributedSGD(creator, num_workers=workers, checkpoints=checkpoints) as trainer:
            trainer.fit(steps=LAST + 5, callbacks=[watch], progress=False)
    found = {"step": (watch.heard[LAST] - watch.heard[FIRST]) / (LAST - FIRST)}
    for what in ("paused for", "written in"):
        if times := seconds_in(said, what):
            found[what] = statistics.mean(times)
    return found


def keeps(workers: int) -> dict[str, Callable[[], dict[str, float]]]:
    return {
        name: functools.partial(kept_seconds, workers, name == KEPT) for name in (WITHOUT, KEPT)
    }


def keeps_text(found: Mapping[str, list[dict[str, float]]]) -> str:
    lines = [
        "",
        f"a step of 25 million parameters, means of {LAST - FIRST} steps, medians of rounds; over {WITHOUT}",
    ]
    for name, each in found.items():
        steps = [one["step"] for one in each]
        line = f"{name:24}{statistics.median(steps) * 1e3:8.1f} ms"
        if name != WITHOUT:
            ratio = ratios(steps, [one["step"] for one in found[WITHOUT]])
            line += f"{ratio['median']:8.2f}  {ratio['min']:.2f}..{ratio['max']:.2f}"
            for what in ("paused for", "written in"):
                line += f"; {what} {statistics.median(one[what] for one in each):.3f} s"
        lines.append(line)
    return "\n".join(lines)


def resize_seconds(workers: int, change: Mapping[str, int], creator: Any = None) -> float:
    """For how long training stops when a job of one server, with momentum, changes its size."""
    creator = creator or functools.partial(large_model, momentum=0.9)
    strategy = ParameterServerStrategy(num_servers=1)
    with DistributedSGD(creator, num_workers=workers, strategy=strategy) as trainer:
        trainer.fit(steps=5, progress=False)
        with told("steepest.runtime.cluster") as said:
            trainer.resize(**change)
        trainer.fit(steps=2, progress=False)
    (stopped,) = seconds_in(said, "training stopped for")
    return stopped


def death_seconds(strategy: Strategy, spares: int, creator: Any = None) -> dict[str, float]:
    """For how long training stops when one of three workers dies; without a spare process, and when another comes."""
    creator = creator or functools.partial(large_model, momentum=0.9)
    run_config = RunConfig(failure=FailureConfig(spares=spares))
    with DistributedSGD(
        creator, num_workers=3, strategy=strategy, run_config=run_config
    ) as trainer:
        trainer.fit(steps=2, progress=False)
        while (
            sum(
                has_answered(placing)
                for _, placing in trainer._supervisor.observation.reserve._spares
            )
            < spares
        ):
            trainer.fit(steps=2, progress=False)
        kill = Kill(trainer.step().step + 3, trainer.foreach_worker(lambda view: view.pid)[1])
        while len(trainer.stats().events) < (1 if spares else 2):
            trainer.fit(steps=5, callbacks=[kill], progress=False)
        events = trainer.stats().events
    return {event.kind: seconds_in([event.line], "training stopped for")[0] for event in events}


def resizes(workers: int) -> dict[str, Callable[[], Any]]:
    copies = AllreduceStrategy(replication=2)
    return {
        f"{workers} to {workers + 1} workers": functools.partial(
            resize_seconds, workers, {"num_workers": workers + 1}
        ),
        "1 to 2 servers": functools.partial(resize_seconds, workers, {"num_servers": 2}),
        "of 3, ps": functools.partial(death_seconds, ParameterServerStrategy(num_servers=1), 0),
        "of 3, allreduce, copies": functools.partial(death_seconds, copies, 0),
        "the same, a spare": functools.partial(death_seconds, copies, 1),
    }


def resizes_text(seconds: Mapping[str, list[Any]]) -> str:
    lines = ["", "25 million parameters with momentum: seconds for which training stops, medians"]
    for name, each in seconds.items():
        kinds = each[0] if isinstance(each[0], dict) else [""]
        for kind in kinds:
            found = [one[kind] if kind else one for one in each]
            lines.append(
                f"{name:24} {kind:10}{statistics.median(found):8.2f}  "
                f"{min(found):.2f}..{max(found):.2f}"
            )
    return "\n".join(lines)


#: What is measured in each, and the text that is made of that.
SECTIONS: dict[
    str, tuple[Callable[[int], dict[str, Callable[[], Any]]], Callable[[Mapping[str, Any]], str]]
] = {
    "joining": (joins, joins_text),
    "replication": (costs, costs_text),
    "checkpoints": (keeps, keeps_text),
    "resizing": (resizes, resizes_text),
}


@contextmanager
def told(logger: str) -> Iterator[list[str]]:
    """What is logged there meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(logger)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def seconds_in(said: list[str], what: str) -> list[float]:
    """The number after some words, of each message that has them."""
    return [
        float(found.group(1)) for text in said if (found := re.search(rf"{what} ([\d.]+) s", text))
    ]
