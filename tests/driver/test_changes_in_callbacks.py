"""A callback takes its time: whoever dies meanwhile is done without at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    ParameterServerStrategy,
    StepResult,
)
from tests.reference import Task, same_bits, samples, sgd
from tests.simulated_programs import linear, quiet
from tests.simulation.run import Simulation, pause, run_config

TASK = Task(linear, sgd(lr=0.01, momentum=0.9), samples(61), batch_size=1)

CALLBACK_SECONDS = 30.0


class Slow(Callback):
    """Loses a process in its third step, and takes its time."""

    def __init__(self, simulation: Simulation, name: str, *, reads: bool) -> None:
        self.simulation, self.name, self.reads = simulation, name, reads
        self.steps: list[int] = []
        self.lost = 0.0

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.steps.append(result.step)
        if len(self.steps) == 3:
            self.lost = self.simulation.scheduler.now
            living = self.simulation.living()
            (victim,) = (process for process in living if self.name in str(process))
            self.simulation.world.kill(victim, "it was killed. connection error code 2.")
            pause(CALLBACK_SECONDS)
            if self.reads:
                assert trainer.weights()
                pause(CALLBACK_SECONDS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(2)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name", ["worker 1", "server 0"])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_death_is_handled_while_a_callback_runs(name: str, copies: int, *, reads: bool) -> None:
    simulation = Simulation(7)
    strategy: Any = ParameterServerStrategy(num_servers=2, replication=copies)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, strategy=strategy, run_config=run_config()) as trainer,
    ):
        slow = Slow(simulation, name, reads=reads)
        last = trainer.fit(steps=20, callbacks=[slow], progress=False)
        events = trainer.stats().events
        weights = trainer.weights()
        assert same_bits(weights, trainer.weights())
    assert last.step == 20
    assert slow.steps[-1] == 20
    assert events
    # `Event.time` is that of the simulated day, which began when the scheduler's clock did
    handled = events[0].time - 1_700_000_000.0
    assert handled - slow.lost < 10.0


def test_allreduce_goes_on_while_a_callback_runs() -> None:
    simulation = Simulation(8)
    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(), 3, strategy=AllreduceStrategy(), run_config=run_config()
        ) as trainer,
    ):
        slow = Slow(simulation, "worker 1", reads=False)
        assert trainer.fit(steps=20, callbacks=[slow], progress=False).step == 20
        events = trainer.stats().events
    assert events[0].time - 1_700_000_000.0 - slow.lost < 10.0
