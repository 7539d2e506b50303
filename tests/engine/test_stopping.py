"""`stop` ends a `fit` between two steps: no step is lost, doubled or begun afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    LocalStrategy,
    ParameterServerStrategy,
    StepResult,
)
from tests.logged_runs import Memory
from tests.reference import same_bits
from tests.simulated_programs import TASK, quiet
from tests.simulation.run import Simulation, pause, run_config

SYNCHRONOUS: list[Any] = [
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    AllreduceStrategy(chunk_bytes=32),
]
STRATEGIES: list[Any] = [
    *SYNCHRONOUS,
    LocalStrategy(chunk_bytes=32),
    ParameterServerStrategy(mode="async", num_servers=2),
    ParameterServerStrategy(mode="ssp", staleness=2),
]


class Stopping(Callback):
    """Stops in a step, and notes the steps of which it hears."""

    def __init__(self, step: int = 3, then: Any = lambda: None) -> None:
        self.step, self.then = step, then
        self.steps: list[int] = []
        self.ends = 0

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.steps.append(result.step)
        if result.step == self.step:
            trainer.stop()
            self.then()

    def on_fit_end(self, trainer: DistributedSGD) -> None:
        self.ends += 1


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_nobody_trains_on_and_the_next_fit_continues(strategy: Any) -> None:
    stopping = Stopping()
    with (
        Simulation(1).running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=run_config()) as trainer,
    ):
        last = trainer.fit(steps=1000, callbacks=[stopping], progress=False)
        pause(20.0)
        assert trainer.stats().step == last.step < 100
        assert stopping.steps == list(range(1, last.step + 1))
        assert stopping.ends == 1
        assert trainer.step().step == last.step + 1  # it is not stopped
        assert trainer.fit(steps=5, progress=False).step == last.step + 6


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=str)
def test_the_steps_are_those_of_an_undisturbed_run(strategy: Any) -> None:
    found = []
    for stops in (True, False):
        with (
            Simulation(2).running(),
            DistributedSGD(
                TASK.creator(), 2, strategy=strategy, run_config=run_config()
            ) as trainer,
        ):
            if stops:
                last = trainer.fit(steps=1000, callbacks=[Stopping()], progress=False).step
                trainer.fit(steps=60 - last, progress=False)
            else:
                trainer.fit(steps=60, progress=False)
            found.append(trainer.weights())
    assert same_bits(*found)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_history_loggers_and_progress_have_each_step_once(
    strategy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = Memory()
    with (
        Simulation(6).running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=run_config()) as trainer,
    ):
        stopping = Stopping()
        last = trainer.fit(steps=1000, callbacks=[stopping, logger], progress="lines").step
        again = Stopping(last + 20)
        end = trainer.fit(steps=500, callbacks=[again, logger], progress="lines").step
        assert end > last
        for steps in ([row["step"] for row in trainer.history.steps], stopping.steps + again.steps):
            assert steps == list(range(1, end + 1))
    assert logger.steps == list(range(1, end + 1))  # training does not wait for it
    lines = capsys.readouterr().err.splitlines()
    ended = [re.search(r"step (\d+) \((\d+)/(\d+), took ", line) for line in lines]
    assert [tuple(map(int, found.groups())) for found in ended if found] == [
        (last, last, 1000), (end, end - last, 500),
    ]  # fmt: skip


def test_another_thread_stops_a_long_step() -> None:
    simulation = Simulation(3)
    stopping = Stopping(0)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.stop()  # there is no fit
        simulation.at_time(1.0, trainer.stop)
        last = trainer.fit(steps=100_000, callbacks=[stopping], progress=False)
        assert 0 < last.step == stopping.steps[-1] < 100_000


def test_a_stop_before_the_first_step() -> None:
    class Never(Callback):
        def on_fit_begin(self, trainer: DistributedSGD, steps: int) -> None:
            trainer.stop()

    with (
        Simulation(4).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(epochs=1, callbacks=[Never()], progress=False)
        assert trainer.stats().step == 0
        assert trainer.fit(steps=2, progress=False).step == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("victim", ["worker 1", "server 0", "worker 0"])
def test_who_dies_as_it_stops_loses_no_step_that_was_seen(strategy: Any, victim: str) -> None:
    simulation = Simulation(5)

    def kill() -> None:
        for process in simulation.living():
            if victim in str(process):
                simulation.world.kill(process, "it was killed. connection error code 2.")

    stopping = Stopping(7, kill)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, strategy=strategy, run_config=run_config()) as trainer,
    ):
        last = trainer.fit(steps=1000, callbacks=[stopping], progress=False)
        assert last.step == max(stopping.steps) < 100
        pause(20.0)  # a death that is noticed now is no part of that fit
        assert trainer.stats().step <= last.step
        assert trainer.fit(steps=5, progress=False).step == last.step + 5
