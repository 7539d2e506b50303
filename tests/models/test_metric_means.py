"""Metrics that are no means over samples: found on one batch and its halves, and told once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD, TorchModel, accuracy
from steepest.core.models.protocol import Share
from tests.simulation.run import Simulation, run_config

_DRAWN = torch.Generator().manual_seed(13)
X = torch.randn(40, 3, generator=_DRAWN)
Y = (X.sum(dim=1) + torch.randn(40, generator=_DRAWN) > 0).long()


def recall(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    found = output.argmax(dim=1) == 1
    return (found & (target == 1)).sum() / (target == 1).sum()


def rmse(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output.detach()[:, 0] - target).square().mean().sqrt())


def bias(output: torch.Tensor, target: torch.Tensor) -> float:
    return float((output.detach()[:, 0] - target).mean())


def of_ten(output: torch.Tensor, target: torch.Tensor) -> float:
    """Return a number; it takes batches of ten alone."""
    return float(output.view(2, 5, 2).std())


def never(output: torch.Tensor, target: torch.Tensor) -> float:
    return float("nan")


def model(metric: Callable[..., Any], **settings: Any) -> TorchModel:
    def create(worker: int = 0, device: int = 0) -> TorchModel:
        torch.manual_seed(0)
        return TorchModel(
            nn.Linear(3, 2), data=(X, Y), batch_size=10, metrics={"accuracy": accuracy, "m": metric},
            optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.01),
            **{"loss": nn.functional.cross_entropy, **settings},
        )  # fmt: skip

    return create()


def notice(given: TorchModel, batches: int = 1) -> str:
    """Return what a model notes in the evaluation of some batches."""
    given.begin_evaluation()
    for first in range(0, 10 * batches, 10):
        given.expect(Share(10, 10))
        given.evaluate((X[first : first + 10], Y[first : first + 10]))
    return given.notice


@pytest.mark.parametrize("metric", [recall, rmse])
def test_a_metric_that_is_no_mean_is_told_with_its_values(metric: Callable[..., Any]) -> None:
    made = model(metric)
    output = made.module(X[:10])
    whole = float(metric(output, Y[:10]))
    halves = float(metric(output[:5], Y[:5]) + metric(output[5:], Y[5:10])) / 2
    text = notice(made, 2)
    assert text.startswith("metric 'm' is no mean over samples: of a batch of 10 it is ")
    assert f" {whole:.4g}, and of the two halves of that batch {halves:.4g} on average" in text


@pytest.mark.parametrize("metric", [accuracy, bias, of_ten, never])
def test_means_and_what_takes_no_halves_are_not_told(metric: Callable[..., Any]) -> None:
    assert not notice(model(metric))


def test_outputs_may_be_structures() -> None:
    made = model(recall)
    made.module.register_forward_hook(
        lambda *given: {"scores": given[2], "prior": torch.tensor(0.5)}
    )
    made._loss = lambda output, target: nn.functional.cross_entropy(output["scores"], target)
    made._metrics = {"m": lambda output, target: recall(output["scores"], target)}
    assert notice(made)


def test_a_weighted_batch_and_an_output_without_rows_are_passed_over() -> None:
    def weighed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, float]:
        return nn.functional.cross_entropy(output, target), 7.0

    assert not notice(model(recall, loss=weighed))
    across = model(recall)
    across.module.register_forward_hook(lambda *given: {"scores": given[2], "prior": Y.double()})
    across._loss = lambda output, target: nn.functional.cross_entropy(output["scores"], target)
    across._metrics = {"m": lambda output, target: recall(output["scores"], target)}
    assert not notice(across)


def test_several_workers_tell_once(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation()
    with (
        simulation.running(),
        caplog.at_level(logging.WARNING),
        DistributedSGD(lambda w, d: model(recall), 3, run_config=run_config()) as sgd,
    ):
        sgd.fit(epochs=2, progress=False, validation=(X, Y))
        sgd.evaluate((X, Y))
    assert sum("is no mean" in record.message for record in caplog.records) == 1
