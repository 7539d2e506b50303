"""Schedules of users' own loops: of a script that was changed and goes on, and those made for one worker's loader."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import steepest
from steepest.errors import ConfigurationError, ModelRaisedError
from tests.own_loop_runs import InterruptedRunError, Interrupts, run, without
from tests.own_loops import Parts, Script, by_epoch, plain
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config

SAMPLES = 16  # 4 steps of 2 workers in an epoch


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def warmed(gamma: float) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda o: SequentialLR(o, [ConstantLR(o, 0.1, 3), ExponentialLR(o, gamma)], [3])


#: The schedule before, that of the script which goes on, and its loop.
CHANGED: dict[str, tuple[Any, Any, Any]] = {
    "a longer cycle": (
        lambda o: OneCycleLR(o, 0.1, total_steps=8),
        lambda o: OneCycleLR(o, 0.1, total_steps=16),
        plain,
    ),
    "another function": (
        lambda o: LambdaLR(o, lambda k: 1 / (1 + k)),
        lambda o: LambdaLR(o, lambda k: 0.5**k),
        plain,
    ),
    "another factor": (
        lambda o: ExponentialLR(o, 0.9),
        lambda o: ExponentialLR(o, 0.8),
        plain,
    ),
    "more epochs": (
        lambda o: CosineAnnealingLR(o, 2),
        lambda o: CosineAnnealingLR(o, 4),
        by_epoch,
    ),
    "another one after the first": (warmed(0.9), warmed(0.8), plain),
    "another kind": (lambda o: ExponentialLR(o, 0.9), lambda o: StepLR(o, 2), plain),
}


def gone_on(before: Script, after: Script, folder: Path, step: int = 5) -> tuple[Any, str]:
    """Interrupt a script, go on with another; return what comes of it, and what is said of the settings."""
    checkpoints = steepest.Checkpoints(folder / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(before, 2, checkpoints=checkpoints, callbacks=[Interrupts(step)])
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steepest.loop.run.log.warning", lambda text, *a: said.append(text % a))
        found = run(after, 2, checkpoints=checkpoints)
    return found, " ".join(said)


def rates(rows: list[Any], step: int) -> list[float]:
    return [row["learning_rate"][0] for row in rows if row["step"] > step]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CHANGED)
def test_a_schedule_of_a_script_that_was_changed_is_as_if_it_had_been_that_from_the_beginning(
    name: str, tmp_path: Path
) -> None:
    first, second, loop = CHANGED[name]
    before = Script(loop, schedule=first, data=samples(SAMPLES), epochs=2)
    after = replace(before, schedule=second, epochs=4)
    found, said = gone_on(before, after, tmp_path)
    assert rates(found.steps, 5) == rates(run(after, 2).steps, 5)
    assert said.startswith("going on with the script's own settings: ")
    assert "4 epochs, not 2" in said


def test_settings_without_a_schedule_are_those_of_the_script_unless_the_loop_has_set_them(
    tmp_path: Path,
) -> None:
    before = Script(plain, optimizer=sgd(lr=0.1), data=samples(SAMPLES), epochs=3)
    after = replace(before, optimizer=sgd(lr=0.2))
    found, said = gone_on(before, after, tmp_path)
    assert rates(found.steps, 5) == [0.2] * 7
    assert said.endswith("settings: lr=0.2, not 0.1")
    same, said = gone_on(before, before, tmp_path / "same")
    assert not said
    assert rates(same.steps, 5) == [0.1] * 7


def test_a_schedule_that_is_over_by_then_and_one_more_are_refused_by_name(tmp_path: Path) -> None:
    before = Script(
        plain, schedule=lambda o: OneCycleLR(o, 0.1, total_steps=8), data=samples(SAMPLES), epochs=2
    )
    short = replace(before, schedule=lambda o: OneCycleLR(o, 0.1, total_steps=4))
    with pytest.raises(
        ConfigurationError, match="OneCycleLR is over by the step of the checkpoint"
    ):
        gone_on(before, short, tmp_path / "short")
    with pytest.raises(ConfigurationError, match="given no scheduler, .* a run with OneCycleLR"):
        gone_on(before, replace(before, schedule=None), tmp_path / "none")


def linear(k: int, total: int) -> float:
    return max(0.0, 1 - k / total)


#: Schedules for so many steps.
LENGTHS: dict[str, Callable[[torch.optim.Optimizer, int], Any]] = {
    "total_steps": lambda o, total: OneCycleLR(o, 0.1, total_steps=total),
    "T_max": lambda o, total: CosineAnnealingLR(o, total),
    "total_iters": lambda o, total: lr_scheduler.PolynomialLR(o, total),
    "total": lambda o, total: LambdaLR(o, partial(linear, total=total)),
    "milestones and then T_max": lambda o, total: SequentialLR(
        o, [ConstantLR(o, 0.1, 3), CosineAnnealingLR(o, total - 3)], [3]
    ),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LENGTHS)
def test_a_schedule_made_by_len_of_one_workers_loader_is_told(name: str) -> None:
    """8 batches of one worker in an epoch, 4 steps of two."""

    def trained(total: int, workers: int = 2) -> None:
        made = partial(LENGTHS[name], total=total)
        script = Script(plain, schedule=made, data=samples(SAMPLES), epochs=2)
        with Simulation(seed=1).running():
            steepest.run(script, num_workers=workers, progress=False, run_config=run_config())

    with pytest.raises(
        (ConfigurationError, ModelRaisedError), match=f"was made for {name}=16"
    ) as raised:
        trained(16)
    assert "make it for 8" in str(raised.value)
    trained(2 * math.ceil(SAMPLES / 4))
    trained(16, workers=1)


def test_what_metrics_have_made_of_the_rate_stays(tmp_path: Path) -> None:
    def loop(parts: Any, epochs: int) -> None:
        (scheduler,) = parts.schedulers
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                torch.nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
            scheduler.step(1.0)  # no better than before

    before = Script(
        loop,
        optimizer=sgd(lr=0.1),
        schedule=lambda o: ReduceLROnPlateau(o, patience=0),
        data=samples(SAMPLES),
        epochs=3,
    )
    after = replace(before, optimizer=sgd(lr=0.2))
    found, said = gone_on(before, after, tmp_path, step=9)
    assert rates(found.steps, 9) == [pytest.approx(0.01)] * 3
    assert "lr stays 0.01" in said
    assert said.endswith("as the loop or metrics have set it")


def behind_prepare(parts: Parts, epochs: int) -> None:
    """A schedule for all steps, which is made behind `prepare`, and is registered."""
    total = epochs * len(parts.loader)
    schedule = OneCycleLR(parts.optimizer, 0.3, total)
    steepest.register(schedule=schedule)
    parts.schedulers = (schedule,)
    plain(parts, epochs)


def of_nobody(parts: Parts, epochs: int) -> None:
    """The same, of which steepest is not told."""
    ExponentialLR(parts.optimizer, 0.9)
    plain(parts, epochs)


def test_a_schedule_that_is_made_behind_prepare_is_registered(tmp_path: Path) -> None:
    script = Script(behind_prepare, optimizer=sgd(momentum=0.9), epochs=2)
    right, checkpoints = script.alone(3), steepest.Checkpoints(tmp_path / "run", every=1)
    assert difference(without(script, 3, 1, 2).weights, right) < 1e-12
    with pytest.raises(InterruptedRunError):
        run(script, 3, checkpoints=checkpoints, callbacks=[Interrupts(2)])
    assert difference(run(script, 3, checkpoints=checkpoints).weights, right) < 1e-12


def test_a_schedule_of_which_steepest_is_not_told_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="a scheduler of this SGD, which has set initial_lr"):
        run(Script(of_nobody, epochs=1), 2)
