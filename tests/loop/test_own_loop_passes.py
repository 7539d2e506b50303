"""Passes of a loop over its loader, and what stands before an epoch's first batch, also where a worker dies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import FailureConfig
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import Parts, Script
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import pause, run_config
from tests.strikes import kill_this_process


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def train(parts: Parts, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    parts.optimizer.zero_grad()
    loss = nn.functional.mse_loss(parts.model(x), y)
    loss.backward()
    pause(1e-3)
    parts.optimizer.step()
    return loss


def at_the_top(parts: Parts, epochs: int) -> None:
    """A schedule, a rate set by hand, a count and an evaluation, before each epoch's first batch."""
    kept = steepest.register(epochs=0, best=1e9)
    (scheduler,) = parts.schedulers
    for epoch in steepest.epochs(epochs):
        x, y = samples(6)
        with torch.no_grad():
            loss = nn.functional.mse_loss(parts.model(x), y)
        found = steepest.gather(loss).mean().item()
        if epoch:
            scheduler.step()
        if found < kept.best:
            kept.best = found
        elif epoch:
            parts.optimizer.param_groups[0]["momentum"] = 0.5
        if epoch == 1:
            parts.optimizer.param_groups[0]["weight_decay"] += 0.1
        kept.epochs += 1
        for x, y in parts.loader:
            train(parts, x, y)
        steepest.report(epochs=kept.epochs, found=found)


def twice(parts: Parts, epochs: int) -> None:
    """Two passes in an epoch, the second one with half the gradient."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            train(parts, x, y)
        for x, y in parts.loader:
            parts.optimizer.zero_grad()
            (nn.functional.mse_loss(parts.model(x), y) / 2).backward()
            pause(1e-3)
            parts.optimizer.step()


def looking_first(parts: Parts, epochs: int) -> None:
    """A look at one batch, and a pass in which nothing is trained, before the one that trains."""
    for _ in steepest.epochs(epochs):
        x, y = next(iter(parts.loader))
        assert len(x)
        with torch.no_grad():
            for x, _ in itertools.islice(parts.loader, 2):
                parts.model(x)
        for x, y in parts.loader:
            train(parts, x, y)


def left_early(parts: Parts, epochs: int) -> None:
    """Each pass is left before its last batch."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in zip(itertools.count(), parts.loader, strict=False):
            if number == 2:
                break
            train(parts, x, y)


def without_end(parts: Parts, epochs: int) -> None:
    """One iterator over all passes, as loops have that count steps."""
    batches = itertools.chain.from_iterable(itertools.repeat(parts.loader))
    for _ in steepest.epochs(epochs):
        for x, y in itertools.islice(batches, 2):
            train(parts, x, y)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


LOOPS = {
    "at the top": Script(
        at_the_top,
        optimizer=sgd(momentum=0.9, weight_decay=0.01),
        schedule=halving,
        data=samples(16),
    ),
    **{
        each.__name__: Script(each, optimizer=sgd(momentum=0.9), data=samples(14))
        for each in (twice, looking_first, left_early, without_end)
    },
}


@pytest.mark.few(6)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", LOOPS)
def test_passes_are_those_of_one_process(name: str, workers: int) -> None:
    script = LOOPS[name]
    assert difference(run(script, workers).weights, script.alone(workers)) < 1e-12


@pytest.mark.few(4)
@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "allreduce, two copies"])
@pytest.mark.parametrize("name", ["at the top", "twice", "looking_first"])
def test_a_death_changes_no_pass(name: str, strategy: str, victim: int, step: int) -> None:
    script = LOOPS[name]
    found = without(script, 2, victim, step, STRATEGIES[strategy])
    assert difference(found.weights, script.alone(2)) < 1e-12


DIED: list[int] = []  # workers, each of which dies once


def dies_here(victim: int) -> None:
    """End a worker's process behind the others, which have come further by then."""
    if steepest.rank() == victim and not DIED:
        pause(3.0)
        DIED.append(victim)
        kill_this_process()


def leaves(how: str, victim: int) -> Script:
    """A loop that leaves a pass, or its function, early; a worker dies behind that."""

    def loop(parts: Parts, epochs: int) -> None:
        kept = steepest.register(steps=0)
        for epoch in steepest.epochs(epochs):
            batches = itertools.islice(parts.loader, 2) if how == "islice" else parts.loader
            for number, (x, y) in enumerate(batches):
                if how == "break before" and number == 2:
                    break
                train(parts, x, y)
                kept.steps += 1
                if how == "break" and number == 1:
                    break
                if how == "return" and kept.steps == 6:
                    dies_here(victim)
                    return
            if epoch == 0 and how != "return":
                dies_here(victim)
            if epoch == 1 and how == "break in the last":
                break
        if epochs == 1 or how == "break in the last":
            dies_here(victim)

    return Script(loop, optimizer=sgd(momentum=0.9), data=samples(16), epochs=1 + (victim == 1))


@pytest.mark.few(3)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "allreduce, two copies"])
@pytest.mark.parametrize(
    "how", ["break", "break before", "islice", "return", "all", "break in the last"]
)
def test_a_death_behind_a_pass_that_was_left_changes_nothing(
    how: str, strategy: str, victim: int
) -> None:
    settings = run_config(failure=FailureConfig(patience=math.inf, snapshot_every=1))
    script = leaves(how, victim)
    alone = leaves(how, -1)
    expected = replace(alone, epochs=script.epochs).alone(2)
    DIED.clear()
    found = run(script, 2, STRATEGIES[strategy], run_config=settings)
    assert DIED or (how == "return" and victim == 0)
    assert difference(found.weights, expected) < 1e-12


def over_the_end(place: tuple[str, int], victim: int) -> Script:
    """A loop that steps in each third batch, over the ends of epochs; it gathers before an epoch's first batch."""

    def loop(parts: Parts, epochs: int) -> None:
        kept = steepest.register(batches=0)
        for epoch in steepest.epochs(epochs):
            if place == ("before", epoch):
                dies_here(victim)
            x, y = samples(6)
            with torch.no_grad():
                loss = nn.functional.mse_loss(parts.model(x), y)
            rate = steepest.gather(loss).mean().item()
            if place == ("after", epoch):
                dies_here(victim)
            parts.optimizer.param_groups[0]["lr"] = 0.01 * (1 + min(rate, 1.0))
            for x, y in parts.loader:
                (nn.functional.mse_loss(parts.model(x), y) / 3).backward()
                kept.batches += 1
                if kept.batches % 3 == 0:
                    parts.optimizer.step()
                    parts.optimizer.zero_grad()

    return Script(loop, optimizer=sgd(momentum=0.9), data=samples(13))


@pytest.mark.few(3)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "allreduce, two copies"])
@pytest.mark.parametrize("epoch", [1, 2])
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_sum_over_an_epochs_end_is_whole_where_a_worker_dies_as_others_gather(
    where: str, epoch: int, strategy: str, victim: int
) -> None:
    settings = run_config(failure=FailureConfig(patience=math.inf, snapshot_every=1))
    expected = over_the_end(("", -1), -1).alone(2)
    DIED.clear()
    script = over_the_end((where, epoch), victim)
    found = run(script, 2, STRATEGIES[strategy], run_config=settings)
    assert DIED
    assert difference(found.weights, expected) < 1e-12
