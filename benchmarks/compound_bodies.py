"""Jobs of `DistributedSGD` in which several processes die: what dies when, and what is seen of it.

Processes are found by the names under which `ps` shows them, and only the public interface is used,
so that these jobs are a user's.
"""

from __future__ import annotations

import itertools
import math
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elasticity import constant
from benchmarks.job_processes import kill, processes, successor
from benchmarks.recovery_bodies import STEP_SECONDS, Arrays, digits, paced_creator
from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    Event,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)
from steepest.errors import SteepestError

KILL_STEP = 60
LAST_STEPS = 20
LIMIT_SECONDS = 90.0
COPIES = ParameterServerStrategy(num_servers=2, replication=2)


@dataclass(frozen=True)
class Outcome:
    """What one turn showed.

    Attributes:
        pause: the longest time from the first death on without a step that had not been taken
            before, in seconds; of a call: by how much the call and a step after it took longer than
            undisturbed. None where the job ended with an error.
        again: steps that were taken a second time.
        then: kinds of the events, or the error's name.
    """

    pause: float | None
    again: int
    then: str


class Scene:
    """What a plan of deaths knows of the job: called in a thread of its own while the job trains."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.chance = random.Random()
        self._kinds: list[str] = []
        self._changed = threading.Condition()

    def kill(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.pids |= kill(*names, number=number)

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def reborn(self, name: str) -> None:
        """Wait until the successor's process of one that was killed has started."""
        successor(name, self.pids[name])

    def whole(self, times: int) -> None:
        """Wait until processes have come back that often: workers are "returned", servers "resized"."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: sum(kind in ("returned", "resized") for kind in self._kinds) >= times,
                LIMIT_SECONDS / 2,
            )
        if not done:
            raise TimeoutError(f"what died did not come back: {self._kinds}")

    def note(self, kind: str) -> None:
        with self._changed:
            self._kinds.append(kind)
            self._changed.notify_all()


@dataclass(frozen=True)
class Case:
    """A job, and the plan by which its processes die."""

    plan: Callable[[Scene], Any]
    strategy: Any = "ps"
    workers: int = 3
    failure: FailureConfig = field(default_factory=FailureConfig)
    batches: int = 1  # that a worker computes in a step


def at_once(*names: str, number: signal.Signals = signal.SIGKILL) -> Callable[[Scene], None]:
    return lambda scene: scene.kill(*names, number=number)


def after(first: str, second: str, least: float, most: float) -> Callable[[Scene], None]:
    """The second dies some seconds after the first."""

    def plan(scene: Scene) -> None:
        scene.kill(first)
        scene.wait(scene.chance.uniform(least, most))
        scene.kill(second)

    return plan


def and_successor(name: str) -> Callable[[Scene], None]:
    """A process, and its successor as soon as it has started."""

    def plan(scene: Scene) -> None:
        scene.kill(name)
        scene.reborn(name)
        scene.kill(name)

    return plan


def while_starting(name: str, other: str) -> Callable[[Scene], None]:
    """A process, and another one while the first's successor starts."""

    def plan(scene: Scene) -> None:
        scene.kill(name)
        scene.reborn(name)
        scene.kill(other)

    return plan


def holders(*names: str) -> Callable[[Scene], None]:
    """Each holder of a copy, the next one as soon as the copies are back."""

    def plan(scene: Scene) -> None:
        for number, name in enumerate(names):
            if number:
                scene.whole(number)
            scene.kill(name)

    return plan


WAITING = FailureConfig(patience=math.inf)
SPARE, NONE = FailureConfig(spares=1), FailureConfig(spares=0)

