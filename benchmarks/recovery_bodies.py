"""A worker that is killed while `DistributedSGD` trains: one run, and what is measured of it.

Times of commits come from the coordinator itself, which asks the learning rate's schedule once for
each: `Clock` is that schedule, and notes when it is asked. When the driver hears of a step is
another matter, and noted apart.
"""

from __future__ import annotations

import os
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.recovery_rivals import network
from steepest import Callback, DistributedSGD, RunConfig, StepResult, TorchModel
from steepest.core.engine.commit_log import Commit, CommitLog

KILL_STEP = 191
STEPS_AFTER = 200
STEP_SECONDS = 0.05
BATCH = 32
LEARNING_RATE = 0.1
Arrays = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Arrays, Arrays]:
    """scikit-learn's 1,797 digits of 8 x 8 pixels: 1,437 to train with, 360 to test."""
    from sklearn.datasets import load_digits  # the driver only: its import would count as recovery

    x, y = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1437], order[1437:]
    x = x.float() / 16
    return (x[train], y[train]), (x[test], y[test])


class PacedModel(TorchModel):
    """A model whose gradient takes some seconds more, by waiting."""

    seconds = STEP_SECONDS

    def compute_gradients(self, *arguments: Any, **named: Any) -> Any:
        time.sleep(self.seconds)
        return super().compute_gradients(*arguments, **named)


class Clock:
    """A schedule that notes when it is asked, in a file of the process that asks."""

    def __init__(self, folder: str, rate: float = LEARNING_RATE) -> None:
        self._folder, self._rate = folder, rate
        self._file: int | None = None

    def __call__(self, step: int) -> float:
        if self._file is None:
            self._file = os.open(
                Path(self._folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND
            )
        os.write(self._file, struct.pack("d", time.monotonic()))
        return self._rate

    def __reduce__(self) -> tuple[type[Clock], tuple[str, float]]:
        return Clock, (self._folder, self._rate)

    def commits(self) -> list[float]:
        """When each update was committed: what the process noted that was asked most, which is the coordinator's."""
        noted = max((path.read_bytes() for path in Path(self._folder).iterdir()), key=len)
        return [when for (when,) in struct.iter_unpack("d", noted)]


def paced_creator(
    data: Arrays,
    schedule: Callable[[int], float],
    seconds: float,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
) -> Callable[[int, int], TorchModel]:
    """Makes models whose data travel to the workers with this function."""

    def create(worker: int, device: int) -> TorchModel:
        model = PacedModel(
            network(),
            loss=F.cross_entropy,
            data=data,
            batch_size=BATCH,
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=LEARNING_RATE),
            learning_rate=schedule,
            metrics=metrics,
        )
        model.seconds = seconds
        return model

    return create


class Kill(Callback):
    """Kills a process as soon as a step has been heard of; notes when each was."""

    def __init__(self, step: int, victim: int) -> None:
        self._step, self._victim = step, victim
        self.killed = 0.0
        self.heard: list[tuple[int, float]] = []

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        self.heard.append((result.step, time.monotonic()))
        if result.step >= self._step and not self.killed:
            self.killed = time.monotonic()
            os.kill(self._victim, signal.SIGKILL)


@dataclass(frozen=True)
class Recovery:
    """What one death cost.

    Attributes:
        next_step: seconds from the kill to the next step that the driver (of Ray Train: the first
            worker) hears of.
        new_step: to the first step that had not been taken before.
        again: steps that were committed before, and had to be taken again.
        gap: the longest time without a commit from the last one before the kill on, in seconds.
        successor: seconds from the kill to the first commit with a gradient of the successor.
        meanwhile: commits between the victim's last gradient and its successor's first.
        lost, twice: samples of whole epochs that are in no commit, and those that are in more than
            one.
    """

    next_step: float
    new_step: float
    again: int
    gap: float | None = None
    successor: float | None = None
    meanwhile: int | None = None
    lost: int | None = None
    twice: int | None = None


