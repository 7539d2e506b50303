"""Callbacks of `fit`: whose begin returned is told of the end, whatever others raise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch

from steepest import Callback, DistributedSGD, StepResult
from steepest.errors import ConfigurationError
from tests.reference import Weights, difference
from tests.simulated_programs import TASK, quiet
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


class Telling(Callback):
    """Notes what is called, by a name, and raises in one method."""

    def __init__(self, heard: list[str], name: str, raises: str = "") -> None:
        self.heard, self.name, self.raises = heard, name, raises

    def note(self, what: str) -> None:
        self.heard.append(f"{self.name} {what}")
        if what == self.raises:
            raise KeyError(f"{self.name} {what}")

    def on_fit_begin(self, trainer: DistributedSGD, steps: int) -> None:
        self.note("begin")

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.note("step")

    def on_fit_end(self, trainer: DistributedSGD) -> None:
        self.note("end")


@pytest.mark.parametrize(
    ("raising", "error", "calls"),
    [
        ("begin", "b begin", ["a begin", "b begin", "a end"]),
        ("step", "b step", [*(f"{n} begin" for n in "abc"), "a step", "b step", *(f"{n} end" for n in "abc")]),
        ("end", "b end", [*(f"{n} {w}" for w in ("begin", "step", "end") for n in "abc")]),
    ],
)  # fmt: skip
def test_who_has_begun_is_told_of_the_end(raising: str, error: str, calls: list[str]) -> None:
    heard: list[str] = []
    callbacks = [Telling(heard, "a"), Telling(heard, "b", raising), Telling(heard, "c")]
    with (
        Simulation(1).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        with pytest.raises(KeyError, match=error):
            trainer.fit(steps=1, callbacks=callbacks, progress=False)
        assert heard == calls
        step = trainer.stats().step
        assert trainer.fit(steps=2, progress=False).step == step + 2


class Averaging(Callback):
    """Keeps an exponential moving average of the weights, one update for each step."""

    def __init__(self) -> None:
        self.average: Weights = {}
        self.steps: list[int] = []

    def after_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        now = trainer.weights()
        self.steps.append(result.step)
        assert trainer.stats().step == result.step
        if not self.average:
            self.average = {name: torch.zeros_like(value) for name, value in now.items()}
        for name, value in now.items():
            self.average[name].mul_(0.8).add_(value, alpha=0.2)


def serial_average(steps: int) -> Weights:
    """The same of as many steps in one process."""
    begin, *after = TASK.trace(2, steps)
    average = {name: torch.zeros_like(value) for name, value in begin.items()}
    for weights in after:
        for name, value in weights.items():
            average[name].mul_(0.8).add_(value, alpha=0.2)
    return average


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_the_weights_after_each_step_are_those_of_the_step(strategy: str) -> None:
    averaging, evaluated = Averaging(), EvaluatedBetween()
    with (
        Simulation(2).running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=6, callbacks=[averaging, evaluated], progress=False)
        assert averaging.steps == list(range(1, 7))
        assert difference(averaging.average, serial_average(6)) < 1e-12
        assert evaluated.steps == averaging.steps
        trainer.fit(steps=3, callbacks=[StopsAt(7), averaging], progress=False)
        assert averaging.steps[-1] == trainer.stats().step
        assert difference(averaging.average, serial_average(averaging.steps[-1])) < 1e-12


class EvaluatedBetween(Callback):
    """Evaluates after each step."""

    def __init__(self) -> None:
        self.steps: list[int | None] = []

    def after_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        self.steps.append(trainer.evaluate(TASK.data).step)


class StopsAt(Callback):
    """Ends `fit` in `on_step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == self.step:
            trainer.stop()


class Calling(Callback):
    """Calls each method of the trainer in `on_step`."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}

    def on_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        pause(1.0)
        trainer.weights()
        trainer.set_learning_rate(0.01)
        trainer.resize(num_workers=2)
        assert trainer.stats().step >= result.step
        calls: dict[str, Callable[[], object]] = {
            "step": trainer.step, "fit": lambda: trainer.fit(steps=1), "evaluate": lambda: trainer.evaluate(TASK.data),
            "save": lambda: trainer.save("nowhere"), "restore": lambda: trainer.restore("nowhere"),
            "state_dict": trainer.state_dict, "load_state_dict": lambda: trainer.load_state_dict({}),
            "set_weights": lambda: trainer.set_weights({}), "warmup": trainer.warmup,
            "set_strategy": lambda: trainer.set_strategy("allreduce"),
            "foreach_worker": lambda: trainer.foreach_worker(id), "for_model": lambda: trainer.for_model(id),
            "foreach_model": lambda: trainer.foreach_model(id),
        }  # fmt: skip
        for name, call in calls.items():
            with pytest.raises(ConfigurationError) as caught:
                call()
            self.refused[name] = str(caught.value)


def test_what_may_not_be_called_while_workers_train_is_refused_by_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calling = Calling()
    caplog.set_level(logging.WARNING, "steepest")
    with (
        Simulation(3).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        trainer.fit(steps=8, callbacks=[calling], progress=False)
    assert len(calling.refused) == 13
    for name, said in calling.refused.items():
        assert said.startswith(f"{name}() was called by a callback while workers train")
        assert f"call {name}() in after_step" in said
    (told,) = (line for line in caplog.messages if line.startswith("weights() in on_step"))
    assert "in a callback's after_step they are those of its step" in told


class TrainsBetween(Callback):
    """Trains a little more after the first step, by a `fit` of its own; stops after the next."""

    def after_step(self, trainer: DistributedSGD, result: StepResult) -> None:
        if result.step == 1:
            assert trainer.fit(steps=2, progress=False).step == 3
        else:
            trainer.stop()


def test_fit_can_be_stopped_after_another_one_in_a_callback() -> None:
    with (
        Simulation(4).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as trainer,
    ):
        assert trainer.fit(steps=9, callbacks=[TrainsBetween()], progress=False).step == 4