CASES = {
    "a worker": Case(at_once("worker 1"), COPIES),
    "2 of 3 workers, ps": Case(at_once("worker 0", "worker 1"), failure=NONE),
    "2 of 3 workers, ps, 1 spare": Case(at_once("worker 0", "worker 1"), failure=SPARE),
    "2 of 3 workers, ps, patience=inf": Case(at_once("worker 0", "worker 1"), failure=WAITING),
    "3 of 4 workers, ps": Case(at_once("worker 0", "worker 1", "worker 2"), workers=4),
    "3 of 4 members, allreduce": Case(
        at_once("worker 0", "worker 1", "worker 2"), AllreduceStrategy(sharded=False), workers=4
    ),
    "a worker and a server, copies": Case(
        at_once("worker 1", "server 1"), COPIES, workers=4, failure=NONE
    ),
    "two deaths within 1.5 s, copies": Case(
        after("worker 1", "server 1", 0.0, 1.5), COPIES, workers=4, failure=NONE
    ),
    "a worker and its successor": Case(and_successor("worker 1"), COPIES, failure=NONE),
    "a server and its successor": Case(and_successor("server 1"), COPIES, failure=NONE),
    "a worker while another starts": Case(
        while_starting("worker 1", "worker 0"), COPIES, failure=NONE
    ),
    "a server while a worker starts": Case(
        while_starting("worker 1", "server 0"), COPIES, failure=NONE
    ),
    "a holder of each copy in turn": Case(holders("server 1", "server 0"), COPIES, failure=NONE),
    "both holders within 0.3 s": Case(
        after("server 1", "server 0", 0.1, 0.3), COPIES, failure=NONE
    ),
    "the server, ps": Case(at_once("server 0")),
    "all workers and the server but one, ps": Case(at_once("worker 0", "worker 1", "server 0")),
    "a worker, allreduce": Case(at_once("worker 1"), "allreduce"),
    "a worker, local": Case(at_once("worker 1"), LocalStrategy(sync_every=5), batches=5),
    "a worker stopped, ps": Case(at_once("worker 1", number=signal.SIGSTOP)),
}


class EnoughError(Exception):
    """Ends the `fit` when everything that was to be seen has been."""


class Watch(Callback):
    """Carries out a plan after some steps, and keeps the time of each result.

    Args:
        seed: of the plan's chances.
        limit: seconds after which it no longer waits for all workers to be back.
    """

    def __init__(self, case: Case, seed: int, limit: float = LIMIT_SECONDS) -> None:
        self.case = case
        self.limit = limit
        self.workers = case.workers
        self.scene = Scene()
        self.scene.chance = random.Random(seed)
        self.heard: list[tuple[int, float]] = []
        self.began = math.inf
        self.kinds: list[str] = []
        self.failed: BaseException | None = None
        self._plan = threading.Thread(target=self._carry_out, daemon=True)
        self._last: int | None = None

    def _carry_out(self) -> None:
        try:
            self.case.plan(self.scene)
        except (TimeoutError, KeyError) as error:
            self.failed = error

    def on_step(self, sgd: DistributedSGD, result: StepResult) -> None:
        self.heard.append((result.step, time.monotonic()))
        if len(self.heard) >= KILL_STEP and self.began == math.inf:
            self.began = time.monotonic()
            self._plan.start()
        self.workers = sgd.num_workers
        # "draining" is a notice: nothing has changed by then
        whole = self.workers == self.case.workers and bool({*self.kinds} - {"draining"})
        if self.began < math.inf and not self._plan.is_alive():
            late = time.monotonic() > self.began + self.limit
            if self._last is None and (whole or late):
                self._last = max(step for step, _ in self.heard) + LAST_STEPS
            if self.failed is not None or (self._last is not None and result.step >= self._last):
                raise EnoughError

    def on_event(self, sgd: DistributedSGD, event: Event) -> None:
        self.kinds.append(event.kind)
        self.scene.note(event.kind)


def turn(case: Case, seed: int = 0, seconds: float = STEP_SECONDS) -> Outcome:
    """One job, whose processes die by the plan."""
    watch = Watch(case, seed)
    try:
        with DistributedSGD(
            paced_creator(digits()[0], constant, seconds / case.batches),
            num_workers=case.workers,
            strategy=case.strategy,
            run_config=RunConfig(failure=case.failure),
        ) as trainer:
            _until_spares(trainer, case.failure.spares or 0)
            trainer.fit(steps=100_000, callbacks=[watch], progress=False)
    except EnoughError:
        pass
    except SteepestError as error:
        return Outcome(None, 0, type(error).__name__)
    if watch.failed is not None:
        return Outcome(None, 0, f"the plan failed: {watch.failed}")
    return Outcome(*progress(watch.heard, watch.began), ", ".join(dict.fromkeys(watch.kinds)))


