"""Loops of users' own under torch's `GradScaler`, where one worker's gradients overflow and the others' do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import steepest
from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.data.sampler import SamplePlan
from tests.own_loop_runs import STRATEGIES, run, without
from tests.own_loops import FOUND, Parts, Script, alone, data, of_some_samples
from tests.reference import difference, perceptron, samples, sgd, snapshot
from tests.simulated_programs import quiet
from tests.simulation.run import pause

SCALES: list[float] = []  # of each process' scaler, after each epoch


@pytest.fixture(autouse=True)
def _simulated() -> Iterator[None]:
    with quiet():
        yield


def overflowing(count: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """Data with a sample whose gradient is infinite, of one worker's batch."""
    x, y = samples(count)
    y = y.clone()
    y[5] = torch.inf
    return x, y


def scaled(parts: Parts, epochs: int) -> None:
    """A step for each batch, left out where it has overflowed; the scale grows behind three others."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
    steepest.register(scaler=scaler)
    for _ in steepest.epochs(epochs):
        for x, y in parts.loader:
            pause(1e-3)
            parts.optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(parts.model(x), y)).backward()
            scaler.step(parts.optimizer)
            scaler.update()
        SCALES.append(scaler.get_scale())


def script(**settings: Any) -> Script:
    return Script(
        **{"loop": scaled, "data": overflowing(), "optimizer": sgd(momentum=0.9)} | settings
    )


PLAIN = script()


@pytest.mark.few(1)
@pytest.mark.parametrize("workers", [2, 3, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_overflows_on_one_worker_is_left_out_on_all(
    strategy: str, workers: int
) -> None:
    found = run(script(), workers, STRATEGIES[strategy])
    assert difference(found.weights, PLAIN.alone(workers)) < 1e-12


@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_worker_may_have_nothing_to_scale(strategy: str) -> None:
    """One whose batch has no gradient steps with the others, as without a scaler."""
    x, y = samples(13)
    x[SamplePlan(13, 4, 0).share(0, 0, 1), 0] = 1.0  # torch wants to scale once before it steps
    lacking: list[bool] = []

    def scaled_samples(parts: Parts, epochs: int) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        steepest.register(scaler=scaler)
        for _ in steepest.epochs(epochs):
            for x, y in parts.loader:
                parts.optimizer.zero_grad()
                wanted = x[:, 0] > 0
                lacking.append(not wanted.any())
                if not lacking[-1]:
                    errors = (parts.model(x) - y).square().mean(1)
                    scaler.scale((errors * wanted).mean()).backward()
                scaler.step(parts.optimizer)
                scaler.update()

    def plainly(parts: Parts, epochs: int) -> None:
        of_some_samples(parts, epochs, [])

    found = run(Script(scaled_samples, data=(x, y)), 2, strategy)
    assert True in lacking
    assert difference(found.weights, Script(plainly, data=(x, y)).alone(2)) < 1e-12


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServerStrategy(num_servers=2, nonfinite="pass"),
        AllreduceStrategy(nonfinite="skip"),
    ],
    ids=["ps, pass", "allreduce, skip"],
)
def test_all_scalers_lower_their_scale(strategy: Any) -> None:
    """Whatever is done with infinity without a scaler."""
    whole = script(data=overflowing(16))
    SCALES.clear()
    expected, scales = whole.alone(2), SCALES.copy()
    SCALES.clear()
    assert difference(run(whole, 2, strategy).weights, expected) < 1e-12
    assert sorted(SCALES) == sorted(scales * 2)
    assert min(scales) < 4.0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_successor_goes_on_with_the_scale(victim: int) -> None:
    whole = script(data=overflowing(16))
    SCALES.clear()
    expected, scales = whole.alone(2), SCALES.copy()
    SCALES.clear()
    assert difference(without(whole, 2, victim, 5).weights, expected) < 1e-12
    assert SCALES.count(scales[-1]) >= 2


def test_gradients_reach_a_fused_optimizer_divided() -> None:
    """Such an optimizer would divide them by itself, and here servers have it."""
    fused = script(optimizer=sgd(momentum=0.9, fused=True))
    assert difference(run(fused, 2).weights, PLAIN.alone(2)) < 1e-12


def sharing() -> None:
    """Two optimizers of one model, each with a state of its own, under one scaler."""
    model = perceptron()
    one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    two = torch.optim.Adam(model.parameters(), lr=0.02)
    model, one, two, loader = steepest.prepare(model, one, two, data())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    steepest.register(scaler=scaler)
    for _ in steepest.epochs(3):
        for number, (x, y) in enumerate(loader):
            pause(1e-3)
            for each in (one, two):
                each.zero_grad()
                overflows = number == 1 and steepest.rank() == steepest.size() - 1
                loss = nn.functional.mse_loss(model(x), y) * (torch.inf if overflows else 1.0)
                scaler.scale(loss).backward()
                scaler.step(each)
            scaler.update()
    FOUND["sharing"] = snapshot(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "groups"])
def test_optimizers_that_share_parameters_leave_a_step_out_with_their_states(strategy: str) -> None:
    found = run(sharing, 2, STRATEGIES[strategy])
    assert difference(found.weights, alone(sharing, 2)) < 1e-12