def pause_in(heard: Sequence[tuple[int, float]], killed: float) -> tuple[float, float, int]:
    """The first three fields of `Recovery`, from (step, when it was heard of).

    What was committed before the kill may be heard of after it: the pause is the longest silence
    since then.
    """
    times = [killed, *(when for _, when in heard if when > killed)]
    if len(times) == 1:
        raise ValueError("no step was heard of after the kill")
    end = max(range(1, len(times)), key=lambda i: times[i] - times[i - 1])
    before, after = heard[: len(heard) - len(times) + end], heard[len(heard) - len(times) + end :]
    reached = max((step for step, _ in before), default=0)
    new = next((when for step, when in after if step > reached), float("inf"))
    return times[end] - killed, new - killed, max(0, reached + 1 - after[0][0])


class Seen:
    """How often each sample of each epoch was in a commit.

    Attributes:
        lost, twice: samples of epochs that are over that were in none, and in more than one.
    """

    def __init__(self, samples: int) -> None:
        self.lost = self.twice = 0
        self._samples = samples
        self._first = 0
        self._counts: dict[int, np.ndarray] = {}

    def begin_after(self, epoch: int) -> None:
        """Forget everything; this epoch and those before it are not looked at."""
        self._counts.clear()
        self._first = epoch + 1

    def add(self, log: CommitLog) -> None:
        """More commits."""
        for epoch, begin, end in log.samples():
            if epoch >= self._first:
                counts = self._counts.setdefault(epoch, np.zeros(self._samples, np.uint8))
                counts[begin:end] += 1

    def close(self, epoch: int) -> None:
        """All epochs before this one are over."""
        for number in [number for number in self._counts if number < epoch]:
            counts = self._counts.pop(number)
            self.lost += int((counts == 0).sum())
            self.twice += int((counts > 1).sum())


def around(
    parts: Sequence[Sequence[Commit]], times: Sequence[float], victim: int, killed: float
) -> dict[str, Any]:
    """The longest gap, when the successor was back and what was committed until then, from a whole log.

    Args:
        parts: of the log: commits of each.
        times: of the commits, in order; earlier ones than these may come before.
    """
    commits = [(number, commit) for number, part in enumerate(parts) for commit in part]
    times = times[len(times) - len(commits) :]
    start = max((i for i, when in enumerate(times) if when <= killed), default=0)
    gap = max(
        later - earlier for earlier, later in zip(times[start:], times[start + 1 :], strict=False)
    )
    lives = [
        max(
            ((part, push.incarnation) for push in commit.pushes if push.worker == victim),
            default=(-1, -1),
        )
        for part, commit in commits
    ]
    first = next((i for i, life in enumerate(lives) if life > (0, 0)), None)
    if first is None:
        return {"gap": gap}
    last = max((i for i, life in enumerate(lives) if life == (0, 0)), default=-1)
    return {"gap": gap, "successor": times[first] - killed, "meanwhile": first - last - 1}


def kill_worker(
    strategy: Any,
    workers: int,
    *,
    step: int = KILL_STEP,
    steps_after: int = STEPS_AFTER,
    seconds: float = STEP_SECONDS,
    run_config: RunConfig | None = None,
) -> Recovery:
    """Trains, kills the last worker after a step, goes on for `steps_after` steps, and says what that cost.

    Args:
        seconds: that each gradient takes at least.
        run_config: must keep the log.
    """
    victim = workers - 1
    with tempfile.TemporaryDirectory() as folder:
        clock = Clock(folder)
        creator = paced_creator(digits()[0], clock, seconds)
        run_config = run_config or RunConfig(keep_log=True)
        with DistributedSGD(
            creator, num_workers=workers, strategy=strategy, run_config=run_config
        ) as trainer:
            trainer.warmup()
            kill = Kill(step, trainer.foreach_worker(lambda view: view.pid)[victim])
            last = trainer.fit(steps=step + steps_after, callbacks=[kill], progress=False)
            if trainer.stats().replaced != 1:
                raise RuntimeError(f"{trainer.stats().replaced} workers were replaced, not one")
            log = trainer.log()
        seen = Seen(len(digits()[0][0]))
        seen.add(log)
        seen.close(last.epoch or 0)
        found = around([part.commits for part in log.parts], clock.commits(), victim, kill.killed)
        return Recovery(
            *pause_in(kill.heard, kill.killed), **found, lost=seen.lost, twice=seen.twice
        )
