"""Learning rates: in results as they were applied, and set while training runs, through anything that happens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from steepest import (
    AllreduceStrategy,
    Callback,
    DistributedSGD,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
)
from steepest.core.protocol.commit_state import with_rates
from steepest.errors import ConfigurationError
from steepest.testing.log_replay import replay
from tests.reference import Task, difference, same_bits
from tests.simulated_programs import TASK, quiet
from tests.simulation.run import Simulation, pause, run_config

STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    AllreduceStrategy(chunk_bytes=32),
    LocalStrategy(sync_every=3, chunk_bytes=32),
    ParameterServerStrategy(mode="async", num_servers=2),
]


def groups(module: torch.nn.Module) -> torch.optim.Optimizer:
    weight, bias = module.parameters()
    return torch.optim.SGD([{"params": [weight], "lr": 0.02}, {"params": [bias]}], 0.01, 0.9)


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


SCHEDULED = replace(TASK, optimizer=groups, lr_scheduler=halved)


class Noting(Callback):
    """Notes the last result of each step, and sets a rate in some."""

    def __init__(self, rates: dict[int, Any] | None = None) -> None:
        self.found: dict[int, StepResult] = {}
        self.rates = rates or {}

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.found[result.step] = result
        if result.step in self.rates:
            trainer.set_learning_rate(self.rates.pop(result.step))

    @property
    def seen(self) -> list[tuple[float, ...]]:
        return [result.learning_rate for _, result in sorted(self.found.items())]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def trainer_of(task: Task, strategy: Any, workers: int = 2) -> DistributedSGD:
    config: RunConfig = replace(run_config(), keep_log=True)
    return DistributedSGD(task.creator(), workers, strategy=strategy, run_config=config)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_results_have_the_rate_of_each_group(strategy: Any) -> None:
    noting = Noting()
    updates = 3 if isinstance(strategy, LocalStrategy) else 1
    with Simulation(1).running(), trainer_of(SCHEDULED, strategy) as trainer:
        assert trainer.step().learning_rate == (0.02, 0.01)
        trainer.fit(steps=5, callbacks=[noting], progress=False)
    expected = [(0.02 * 0.5**at, 0.01 * 0.5**at) for at in range(updates, 6 * updates, updates)]
    assert noting.seen == expected


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=str)
def test_a_rate_that_is_set_is_that_of_a_serial_run(strategy: Any) -> None:
    """A function of the step gives the same rates from the beginning."""
    by_step = [0.01] * 4 + [0.05] * 3 + [0.002] * 5
    known = replace(TASK, learning_rate=lambda step: by_step[step])
    noting = Noting()
    with Simulation(2).running(), trainer_of(TASK, strategy) as trainer:
        for steps, rate in ((4, 0.05), (3, 0.002), (5, None)):
            trainer.fit(steps=steps, callbacks=[noting], progress=False)
            trainer.set_learning_rate(rate)
        assert noting.seen == [(rate,) for rate in by_step]
        assert difference(trainer.weights(), known.train(2, 12)) < 1e-12
        assert trainer.step().learning_rate == (0.01,)
        assert same_bits(replay(trainer.log(), TASK.creator()), trainer.weights())


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_schedule_goes_on_behind_a_rate_that_is_set(strategy: Any) -> None:
    updates = 3 if isinstance(strategy, LocalStrategy) else 1
    with Simulation(3).running(), trainer_of(SCHEDULED, strategy) as trainer:
        trainer.fit(steps=2, progress=False)
        trainer.set_learning_rate([0.3, 0.4])
        assert trainer.fit(steps=2, progress=False).learning_rate == (0.3, 0.4)
        weights = trainer.weights()
        trainer.set_learning_rate(0.0)
        trainer.fit(steps=2, progress=False)
        if not isinstance(strategy, LocalStrategy):  # whose outer optimizer has momentum
            assert same_bits(trainer.weights(), weights)
        trainer.set_learning_rate(None)
        at = 6 * updates
        assert trainer.step().learning_rate == (0.02 * 0.5**at, 0.01 * 0.5**at)
        assert same_bits(replay(trainer.log(), SCHEDULED.creator()), trainer.weights())


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_callback_sets_it_while_workers_train(strategy: Any) -> None:
    noting = Noting({5: 0.001, 40: None})
    with Simulation(4).running(), trainer_of(TASK, strategy) as trainer:
        trainer.fit(steps=80, callbacks=[noting], progress=False)
        assert same_bits(replay(trainer.log(), TASK.creator()), trainer.weights())
    rates = [rate for (rate,) in noting.seen]
    first, last = rates.index(0.001), 80 - rates[::-1].index(0.001)
    assert 5 <= first < 20
    assert 40 <= last < 60
    assert set(rates[first:last]) == {0.001}
    assert set(rates[:first] + rates[last:]) == {0.01}


def run_in_thirds(strategy: Any, victim: str) -> tuple[Noting, int, dict[str, torch.Tensor]]:
    """Train with three rates; a process dies in the last third, and sets all back to the beginning."""
    simulation, noting = Simulation(5), Noting()
    config = run_config(failure=FailureConfig(snapshot_every=1000, patience=math.inf, spares=1))

    def kill() -> None:
        for process in simulation.living():
            if victim in str(process):
                simulation.world.kill(process, "it was killed. connection error code 2.")

    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, strategy=strategy, run_config=config) as trainer,
    ):
        for steps, rate in ((4, 0.05), (3, 0.002)):
            trainer.fit(steps=steps, callbacks=[noting], progress=False)
            trainer.set_learning_rate(rate)
        if victim:
            simulation.at_time(0.05, kill)
        trainer.fit(steps=30, callbacks=[noting], progress=False)
        return noting, len(trainer.stats().events), trainer.weights()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES[1:3], ids=str)
def test_steps_that_are_taken_again_have_the_rates_that_they_had(strategy: Any) -> None:
    undisturbed, none, expected = run_in_thirds(strategy, "")
    noting, some, found = run_in_thirds(strategy, "worker 1")
    assert (none, some) == (0, 1)
    assert noting.seen == undisturbed.seen == [(0.01,)] * 4 + [(0.05,)] * 3 + [(0.002,)] * 30
    assert same_bits(found, expected)


def test_it_is_kept_in_checkpoints_and_under_another_strategy(tmp_path: Path) -> None:
    task = replace(SCHEDULED, lr_scheduler=None)
    with Simulation(6).running(), trainer_of(task, "ps") as trainer:
        trainer.fit(steps=3, progress=False)
        trainer.save(tmp_path / "before")
        trainer.set_learning_rate([0.3, 0.4])
        trainer.set_strategy(LocalStrategy())
        assert trainer.step().learning_rate == (0.3, 0.4)
        trainer.set_strategy("allreduce")
        assert trainer.fit(steps=2, progress=False).learning_rate == (0.3, 0.4)
        trainer.save(tmp_path / "after")
    with Simulation(7).running(), trainer_of(task, "ps", 3) as trainer:
        trainer.restore(tmp_path / "after")
        assert trainer.step().learning_rate == (0.3, 0.4)
        trainer.restore(tmp_path / "before")
        assert trainer.step().learning_rate == (0.02, 0.01)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ([0.1], "1 learning rates for 2 parameter groups"),
        (-0.1, "at least 0"),
        (math.nan, "at least 0"),
        (True, "at least 0"),
        ("0.1", "learning rate '0.1': give a number of at least 0"),
        (b"fast", "learning rate b'fast': give a number"),
    ],
)
def test_what_is_no_rate_is_refused(rate: Any, said: str) -> None:
    with Simulation(8).running(), trainer_of(SCHEDULED, "ps") as trainer:
        with pytest.raises(ConfigurationError, match=said):
            trainer.set_learning_rate(rate)
        assert trainer.step().learning_rate == (0.02, 0.01)
        pause(1.0)


class Counted(list[Any]):
    """A list that counts how many of its elements are read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        type(self).read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        for each in super().__iter__():
            type(self).read += 1
            yield each


def test_a_rate_for_each_step_costs_the_same_at_any_step() -> None:
    with Simulation(9).running(), trainer_of(SCHEDULED, "ps") as trainer:
        rates = trainer._cluster.rates
        rates._changes = Counted((step, [0.1 / (1 + step)] * 2) for step in range(4096))
        rates.want(0.5)
        rates.put_in_force(4096)
        assert rates.at(4096) == (0.5, 0.5)
        assert rates.at(4095) == (0.1 / 4096,) * 2
        assert rates.since(4095) == [(4095, [0.1 / 4096] * 2), (4096, [0.5] * 2)]
        assert with_rates([{}, {}], rates._changes, 7) == [{"lr": 0.0125}] * 2
        assert Counted.read < 80  # bisections
        rates.want(None)
        rates.put_in_force(4090)  # a death has set the job back
        assert len(rates.changes) == 4091
        assert rates.since(4090) == rates.since(9999) == []
