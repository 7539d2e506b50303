"""Loops of the kinds that people write: what one process gives, with a death, and with a resume, behind each step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import Parts, Script, several_steps
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import pause

WORKERS, SAMPLES = 3, 13  # batches of 6, 6 and 1: two workers have nothing of the last one


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def learn(parts: Parts, x: Any, y: Any, part: float = 1.0) -> None:
    (nn.functional.mse_loss(parts.model(x), y) * part).backward()
    pause(1e-3)


def step(parts: Parts, x: Any, y: Any) -> None:
    parts.optimizer.zero_grad()
    learn(parts, x, y)
    parts.optimizer.step()


def warming_up(parts: Parts, epochs: int) -> None:
    """A language model's: rates by hand from a count, two batches a step, clipped."""
    kept = steepest.register(steps=0)
    for _ in steepest.epochs(epochs):
        for number, batch in enumerate(parts.loader, 1):
            for group in parts.optimizer.param_groups:
                group["lr"] = 0.1 * min(1, (kept.steps + 1) / 4)
            learn(parts, *batch, 0.5)
            if number % 2 == 0 or number == len(parts.loader):
                steepest.clip_grad_norm_(parts.model.parameters(), 0.5)
                parts.optimizer.step()
                parts.optimizer.zero_grad()
                kept.steps += 1


def over_epochs(parts: Parts, epochs: int) -> None:
    """Two batches a step, also over an epoch's end."""
    kept = steepest.register(batches=0)
    for _ in steepest.epochs(epochs):
        for batch in parts.loader:
            learn(parts, *batch, 0.5)
            kept.batches += 1
            if kept.batches % 2 == 0:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def whole_epochs(parts: Parts, epochs: int) -> None:
    """One step behind each epoch."""
    for _ in steepest.epochs(epochs):
        for batch in parts.loader:
            learn(parts, *batch)
        parts.optimizer.step()
        parts.optimizer.zero_grad()


def passes(parts: Parts, epochs: int) -> None:
    """A pass that looks at the data, and two that train."""
    for _ in steepest.epochs(epochs):
        for _ in parts.loader:
            pass
        for _ in range(2):
            for batch in parts.loader:
                step(parts, *batch)


def by_hand(parts: Parts, epochs: int) -> None:
    """Rates that fall at an epoch, a batch that is left out."""
    for epoch in steepest.epochs(epochs):
        if epoch == 1:
            for group in parts.optimizer.param_groups:
                group["lr"] *= 0.1
        for number, batch in enumerate(iter(parts.loader)):
            if number != 1:
                step(parts, *batch)


def left_early(parts: Parts, epochs: int) -> None:
    """Two batches of each epoch."""
    for _ in steepest.epochs(epochs):
        for number, batch in enumerate(parts.loader):
            if number == 2:
                break
            step(parts, *batch)


def with_a_teacher(parts: Parts, epochs: int) -> None:
    """A mean of the weights is a part of the loss."""
    teacher = copy.deepcopy(parts.model)
    steepest.register(teacher=teacher)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            with torch.no_grad():
                wanted = teacher(x)
            step(parts, x, (y + wanted) / 2)
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), parts.model.parameters(), strict=True):
                    old.mul_(0.8).add_(new, alpha=0.2)


def by_all_outputs(parts: Parts, epochs: int) -> None:
    """The loss is of all workers' outputs; a batch is left out by what all have found."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            outputs, wanted = steepest.gather(parts.model(x)), steepest.gather(y)
            loss = (outputs - wanted).square().mean() + outputs.mean(dim=0).square().sum()
            if float(loss.detach()) > 4:
                continue
            parts.optimizer.zero_grad()
            loss.backward()
            pause(1e-3)
            parts.optimizer.step()


def unfreezing(parts: Parts, epochs: int) -> None:
    """The first layer is trained from the second epoch on."""
    for epoch in steepest.epochs(epochs):
        parts.model[0].weight.requires_grad_(epoch > 0)  # type: ignore[index, union-attr]
        for batch in parts.loader:
            step(parts, *batch)


def without_the_first(parts: Parts, epochs: int) -> None:
    """The first batch of an epoch, of as many samples as the next one, is left out."""
    for _ in steepest.epochs(epochs):
        for number, batch in enumerate(parts.loader):
            if number:
                step(parts, *batch)


def with_a_mean(parts: Parts, epochs: int) -> None:
    """Several steps for a batch, behind each of which a mean of the weights follows, which is a part of the loss."""
    mean = copy.deepcopy(parts.model)
    steepest.register(mean=mean)
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader, 1):
            for _ in range(number):
                with torch.no_grad():
                    wanted = mean(x)
                step(parts, x, (y + wanted) / 2)
                with torch.no_grad():
                    for old, new in zip(mean.parameters(), parts.model.parameters(), strict=True):
                        old.mul_(0.8).add_(new, alpha=0.2)


def by_a_schedule(parts: Parts, epochs: int) -> None:
    """A schedule that is registered, and is stepped for each of two batches whose gradients are added up."""
    schedule = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, lambda at: 1 / (1 + at))
    steepest.register(schedule=schedule)
    for _ in steepest.epochs(epochs):
        for number, batch in enumerate(parts.loader, 1):
            learn(parts, *batch, 0.5)
            if number % 2 == 0 or number == len(parts.loader):
                parts.optimizer.step()
                parts.optimizer.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the optimizer has not stepped
                schedule.step()


KINDS: tuple[Callable[[Parts, int], None], ...] = (
    *(warming_up, over_epochs, whole_epochs, passes, by_hand, left_early),
    *(with_a_teacher, by_all_outputs, unfreezing, several_steps, without_the_first, with_a_mean),
    by_a_schedule,
)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce", "groups"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_is_that_of_one_process_whoever_dies(
    kind: Any, strategy: str, tmp_path: Path
) -> None:
    script = Script(kind, optimizer=sgd(0.05, momentum=0.9), data=samples(SAMPLES), epochs=2)
    chosen, right = STRATEGIES[strategy], script.alone(WORKERS)
    undisturbed = run(script, WORKERS, chosen)
    assert difference(undisturbed.weights, right) < 1e-12
    for number in range(1, len(undisturbed.steps)):
        for victim in range(WORKERS):
            found = without(script, WORKERS, victim, number, chosen)
            assert difference(found.weights, right) < 1e-12, (number, victim)
        checkpoints = steepest.Checkpoints(tmp_path / str(number), every=1)
        with pytest.raises(InterruptedRunError):
            run(script, WORKERS, chosen, checkpoints=checkpoints, callbacks=[Interrupts(number)])
        found = run(script, WORKERS, chosen, checkpoints=checkpoints)
        assert difference(found.weights, right) < 1e-12, (number, "resumed")
