"""Loops of users' own whose optimizers have parameters in common, each with a state of its own, as torch has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from torch import nn

import steepest
from steepest.errors import ConfigurationError, ModelRaisedError
from tests.own_loop_runs import STRATEGIES, InterruptedRunError, Interrupts, run, without
from tests.own_loops import FOUND, alone, data
from tests.reference import difference, perceptron
from tests.simulated_programs import quiet
from tests.simulation.run import pause


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def keep(name: str, *models: nn.Module) -> None:
    """Keeps all weights, by the names that they have in a run."""
    FOUND[name] = {
        f"{at}.{n}": p.detach().clone()
        for at, m in enumerate(models)
        for n, p in m.named_parameters()
    }


def three_optimizers() -> None:
    """Two networks with an optimizer each, and a third one of both, as InfoGAN has them; the first has a schedule."""
    generator, judge = perceptron(), critic()
    first = torch.optim.Adam(generator.parameters(), lr=0.02)
    second = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.9)
    both = torch.optim.AdamW(chain(generator.parameters(), judge.parameters()), lr=0.01)
    falling = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
    generator, judge, first, second, both, falling, loader = steepest.prepare(
        generator, judge, first, second, both, falling, data()
    )
    for _ in steepest.epochs(3):
        for x, y in loader:
            pause(1e-3)
            first.zero_grad()
            judge(generator(x)).square().mean().backward()
            first.step()
            falling.step()
            second.zero_grad()
            nn.functional.mse_loss(judge(y), judge(generator(x).detach()) + 1).backward()
            second.step()
            both.zero_grad()
            nn.functional.mse_loss(generator(x), y).backward()  # nothing for the judge
            both.step()
    keep("three_optimizers", generator, judge)


def two_of_one() -> None:
    """A network that two optimizers update, and a rest that servers do, as in an adversarial autoencoder."""
    encoder, decoder = perceptron(), critic()
    reconstructing = torch.optim.Adam(encoder.parameters(), lr=0.02)
    regularizing = torch.optim.SGD(encoder[2].parameters(), lr=0.05, momentum=0.9)
    decoding = torch.optim.SGD(decoder.parameters(), lr=0.05, momentum=0.9)
    encoder, decoder, reconstructing, regularizing, decoding, loader = steepest.prepare(
        encoder, decoder, reconstructing, regularizing, decoding, data()
    )
    for _ in steepest.epochs(3):
        for number, (x, y) in enumerate(loader):
            pause(1e-3)
            for each in (reconstructing, decoding):
                each.zero_grad()
            (decoder(encoder(x)) - y.sum(1, keepdim=True)).square().mean().backward()
            decoding.step()
            reconstructing.step()
            if number % 2:
                regularizing.zero_grad()
                encoder(x).square().mean().backward()
                regularizing.step()
    keep("two_of_one", encoder, decoder)


LOOPS = [three_optimizers, two_of_one]


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_each_optimizer_has_a_state_of_its_own(loop: Callable[[], None], workers: int) -> None:
    assert difference(run(loop, workers).weights, alone(loop, workers)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_successor_has_their_states(loop: Callable[[], None], strategy: str) -> None:
    found = without(loop, 3, 1, 7, STRATEGIES[strategy])
    assert difference(found.weights, alone(loop, 3)) < 1e-12


@pytest.mark.full
def test_a_resumed_program_goes_on(tmp_path: Path) -> None:
    checkpoints = steepest.Checkpoints(tmp_path / "run", every=1)
    with pytest.raises(InterruptedRunError):
        run(three_optimizers, 2, checkpoints=checkpoints, callbacks=[Interrupts(7)])
    found = run(three_optimizers, 2, checkpoints=checkpoints)
    assert difference(found.weights, alone(three_optimizers, 2)) < 1e-12


def clipping() -> None:
    model = perceptron()
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    model, one, other, loader = steepest.prepare(model, one, other, data())
    for _ in steepest.epochs(1):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            steepest.clip_grad_norm_(model.parameters(), 1.0)


def without_backward() -> None:
    model = perceptron()
    one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    model, one, other, loader = steepest.prepare(model, one, other, data())
    for _ in steepest.epochs(1):
        for _ in loader:
            other.step()


@pytest.mark.parametrize(
    ("loop", "strategy", "words"),
    [
        (
            two_of_one,
            "async",
            "Adam, which shares parameters with another one, where workers do no",
        ),
        (clipping, "ps", "which shares parameters with another one: it sees the mean gradient"),
        (without_backward, "ps", "no parameter has a gradient: call loss.backward"),
    ],
)
def test_what_cannot_be_is_told(loop: Callable[[], None], strategy: str, words: str) -> None:
    with pytest.raises((ModelRaisedError, ConfigurationError), match=words):
        run(loop, 2, strategy)
