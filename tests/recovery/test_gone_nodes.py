"""Nodes that are gone for good, in a cluster without room elsewhere: a job goes on with what is left of it."""

from __future__ import annotations

import logging
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
from steepest.core.config.run import DeadlineConfig
from steepest.errors import PeerLostError, ResourcesError
from tests.reference import Task, samples, sgd
from tests.simulated_programs import linear, quiet
from tests.simulation.run import Simulation, run_config

TASK = Task(linear, sgd(lr=0.01, momentum=0.9), samples(61), batch_size=1)

STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=1),
    ParameterServerStrategy(num_servers=1, compression="int8"),
    ParameterServerStrategy(mode="async", num_servers=2),
    ParameterServerStrategy(num_servers=2, replication=2),
    AllreduceStrategy(),
    AllreduceStrategy(sharded=False),
    LocalStrategy(),
]
CONFIG = run_config(deadlines=DeadlineConfig(start=5.0, step=60.0))


class At(Callback):
    """Does something once, after a step."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        then, self.then = self.then, lambda trainer: None
        then(trainer)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(1)
@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_two_of_four_workers_go_on_at_once(strategy: Any, *, silently: bool) -> None:
    simulation = Simulation(1, cpus=(0, 2, 2))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 4, strategy=strategy, run_config=CONFIG) as trainer,
    ):
        trainer.fit(steps=10, progress=False)
        began = simulation.scheduler.now

        def lose(trainer: DistributedSGD) -> None:
            simulation.world.lose(simulation.world.nodes[1], silently=silently)

        assert trainer.fit(steps=10, callbacks=[At(lose)], progress=False).step == 20
        assert trainer.num_workers == 2
        assert simulation.scheduler.now - began < 15.0


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_one_worker_goes_on_alone_when_nobody_comes(strategy: Any) -> None:
    simulation = Simulation(2, cpus=(0, 1, 1))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=CONFIG) as trainer,
    ):
        trainer.fit(steps=10, progress=False)
        simulation.world.lose(simulation.world.nodes[1], silently=True)
        assert trainer.fit(steps=10, progress=False).step == 20
        assert trainer.num_workers == 1


def test_the_error_says_that_nobody_came() -> None:
    simulation = Simulation(3, cpus=(0, 2))
    told = r"no successor has come up(.|\n)*25 s were waited: add nodes"
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, run_config=CONFIG) as trainer,
    ):
        trainer.fit(steps=10, progress=False)
        simulation.world.lose(simulation.world.nodes[1], silently=False)
        with pytest.raises(PeerLostError, match=told):
            trainer.fit(steps=10, progress=False)


def test_servers_can_be_asked_for_while_a_worker_is_missing() -> None:
    simulation = Simulation(4, cpus=(0, 2, 1))
    strategy = ParameterServerStrategy(num_servers=1)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, strategy=strategy, run_config=CONFIG) as trainer,
    ):
        trainer.fit(steps=5, progress=False)
        simulation.world.lose(simulation.world.nodes[2], silently=False)
        trainer.fit(steps=5, progress=False)
        assert trainer.num_workers == 2
        trainer.resize(num_servers=2)
        assert trainer.strategy.num_servers == 2
        assert trainer.fit(steps=5, progress=False).step == 15


def test_what_a_callback_asks_for_in_vain_ends_no_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    simulation = Simulation(5, cpus=(2, 2))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, run_config=CONFIG) as trainer,
    ):
        with caplog.at_level(logging.WARNING, logger="steepest"):
            trainer.fit(steps=5, callbacks=[At(lambda sgd: sgd.resize(6))], progress=False)
            assert trainer.fit(steps=5, progress=False).step == 10
        assert "no room for more workers" in caplog.text
        with pytest.raises(ResourcesError, match="no room for more workers"):
            trainer.resize(6)
        assert trainer.fit(steps=5, progress=False).step == 15


@pytest.mark.parametrize("way", ["strategy", "servers"])
def test_who_asks_for_something_else_is_not_refused_for_workers_that_a_callback_asked_for_in_vain(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = Simulation(5, cpus=(2, 2))
    strategy = ParameterServerStrategy(num_servers=1)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=CONFIG) as trainer,
    ):
        trainer.fit(steps=5, callbacks=[At(lambda sgd: sgd.resize(6))], progress=False)
        with caplog.at_level(logging.WARNING, logger="steepest"):
            if way == "strategy":
                trainer.set_strategy("allreduce")
                assert isinstance(trainer.strategy, AllreduceStrategy)
            else:
                trainer.resize(num_servers=2)
                assert trainer.strategy.num_servers == 2
        assert "no room for more workers" in caplog.text
        assert trainer.fit(steps=5, progress=False).step == 10
        assert trainer.num_workers == 2
