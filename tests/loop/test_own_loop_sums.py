"""Gradients of several batches that a loop adds up, of batches that do not split alike, beside one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import steepest
from steepest.errors import ModelRaisedError
from tests.own_loop_runs import run
from tests.own_loops import Parts, Script, adding_up, adding_up_often
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


LOOPS: dict[str, Any] = {
    **{
        each.__name__: (each, "mean")
        for each in (to_the_end, behind_the_epoch, over_the_end, of_all)
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
