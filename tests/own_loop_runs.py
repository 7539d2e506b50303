"""Runs of users' own loops in the simulation: undisturbed, interrupted, and with a worker that dies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import steepest
from steepest import AllreduceStrategy, FailureConfig, ParameterServerStrategy
from tests.reference import Weights
from tests.simulation.run import Simulation, run_config

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


def _found(result: steepest.RunResult) -> Found:
    history = result.history
    return Found(dict(result.state_dict), result.reports, [*history.steps], [*history.events])


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
