"""Validation during `fit`: each evaluation once, in order, whatever happens; and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from steepest import (
    AllreduceStrategy,
    Callback,
    Checkpoints,
    DistributedSGD,
    EarlyStopping,
    EvaluationResult,
    FailureConfig,
    LocalStrategy,
    ParameterServerStrategy,
    ReduceOnPlateau,
    StepResult,
)
from steepest.errors import ConfigurationError
from steepest.observe.evaluations import best_of
from tests.logged_runs import Memory
from tests.reference import samples
from tests.simulated_programs import TASK, linear, quiet
from tests.simulation.run import Simulation, run_config

STRATEGIES: list[Any] = [
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
    AllreduceStrategy(chunk_bytes=32),
    LocalStrategy(chunk_bytes=32),
    ParameterServerStrategy(mode="async", num_servers=2),
]
HELD_OUT = samples(17)
STRIKES: list[Callable[[], object]] = []  # what happens when a worker reads `Fragile` samples


class Noting(Callback):
    """Notes what it hears, in order."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.results: list[EvaluationResult] = []

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.heard.append(result.step)

    def on_evaluation(self, trainer: DistributedSGD, result: EvaluationResult) -> None:
        assert trainer.evaluations[-1] is result
        self.heard.append(("evaluation", result.step))
        self.results.append(result)

    def on_epoch_end(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.heard.append(("epoch", result.step))


class Fragile(Dataset[Any]):
    """The samples of `HELD_OUT`; somebody may die while they are evaluated."""

    def __len__(self) -> int:
        return len(HELD_OUT[0])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if STRIKES:
            STRIKES.pop()()
        return HELD_OUT[0][index], HELD_OUT[1][index]


class Trainer:
    """Stands for a trainer whose evaluations are given."""

    def __init__(self, began: int = 0) -> None:
        self.evaluations: list[EvaluationResult] = []
        self.fit_began = began
        self.learning_rate: tuple[float, ...] = (0.5, 0.25)
        self.stopped = 0

    def stop(self) -> None:
        self.stopped += 1

    def set_learning_rate(self, rates: list[float]) -> None:
        self.learning_rate = tuple(rates)

    def take(self, callback: Callback, *values: float) -> list[Any]:
        """What holds after each evaluation."""
        found = []
        for value in values:
            step = len(self.evaluations) + 1
            self.evaluations.append(EvaluationResult(value, {"accuracy": -value}, 1, step))
            callback.on_evaluation(self, self.evaluations[-1])
            found.append((self.stopped, *self.learning_rate))
        return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


def trainer_of(strategy: Any, workers: int = 2) -> DistributedSGD:
    return DistributedSGD(TASK.creator(), workers, strategy=strategy, run_config=run_config())


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_so_many_steps_and_what_it_says(strategy: Any) -> None:
    noting = Noting()
    with Simulation(1).running(), trainer_of(strategy) as trainer:
        trainer.fit(
            steps=10, callbacks=[noting], progress=False, validation=HELD_OUT, evaluate_every=5
        )
        module = linear()
        module.load_state_dict(trainer.state_dict())
        marks = [at for at in noting.heard if not isinstance(at, int) and at[0] == "evaluation"]
        assert marks == [("evaluation", 5), ("evaluation", 10)]
        assert noting.heard[noting.heard.index(("evaluation", 5)) - 1] == 5
        last = trainer.evaluations[-1]
        assert trainer.evaluations == tuple(noting.results)
    with torch.no_grad():
        expected = torch.nn.functional.mse_loss(module(HELD_OUT[0]), HELD_OUT[1]).item()
    assert last.loss == pytest.approx(expected, rel=1e-12)
    assert (last.samples, last.step) == (17, 10)


def test_at_the_end_of_each_epoch() -> None:
    noting = Noting()
    with Simulation(2).running(), trainer_of("ps") as trainer:  # 61 samples, two in a step
        trainer.fit(epochs=2, callbacks=[noting], progress=False, validation=HELD_OUT)
    marks = [at for at in noting.heard if not isinstance(at, int)]
    assert marks == [("evaluation", 31), ("epoch", 31), ("evaluation", 62), ("epoch", 62)]
    assert [result.epoch for result in noting.results] == [0, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES[1:3], ids=str)
def test_a_death_that_sets_training_back_doubles_no_evaluation(strategy: Any) -> None:
    simulation, noting = Simulation(3), Noting()

    class Killing(Callback):
        def on_evaluation(self, trainer: DistributedSGD, result: EvaluationResult) -> None:
            if result.step == 12:
                (victim,) = (p for p in simulation.living() if "worker 1" in str(p))
                simulation.world.kill(victim, "it was killed. connection error code 2.")

    with simulation.running(), trainer_of(strategy, 3) as trainer:
        trainer.fit(
            steps=20,
            callbacks=[noting, Killing()],
            progress=False,
            validation=HELD_OUT,
            evaluate_every=3,
        )
        assert trainer.stats().events
        assert [result.step for result in trainer.evaluations] == [3, 6, 9, 12, 15, 18]
        assert trainer.evaluations == tuple(noting.results)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES[1:3], ids=str)
