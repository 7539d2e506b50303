"""Gradients of several batches that a loop adds up, of batches that do not split alike, beside one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import steepest
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.loop.sum_weights import SumWeights
from tests.own_loop_runs import run, without
from tests.own_loops import (
    Parts,
    Script,
    adding_up,
    adding_up_often,
    by_tokens,
    several_steps,
)
from tests.reference import difference, samples, sgd
from tests.simulated_programs import quiet


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def to_the_end(parts: Parts, epochs: int) -> None:
    """A step after two batches, and one behind the epoch's last."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader, 1):
            (nn.functional.mse_loss(parts.model(x), y) / 2).backward()
            if number % 2 == 0 or number == len(parts.loader):
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def behind_the_epoch(parts: Parts, epochs: int) -> None:
    """What is left of an epoch is stepped over behind it."""
    for _ in steepest.epochs(epochs):
        left = 0
        for x, y in parts.loader:
            (nn.functional.mse_loss(parts.model(x), y) / 2).backward()
            left += 1
            if left == 2:
                parts.optimizer.step()
                parts.optimizer.zero_grad()
                left = 0
        if left:
            parts.optimizer.step()
            parts.optimizer.zero_grad()


def over_the_end(parts: Parts, epochs: int) -> None:
    """Sums go over the epochs' ends, and each fifth batch is left out."""
    number = 0
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            number += 1
            if number % 5 == 0:
                continue
            (nn.functional.mse_loss(parts.model(x), y) / 2).backward()
            if number % 2 == 0:
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def of_all(parts: Parts, epochs: int) -> None:
    """The loss is of all workers' outputs, whose gradients go through what is gathered."""
    for _ in steepest.epochs(epochs):
        for number, (x, y) in enumerate(parts.loader, 1):
            own = parts.model(x)
            middle = steepest.gather(own).mean(dim=0)
            ((own - middle - y).square().mean() / 2).backward()
            if number % 2 == 0 or number == len(parts.loader):
                parts.optimizer.step()
                parts.optimizer.zero_grad()


def by_tokens_of_each(parts: Parts, epochs: int) -> None:
    """Means over tokens, a step for each batch."""
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            tokens = 1 + (y[:, :1] > 0).double()
            steepest.weight(tokens.sum().item())
            parts.optimizer.zero_grad()
            errors = (parts.model(x) - y).square() * tokens
            (errors.sum() / tokens.sum()).backward()
            parts.optimizer.step()


LOOPS: dict[str, Any] = {
    **{
        each.__name__: (each, "mean")
        for each in (
            to_the_end,
            behind_the_epoch,
            over_the_end,
            of_all,
            by_tokens,
            by_tokens_of_each,
        )
    },
    **{each.__name__: (each, "sum") for each in (adding_up, adding_up_often)},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("count", [11, 13, 14, 23])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_sum_over_batches_of_any_size_is_that_of_one_process(
    loop: str, count: int, workers: int
) -> None:
    function, reduction = LOOPS[loop]
    rate = 0.02 if reduction == "sum" else 0.1
    script = Script(
        function, optimizer=sgd(rate, momentum=0.9), data=samples(count), reduction=reduction
    )
    found = run(script, workers)
    assert difference(found.weights, script.alone(workers)) < 1e-12
    if function is to_the_end:  # each sample is in one step
        assert sum(row["samples"] for row in found.steps) == count * script.epochs


def test_weights_of_some_batches_of_a_sum_alone_are_refused() -> None:
    """Where batches are of other sizes nobody knows what the others weigh beside them."""

    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for number, (x, y) in enumerate(parts.loader, 1):
                if number == len(parts.loader):
                    steepest.weight(2.0)
                nn.functional.mse_loss(parts.model(x), y).backward()
                if number in (2, len(parts.loader)):
                    parts.optimizer.step()

    with pytest.raises(ModelRaisedError, match="call it in each batch of the sum, or in none"):
        run(Script(loop, data=samples(13)), 2)


STEPS = {several_steps: 12, by_tokens: 4}


@pytest.mark.few(4)
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(
    ("loop", "step"),
    [(loop, step) for loop, steps in STEPS.items() for step in range(1, steps)],
)
def test_a_successor_weighs_its_own_samples(loop: Any, step: int, victim: int) -> None:
    script = Script(loop, optimizer=sgd(momentum=0.9), data=samples(13), epochs=2)
    found = without(script, 3, victim, step)
    assert len(found.steps) == STEPS[loop]
    assert difference(found.weights, script.alone(3)) < 1e-12


def weighing_late(model: nn.Module, batch: Any, number: int) -> None:
    """Says what each batch weighs, behind its backward pass."""
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    steepest.weight(2.0)


def weighing_again(model: nn.Module, batch: Any, number: int) -> None:
    """Says what each batch weighs, and something else behind its backward pass."""
    steepest.weight(2.0)
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    steepest.weight(3.0)


def weighing_once(model: nn.Module, batch: Any, number: int) -> None:
    """Says what the first batch of each sum weighs."""
    if number % 2:
        steepest.weight(2.0)
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()


@pytest.mark.parametrize(
    ("weighing", "words"),
    [
        (weighing_late, r"without steepest\.weight\(\)"),
        (weighing_again, r"call it before backward"),
        (weighing_once, r"without steepest\.weight\(\)"),
    ],
)
def test_weights_of_a_sum_are_said_before_each_backward_pass(weighing: Any, words: str) -> None:
    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for number, batch in enumerate(parts.loader, 1):
                weighing(parts.model, batch, number)
                if number % 2 == 0:
                    parts.optimizer.step()
                    parts.optimizer.zero_grad()

    with pytest.raises(ModelRaisedError, match=words):
        run(Script(loop, data=samples(16)), 2)


def test_a_weight_that_one_worker_alone_says_is_refused() -> None:
    """In batches whose gradients are added up; the error names what was called."""

    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for number, (x, y) in enumerate(parts.loader, 1):
                if steepest.rank() == 0:
                    steepest.weight(2.0)
                nn.functional.mse_loss(parts.model(x), y).backward()
                if number % 2 == 0:
                    parts.optimizer.step()
                    parts.optimizer.zero_grad()

    with pytest.raises(
        ModelRaisedError, match=r"steepest\.weight\(\) was called by worker 0 where"
    ):
        run(Script(loop, data=samples(16)), 2)


def test_a_sum_of_a_checkpoint_of_before_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="of an older version"):
        SumWeights(lambda weight: weight).load([False, 0.0, 2.0, [2.0, 2, 4], False, True])