def _until_spares(trainer: DistributedSGD, count: int) -> None:
    """Train until spare processes have started, and two seconds more, in which they get ready."""
    end = time.monotonic() + LIMIT_SECONDS
    while sum(name.startswith("spare") for name in processes()) < count:
        if time.monotonic() > end:
            raise TimeoutError("there is no spare process")
        trainer.fit(steps=10, progress=False)
    ready = time.monotonic() + (2.0 if count else 0.0)
    while time.monotonic() < ready:
        trainer.fit(steps=10, progress=False)


def progress(heard: Sequence[tuple[int, float]], began: float) -> tuple[float, int]:
    """The longest time without a step that had not been taken before, and how many were taken again.

    Args:
        heard: (step, when it was heard of).
        began: from when on.
    """
    reached, times, again = 0, [began], 0
    for step, when in heard:
        if step <= reached:
            again += 1
        elif when > began:
            times.append(when)
        reached = max(reached, step)
    if len(times) == 1:
        raise ValueError("no step was taken after the death")
    return max(later - sooner for sooner, later in itertools.pairwise(times)), again


# --- deaths in a call of the trainer ---

Call = Callable[[DistributedSGD, Path], Any]
ROWS = 40_000


def _evaluation(arrays: Arrays) -> Arrays:
    x, y = arrays
    return x.repeat(-(-ROWS // len(x)), 1)[:ROWS], y.repeat(-(-ROWS // len(y)))[:ROWS]


def calls() -> dict[str, tuple[Call, Call | None]]:
    """Calls by name, each with one that undoes it."""
    data = _evaluation(digits()[1])
    return {
        "save": (lambda sgd, folder: sgd.save(folder), None),
        "evaluate": (lambda sgd, folder: sgd.evaluate(data), None),
        "weights": (lambda sgd, folder: sgd.weights(), None),
        "resize": (
            lambda sgd, folder: sgd.resize(num_workers=4),
            lambda sgd, folder: sgd.resize(num_workers=3),
        ),
        "set_strategy": (
            lambda sgd, folder: sgd.set_strategy(AllreduceStrategy(replication=2)),
            lambda sgd, folder: sgd.set_strategy(COPIES),
        ),
    }


def call_turn(name: str, victim: str, seed: int = 0, seconds: float = STEP_SECONDS) -> Outcome:
    """One job, one process of which dies at a random moment of a call of the trainer.

    The same call is timed before, undisturbed.
    """
    call, undo = calls()[name]
    chance = random.Random(seed)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            DistributedSGD(
                paced_creator(digits()[0], constant, seconds), num_workers=3, strategy=COPIES
            ) as trainer,
        ):
            trainer.fit(steps=20, progress=False)
            usual = []
            for _ in range(2):
                usual.append(_timed(trainer, call, Path(folder)))
                if undo is not None:
                    undo(trainer, Path(folder))
                trainer.step()
            alone = statistics.median(each for each, _ in usual)
            events = len(trainer.stats().events)
            strike = threading.Timer(chance.uniform(0.0, alone), kill, [victim])
            strike.start()
            _, took = _timed(trainer, call, Path(folder))
            strike.join()
            trainer.fit(steps=LAST_STEPS, progress=False)
            kinds = [event.kind for event in trainer.stats().events[events:]]
    except SteepestError as error:
        return Outcome(None, 0, type(error).__name__)
    pause = took - statistics.median(whole for _, whole in usual)
    return Outcome(pause, 0, ", ".join(dict.fromkeys(kinds)))


def _timed(trainer: DistributedSGD, call: Call, folder: Path) -> tuple[float, float]:
    """Seconds that a call took, and with the step after it."""
    began = time.monotonic()
    call(trainer, folder)
    called = time.monotonic()
    trainer.step()
    return called - began, time.monotonic() - began