@pytest.mark.parametrize("moment", ["during", "after"])
def test_history_and_loggers_have_each_evaluation_once(strategy: Any, moment: str) -> None:
    simulation, noting, logger = Simulation(3), Noting(), Memory()

    def kill() -> None:
        (victim,) = (p for p in simulation.living() if "worker 1" in str(p))
        simulation.world.kill(victim, "it was killed. connection error code 2.")

    class Killing(Callback):
        def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
            if result.step == 12 and moment == "during" and not trainer.history.events:
                STRIKES.append(kill)
            if result.step == 13 and moment == "after" and not trainer.history.events:
                kill()

    config = run_config(failure=FailureConfig(snapshot_every=10_000))  # of step 0 only
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 3, strategy=strategy, run_config=config) as trainer,
    ):
        trainer.fit(
            steps=20,
            callbacks=[noting, Killing(), logger],
            progress=False,
            validation=Fragile(),
            evaluate_every=3,
        )
        lines = [event.line for event in trainer.stats().events]
        assert any("updates since the last copy are lost" in line for line in lines)
        assert [result.step for result in trainer.evaluations] == [3, 6, 9, 12, 15, 18]
        assert tuple(noting.results) == trainer.evaluations
        rows = [row for row in trainer.history if row["kind"] in ("step", "evaluation")]
        assert [row["step"] for row in trainer.history.steps] == list(range(1, 21))
        places = [(row["step"], row["kind"] == "evaluation") for row in rows]
        assert places == sorted(places)
    told = [(row["step"], row["loss"]) for row in rows if row["kind"] == "evaluation"]
    assert told == [(result.step, result.loss) for result in noting.results]
    logged = [point for point in logger.points if point.kind == "evaluation"]
    assert [(point.step, point.values["evaluation/loss"]) for point in logged] == told


def test_evaluations_after_a_restore_are_in_the_history_and_logged_once(tmp_path: Path) -> None:
    logger = Memory()
    with Simulation(4).running(), trainer_of("ps") as trainer:
        for steps, saves in ((5, True), (5, False), (10, False)):
            trainer.fit(
                steps=steps,
                callbacks=[logger],
                progress=False,
                validation=HELD_OUT,
                evaluate_every=2,
            )
            if saves:
                trainer.save(tmp_path / "five")
            elif trainer.stats().step == 10:
                trainer.restore(tmp_path / "five")
                assert [row["step"] for row in trainer.history] == [1, 2, 2, 3, 4, 4, 5]
        trainer.evaluate(HELD_OUT)
        assert [row["step"] for row in trainer.history.evaluations] == [2, 4, 6, 8, 10, 12, 14, 15]
        trainer.evaluate(HELD_OUT)  # it says nothing new
        trainer.evaluate(samples(3))
        assert [row["samples"] for row in trainer.history.evaluations[-2:]] == [17, 3]
    logged = [point.step for point in logger.points if point.kind == "evaluation"]
    assert logged == [2, 4, 6, 8, 10, 12, 14, 15, 15]
    assert logger.steps == list(range(1, 16))


def test_evaluations_belong_to_the_state(tmp_path: Path) -> None:
    with Simulation(4).running(), trainer_of("ps") as trainer:
        trainer.fit(steps=6, progress=False, validation=HELD_OUT, evaluate_every=3)
        trainer.save(tmp_path / "six")
        before = trainer.evaluations
        trainer.fit(steps=6, progress=False, validation=HELD_OUT, evaluate_every=3)
        assert [result.step for result in trainer.evaluations] == [3, 6, 9, 12]
        trainer.restore(tmp_path / "six")
        assert trainer.evaluations == before
    with Simulation(5).running(), trainer_of("ps") as trainer:
        trainer.restore(tmp_path / "six")
        trainer.fit(steps=3, progress=False, validation=HELD_OUT, evaluate_every=3)
        assert [result.step for result in trainer.evaluations] == [3, 6, 9]
        assert trainer.evaluations[:2] == before


