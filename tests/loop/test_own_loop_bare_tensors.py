"""Loops of users' own that train tensors which no module has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest.errors import ConfigurationError, ModelRaisedError
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import FOUND, alone, data
from tests.reference import difference, perceptron
from tests.simulated_programs import quiet
from tests.simulation.run import pause


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def with_a_temperature() -> None:
    """One optimizer over a module and a tensor."""
    model, log_scale = perceptron(), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    groups: Any = [
        {"params": list(model.parameters())},
        {"params": [log_scale], "lr": 0.01},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    loader = data()
    model, optimizer, loader = steepest.prepare(model, optimizer, loader)
    for _ in steepest.epochs(3):
        for x, y in loader:
            pause(1e-3)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x) * log_scale.exp(), y).backward()
            optimizer.step()
    found = {f"0.{n}": p.detach().clone() for n, p in model.named_parameters()}
    FOUND["with_a_temperature"] = {**found, "1.0": log_scale.detach().clone()}


def by_turns() -> None:
    """An optimizer of its own for a tensor, as in soft actor-critic."""
    model, log_alpha = perceptron(), torch.zeros(1, dtype=torch.float64, requires_grad=True)
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.Adam([log_alpha], lr=0.01)
    model, first, second, loader = steepest.prepare(model, first, second, data())
    for _ in steepest.epochs(3):
        for x, y in loader:
            pause(1e-3)
            first.zero_grad()
            (log_alpha.exp().item() * nn.functional.mse_loss(model(x), y)).backward()
            first.step()
            second.zero_grad()
            (log_alpha.exp() * (model(x).detach() - y).square().mean()).backward()
            second.step()
    found = {f"0.{n}": p.detach().clone() for n, p in model.named_parameters()}
    FOUND["by_turns"] = {**found, "1.0": log_alpha.detach().clone()}


def without_a_module() -> None:
    """A formula, whose weights are two tensors; one of them is a parameter."""
    slope = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    offset = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.Adam([slope, offset], lr=0.05)
    optimizer, offset, loader = steepest.prepare(optimizer, offset, data())
    for _ in steepest.epochs(3):
        for x, y in loader:
            pause(1e-3)
            optimizer.zero_grad()
            nn.functional.mse_loss(x @ slope + offset, y).backward()
            optimizer.step()
    FOUND["without_a_module"] = {"0": slope.detach().clone(), "1": offset.detach().clone()}


LOOPS = [with_a_temperature, by_turns, without_a_module]


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("loop", LOOPS)
def test_tensors_of_no_module_are_trained(loop: Callable[[], None], workers: int) -> None:
    found = run(loop, workers)
    assert difference(found.weights, alone(loop, workers)) < 1e-12


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", ["ps", "allreduce, two copies"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_successor_has_them(loop: Callable[[], None], strategy: str) -> None:
    found = without(loop, 2, 1, 5, STRATEGIES[strategy])
    assert difference(found.weights, alone(loop, 2)) < 1e-12


def forgotten() -> None:
    model, lone = perceptron(), nn.Parameter(torch.zeros(4))
    steepest.prepare(model, torch.optim.SGD([*model.parameters(), lone], lr=0.1), data())


def untrained() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steepest.prepare(model, optimizer, torch.zeros(4), data())


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        (forgotten, r"of shape \(4,\) that is not a parameter of the modules given: give the mod"),
        (untrained, r"a tensor of shape \(4,\) that no optimizer has"),
    ],
)
def test_what_could_be_a_mistake_is_told(loop: Callable[[], None], words: str) -> None:
    with pytest.raises((ModelRaisedError, ConfigurationError), match=words):
        run(loop, 2)
