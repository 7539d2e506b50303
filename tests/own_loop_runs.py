"""Runs of users' own loops in the simulation: undisturbed, interrupted, and with a worker that dies."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import steepest
from steepest import AllreduceStrategy, FailureConfig, ParameterServerStrategy
from tests.reference import Weights
from tests.simulation.run import Simulation, pause, run_config

STRATEGIES: dict[str, Any] = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "ps, two copies": ParameterServerStrategy(num_servers=2, replication=2, chunk_bytes=64),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "allreduce, two copies": AllreduceStrategy(replication=2, chunk_bytes=64),
    "groups": AllreduceStrategy(data_plane="gloo", chunk_bytes=64),
    "sharded groups": AllreduceStrategy(data_plane="gloo", sharded=True, chunk_bytes=64),
}


@dataclass
class Found:
    """What a run has come to, read while the simulation runs."""

    weights: Weights
    reports: list[dict[str, float]]
    steps: list[Any]
    events: list[Any]
    evaluations: list[Any] = field(default_factory=list)


def _found(result: steepest.RunResult) -> Found:
    history = result.history
    return Found(
        dict(result.state_dict),
        result.reports,
        [*history.steps],
        [*history.events],
        history.evaluations,
    )


def run(script: Any, workers: int, strategy: Any = "ps", **settings: Any) -> Found:
    with Simulation(seed=1).running():
        found = steepest.run(
            script,
            num_workers=workers,
            strategy=strategy,
            progress=False,
            **{"run_config": run_config(), **settings},
        )
        return _found(found)


class Kills(steepest.Callback):
    """Kills a process, a worker by its index, when a step is committed."""

    def __init__(self, simulation: Simulation, victim: int | str, step: int) -> None:
        self._victim = f"worker {victim}" if isinstance(victim, int) else victim
        self._simulation, self._step = simulation, step
        self.has_killed = False

    def on_step(self, sgd: Any, result: steepest.StepResult) -> None:
        if result.step == self._step and not self.has_killed:
            self.has_killed = True
            (victim,) = (each for each in self._simulation.living() if self._victim in str(each))
            self._simulation.world.kill(victim, "it was killed. connection error code 2.")


def without(
    script: Any, workers: int, victim: int | str, step: int, strategy: Any = "ps", **settings: Any
) -> Found:
    """Run a script, one of whose processes is killed when a step is committed, and replaced."""
    simulation = Simulation(seed=1)
    kills = Kills(simulation, victim, step)
    with simulation.running():
        found = steepest.run(
            script,
            num_workers=workers,
            strategy=strategy,
            run_config=run_config(failure=FailureConfig(patience=math.inf, snapshot_every=3)),
            callbacks=[kills],
            progress=False,
            **settings,
        )
        assert kills.has_killed
        assert {"replaced", "recovered"} & {event["event"] for event in found.history.events}
        return _found(found)


#: A worker's rank, the number of its lives before, and how many places it has come to in this one.
Place = tuple[int, int, int]


class Places:
    """The places that workers' loops come to in one run, at some of which workers are killed.

    Args:
        deaths: by place, the ranks of those that die when a worker comes there.
    """

    active: ClassVar[Places | None] = None

    def __init__(self, deaths: Mapping[Place, Sequence[int]] | None = None) -> None:
        self.passed: list[Place] = []
        self._deaths = dict(deaths or {})
        self._threads: dict[int, list[int]] = {}  # of the function's lives, by rank

    def run(
        self, script: Any, workers: int, strategy: Any, patience: float = math.inf, **more: Any
    ) -> Found:
        """Run a script whose loop calls `come`."""
        Places.active, self._simulation = self, Simulation(seed=1)
        failure = FailureConfig(patience=patience, snapshot_every=3, max_failures=20)
        try:
            with self._simulation.running():
                return _found(
                    steepest.run(
                        script,
                        num_workers=workers,
                        strategy=strategy,
                        run_config=run_config(failure=failure),
                        progress=False,
                        **more,
                    )
                )
        finally:
            Places.active = None

    def note(self, rank: int) -> None:
        """Note that a worker's loop has come to a place."""
        threads, thread = self._threads.setdefault(rank, []), threading.get_ident()
        if thread not in threads:
            threads.append(thread)
        lives = threads.index(thread)
        number = sum(place[:2] == (rank, lives) for place in self.passed)
        self.passed.append((rank, lives, number))
        names = [f"worker {victim}" for victim in self._deaths.pop((rank, lives, number), ())]
        for each in self._simulation.living():
            if any(name in str(each) for name in names):
                self._simulation.world.kill(each, "it was killed. connection error code 2.")


def come() -> None:
    """Have a loop come to a place, at which some virtual time passes."""
    if Places.active is not None:
        Places.active.note(steepest.rank())
    pause(1e-3)


class Resizes(steepest.Callback):
    """Has a job get another number of workers after a step."""

    def __init__(self, step: int, workers: int) -> None:
        self._step, self._workers = step, workers

    def on_step(self, sgd: Any, result: steepest.StepResult) -> None:
        if result.step == self._step:
            sgd.resize(self._workers)


class InterruptedRunError(Exception):
    """The program is interrupted."""


class Interrupts(steepest.Callback):
    """Interrupts a run after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, sgd: Any, result: steepest.StepResult) -> None:
        if result.step == self._step:
            raise InterruptedRunError
