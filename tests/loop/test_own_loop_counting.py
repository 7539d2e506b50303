"""What counts the batches of a user's own loop, in a worker that enters in the middle of a pass."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from tqdm import tqdm

import steepest
from steepest.errors import ModelRaisedError
from steepest.loop.mistakes import explained
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import Parts, Script
from tests.reference import samples
from tests.simulated_programs import quiet
from tests.simulation.run import pause

EPOCHS, BATCHES = 2, 4


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    own = enumerate, zip
    with quiet():
        yield
    assert (builtins.enumerate, builtins.zip) == own


def _one_by_one(values: Any) -> Iterator[Any]:
    yield from values


def _with_other(loader: Any) -> Iterator[Any]:
    for number, batch, again in zip(range(100, 200), loader, range(BATCHES), strict=False):
        assert number == 100 + again
        yield again, batch


COUNTS: dict[str, Callable[[Any], Any]] = {
    "enumerate": lambda loader: enumerate(loader),
    "from 1": lambda loader: ((n - 1, batch) for n, batch in enumerate(loader, 1)),
    "around tqdm": lambda loader: enumerate(tqdm(loader, disable=True)),
    "in tqdm": lambda loader: tqdm(enumerate(loader), disable=True),
    "around a generator": lambda loader: enumerate(_one_by_one(loader)),
    "zip": lambda loader: zip(itertools.count(), loader, strict=False),
    "zip behind": lambda loader: ((n, x) for x, n in zip(loader, itertools.count(), strict=False)),
    "strict": lambda loader: zip(range(BATCHES), loader, strict=True),
    "three": _with_other,
    "twice": lambda loader: ((n, x) for n, (_, x) in enumerate(enumerate(loader))),
}


def counting(counts: Callable[[Any], Any]) -> Callable[[Parts, int], None]:
    def loop(parts: Parts, epochs: int) -> None:
        for epoch in steepest.epochs(epochs):
            for number, (x, y) in counts(parts.loader):
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.param_groups[0]["lr"] = 0.01 * (1 + number)
                parts.optimizer.step()
                steepest.report(epoch=epoch, number=steepest.gather(number).double().mean())

    return loop


@pytest.mark.few(3)
@pytest.mark.parametrize("how", COUNTS)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_successor_counts_the_batches_before(how: str, strategy: str, step: int) -> None:
    """A worker that counted otherwise would have another rate, and be refused."""
    script = Script(counting(COUNTS[how]), data=samples(4 * BATCHES), epochs=EPOCHS)
    died = without(script, 2, step % 2, step, STRATEGIES[strategy])
    whole = run(script, 2, STRATEGIES[strategy])
    numbers = [(e, n) for e in range(EPOCHS) for n in range(BATCHES)]
    assert [(row["epoch"], row["number"]) for row in whole.reports] == numbers
    assert {*((row["epoch"], row["number"]) for row in died.reports)} == {*numbers}
    assert all(torch.equal(died.weights[name], whole.weights[name]) for name in whole.weights)


def test_lengths_that_differ_are_refused_as_by_zip() -> None:
    def loop(parts: Parts, epochs: int) -> None:
        for _ in steepest.epochs(epochs):
            for _, (x, y) in zip(range(BATCHES + 1), parts.loader, strict=True):
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                parts.optimizer.step()

    script = Script(loop, data=samples(4 * BATCHES), epochs=1)
    with pytest.raises(ModelRaisedError, match="ValueError: zip"):
        run(script, 2)


def test_a_pass_that_the_loop_counts_by_itself_is_told_where_a_successor_has_less_of_it() -> None:
    told = explained(StopIteration(), (), 2)
    assert "behind 2 of its batches, which the loop counts by itself" in str(told)
    assert explained(StopIteration(), ()) is None


def test_batches_that_the_loop_keeps_are_told_where_a_successor_lacks_some() -> None:
    def loop(parts: Parts, epochs: int) -> None:
        kept = steepest.register(steps=0)
        for _ in steepest.epochs(epochs):
            for x, y in itertools.cycle(parts.loader):
                if kept.steps == 2 * BATCHES:
                    break
                parts.optimizer.zero_grad()
                nn.functional.mse_loss(parts.model(x), y).backward()
                pause(1e-3)
                parts.optimizer.step()
                kept.steps += 1

    script = Script(loop, data=samples(4 * BATCHES), epochs=1)
    with pytest.warns(UserWarning, match="worker 1: the loop takes several steps behind a pass"):
        without(script, 2, 1, 2)
