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
from tests.own_loop_runs import (
    STRATEGIES,
    InterruptedRunError,
    Interrupts,
    Places,
    Resizes,
    come,
    run,
    without,
)
from tests.own_loops import Parts, Script, several_steps
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet

WORKERS, SAMPLES = 3, 13  # batches of 6, 6 and 1: two workers have nothing of the last one


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def learn(parts: Parts, x: Any, y: Any, part: float = 1.0) -> None:
    (nn.functional.mse_loss(parts.model(x), y) * part).backward()
    come()


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
            come()
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


def made(kind: Any) -> Script:
    return Script(kind, optimizer=sgd(0.05, momentum=0.9), data=samples(SAMPLES), epochs=2)


@pytest.mark.parametrize("kind", [over_epochs, without_the_first])
def test_two_workers_die_at_once_amid_a_batch(kind: Any) -> None:
    script = made(kind)
    found = Places({(1, 0, 2): (1, 2)}).run(script, WORKERS, STRATEGIES["ps"])
    assert difference(found.weights, script.alone(WORKERS)) < 1e-12


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_die_at_each_place(kind: Any, strategy: str) -> None:
    """One of three places; both at once; the second one, or the first one's successor, while that enters."""
    script, chosen = made(kind), STRATEGIES[strategy]
    right, whole = script.alone(WORKERS), Places()
    assert difference(whole.run(script, WORKERS, chosen).weights, right) < 1e-12
    for place in whole.passed[::3]:
        rank, other = place[0], (place[0] + 1) % WORKERS
        alone = Places({place: (rank,)})
        assert difference(alone.run(script, WORKERS, chosen).weights, right) < 1e-12, place
        more: list[dict[Any, Any]] = [{place: (rank, other)}]
        for entering in [each for each in alone.passed if each[:2] == (rank, 1)][:2]:
            more += [{place: (rank,), entering: (victim,)} for victim in (rank, other)]
        for deaths in more:
            found = Places(deaths).run(script, WORKERS, chosen)
            assert difference(found.weights, right) < 1e-12, deaths


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_workers_join_and_leave_behind_each_step_and_at_each_place(
    kind: Any, tmp_path: Path
) -> None:
    """All workers have as many samples together; a run goes on with another number of them, too."""
    script, chosen, together = made(kind), STRATEGIES["ps"], {"global_batch_size": WORKERS * 2}
    right, whole = script.alone(WORKERS), Places()
    steps = len(whole.run(script, WORKERS, chosen, **together).steps)
    for place in whole.passed[::2]:  # nobody waits for a successor
        found = Places({place: place[:1]}).run(script, WORKERS, chosen, 0.0, **together)
        assert difference(found.weights, right) < 1e-12, place
    for number in range(1, steps):
        for size in (2, 4):
            found = run(script, WORKERS, chosen, callbacks=[Resizes(number, size)], **together)
            assert difference(found.weights, right) < 1e-12, (number, size)
        for size in (2, 5):
            checkpoints = steepest.Checkpoints(tmp_path / f"{number} {size}", every=1)
            kept = {"checkpoints": checkpoints, **together}
            with pytest.raises(InterruptedRunError):
                run(script, WORKERS, chosen, callbacks=[Interrupts(number)], **kept)
            found = run(script, size, chosen, **kept)
            assert difference(found.weights, right) < 1e-12, (number, size)
