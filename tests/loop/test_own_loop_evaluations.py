"""Evaluations that a loop asks for, in a process of their own: each comes once, of the weights at its call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest.errors import ConfigurationError, ModelRaisedError, PeerLostError
from steepest.runtime.job_runtime import runtime
from tests.own_loop_runs import Found, run, without
from tests.own_loops import Parts, Script
from tests.reference import samples
from tests.simulated_programs import quiet
from tests.simulation.run import pause
from tests.strikes import kill_this_process

HELD_OUT = samples(17)
STEPS = {1: 12, 2: 6, 3: 4}  # of an epoch, by the number of workers
STRIKES: list[Callable[[], object]] = []  # what happens in evaluations
EVALUATORS: set[int] = set()  # processes
WORKERS: set[int] = set()


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    for each in (STRIKES, EVALUATORS, WORKERS):
        each.clear()
    with quiet():
        yield


def held_out(model: nn.Module, epoch: int) -> dict[str, Any]:
    EVALUATORS.add(runtime().pid)
    drawn = torch.rand(()).item()  # before others of this process have their turns
    pause(0.7)  # longer than an epoch
    if STRIKES:
        STRIKES.pop(0)()
    loss = nn.functional.mse_loss(model(HELD_OUT[0]), HELD_OUT[1])
    for parameter in model.parameters():
        parameter.zero_()  # it is a copy
    return {"loss": loss, "epoch": epoch, "drawn": drawn}


def evaluating(parts: Parts, epochs: int) -> None:
    """Evaluates amid an epoch, and at its end."""
    for epoch in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader):
            WORKERS.add(runtime().pid)
            pause(0.01)
            parts.optimizer.zero_grad()
            nn.functional.mse_loss(parts.model(x), y).backward()
            parts.optimizer.step()
            if number == 1:
                FOUND.append(steepest.evaluate(held_out, parts.model, epoch))
        FOUND.append(steepest.evaluate(held_out, parts.model, epoch))


FOUND: list[dict[str, float] | None] = []
SCRIPT = Script(evaluating, data=samples(24))


def rows(found: Found) -> list[tuple[int, int, dict[str, float]]]:
    return [
        (each["step"], each["epoch"], {"loss": each["loss"], **each["metrics"]})
        for each in found.evaluations
    ]


def expected(workers: int) -> list[tuple[int, int, Any]]:
    """What one process finds that has all batches."""
    FOUND.clear()
    SCRIPT.alone(workers)
    steps = [
        (epoch, epoch * STEPS[workers] + at) for epoch in range(3) for at in (2, STEPS[workers])
    ]
    return [
        (step, epoch, pytest.approx(values, rel=1e-12))
        for (epoch, step), values in zip(steps, FOUND, strict=True)
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_results_are_those_of_one_process_that_evaluates_in_its_loop(
    workers: int, strategy: str
) -> None:
    assert rows(run(SCRIPT, workers, strategy)) == expected(workers)
    assert len(EVALUATORS - WORKERS) == 1


def test_a_copy_is_evaluated_again_if_the_process_dies() -> None:
    whole = expected(2)
    STRIKES[:] = [int, kill_this_process, int, kill_this_process]
    found = run(SCRIPT, 2)
    assert rows(found) == whole
    STRIKES[:] = [kill_this_process] * 20
    with pytest.raises(PeerLostError, match=r"after step 2 died .* in the loop, has the workers"):
        run(SCRIPT, 2)


def test_what_the_function_raises_is_shown_as_the_users() -> None:
    STRIKES[:] = [lambda: 1 / 0]
    with pytest.raises(ModelRaisedError, match="ZeroDivisionError") as raised:
        run(SCRIPT, 2)
    assert "held_out" in str(raised.value.__cause__)
    assert Path(__file__).name in str(raised.value.__cause__)


@pytest.mark.few(2)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", [3, 9])
def test_a_death_of_a_worker_leaves_what_is_evaluated_alone(victim: int, step: int) -> None:
    found, whole = rows(without(SCRIPT, 2, victim, step)), expected(2)
    known = {step for step, *_ in found}
    assert found == [each for each in whole if each[0] in known]
    assert len(whole) - len(found) <= (
        victim == 0
    )  # a copy that the driver does not have yet dies with it


def test_a_program_that_goes_on_asks_for_what_lies_behind_its_checkpoint(tmp_path: Path) -> None:
    whole, kept = expected(2), steepest.Checkpoints(tmp_path, every=4)
    assert rows(run(SCRIPT, 2, checkpoints=kept)) == whole
    longer = replace(SCRIPT, epochs=5)
    again = rows(run(longer, 2, checkpoints=kept))
    assert again[:6] == whole
    assert [each[0] for each in again] == [2, 6, 8, 12, 14, 18, 20, 24, 26, 30]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda parts: 0.5, r"returned .*: return numbers by name"),
        (lambda parts, more: {}, "missing a required argument"),
        (0.5, "give a function"),
    ],
)
def test_what_cannot_be_evaluated_is_an_error(function: Any, words: str) -> None:
    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()
            steepest.evaluate(function, parts.model)

    for alone in (False, True):
        script = replace(SCRIPT, loop=loop)
        with pytest.raises((ConfigurationError, ModelRaisedError), match=words):
            script.alone(1) if alone else run(script, 1)


def test_what_cannot_be_copied_is_an_error_that_names_it() -> None:
    def loop(parts: Parts, epochs: int) -> None:
        lock = threading.Lock()
        for _ in steepest.epochs(epochs):
            steepest.evaluate(lambda: {"locked": lock.locked()})

    with pytest.raises(ConfigurationError, match="cannot copy what .* evaluates.*'lock'"):
        run(replace(SCRIPT, loop=loop), 1)


def test_it_is_called_in_the_loop() -> None:
    def loop(parts: Parts, epochs: int) -> None:
        steepest.evaluate(dict)

    with pytest.raises(ConfigurationError, match="call it in the loop"):
        run(replace(SCRIPT, loop=loop), 1)