def test_training_stops_when_evaluations_get_no_better() -> None:
    class Standstill(Callback):
        def on_evaluation(self, trainer: DistributedSGD, result: EvaluationResult) -> None:
            trainer.set_learning_rate(0.0)

    with Simulation(6).running(), trainer_of("ps") as trainer:
        last = trainer.fit(
            steps=1000,
            callbacks=[Standstill(), EarlyStopping(patience=2)],
            progress=False,
            validation=HELD_OUT,
            evaluate_every=3,
        )
        assert last.step == 9
        assert trainer.fit(steps=1, progress=False).step == 10


def test_early_stopping_waits() -> None:
    trainer = Trainer()
    found = trainer.take(
        EarlyStopping(patience=2, min_delta=0.1), 5.0, 4.0, 3.95, 3.8, 3.75, math.nan
    )
    assert [stopped for stopped, *_ in found] == [0, 0, 0, 0, 0, 1]
    again = EarlyStopping(patience=2, min_delta=0.1)
    again.on_fit_begin(trainer, 100)  # the same program, started again
    assert trainer.stopped == 2
    trainer.fit_began = 5  # the next fit
    EarlyStopping(patience=2).on_fit_begin(trainer, 100)
    assert trainer.stopped == 2
    upwards = Trainer()
    found = upwards.take(EarlyStopping("accuracy", "max", patience=1), 5.0, 4.0, 4.0)
    assert [stopped for stopped, *_ in found] == [0, 0, 1]


def test_a_plateau_reduces_the_rate_as_torch_does() -> None:
    values = [5.0, 4.0, 4.0, 4.5, 4.0, 3.0, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5, 2.0, 2.5, 2.5, 2.5]
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.5, 0.25)]
    )
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=2, threshold=0.0, threshold_mode="abs", min_lr=0.04, eps=0.0
    )
    expected = []
    for value in values:
        scheduler.step(value)
        expected.append((0, *(group["lr"] for group in optimizer.param_groups)))
    assert len(set(expected)) > 3
    assert (
        Trainer().take(ReduceOnPlateau(factor=0.5, patience=2, min_rate=0.04), *values) == expected
    )


def test_the_best() -> None:
    values = [3.0, math.nan, 1.0, 2.0, 1.0]
    results = [EvaluationResult(v, {"accuracy": v}, 1, at) for at, v in enumerate(values)]
    assert best_of([], "loss", "min") is None
    assert best_of(results, "loss", "min") is results[2]
    assert best_of(results, "accuracy", "max") is results[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: EarlyStopping(patience=0), "patience=0"),
        (lambda: EarlyStopping(mode="more"), "mode='more'"),
        (lambda: EarlyStopping(min_delta=-1.0), "min_delta"),
        (lambda: EarlyStopping(3), "metric=3"),  # type: ignore[arg-type]
        (lambda: ReduceOnPlateau(factor=1.0), "factor=1.0"),
        (lambda: Checkpoints("here", best="loss", mode="most"), "mode='most'"),
        (lambda: Checkpoints("here", best=3), "best"),  # type: ignore[arg-type]
    ],
)
def test_settings_are_checked(make: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


def test_arguments_are_checked() -> None:
    with Simulation(7).running(), trainer_of("ps") as trainer:
        with pytest.raises(ConfigurationError, match="fetch_stats=2: give one of False, True"):
            trainer.step(2)  # type: ignore[arg-type]
        for wrong, said in (
            ({"evaluate_every": 3}, "without validation="),
            ({"evaluate_every": 0, "validation": HELD_OUT}, "evaluate_every=0"),
        ):
            with pytest.raises(ConfigurationError, match=said):
                trainer.fit(steps=3, progress=False, **wrong)  # type: ignore[arg-type]
        for callback in (EarlyStopping(), ReduceOnPlateau()):
            with pytest.raises(
                ConfigurationError, match=rf"{type(callback).__name__}\(.*validation=data"
            ):
                trainer.fit(epochs=3, callbacks=[Noting(), callback], progress=False)
        assert trainer.stats().step == 0
        with pytest.raises(ConfigurationError, match="no 'accuracy': give one of loss"):
            trainer.fit(
                steps=3,
                callbacks=[EarlyStopping("accuracy")],
                progress=False,
                validation=HELD_OUT,
                evaluate_every=1,
            )
