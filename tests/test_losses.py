"""Losses by name, losses with a weight, and losses that a module's output has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steepest import TorchModel
from steepest.errors import ModelError
from steepest.models.losses import weigh
from steepest.testing import InProcessCluster
from tests.reference import Task, difference, perceptron, samples, sgd


def both(output: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"square": F.mse_loss(output, target), "absolute": 0.1 * F.l1_loss(output, target)}


def added(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    square, absolute = both(output, target).values()
    return square + absolute


@pytest.mark.parametrize("weighted", [False, True])
def test_several_losses_are_added_up_and_told_by_name(weighted: bool) -> None:
    data = samples(24)

    def loss(output: torch.Tensor, target: torch.Tensor) -> Any:
        return (both(output, target), len(target)) if weighted else both(output, target)

    task = Task(loss=loss, data=data, batch_size=3)
    cluster = InProcessCluster(task.creator(), num_workers=2)
    results = cluster.step(6)
    expected = Task(loss=added, data=data, batch_size=3).train(2, 6)
    assert difference(cluster.weights(), expected) < 1e-12
    for result in results:
        assert result.metrics.keys() == {"square", "absolute"}
        assert sum(result.metrics.values()) == pytest.approx(result.loss, rel=1e-12)


def test_a_batch_of_images_of_different_sizes_has_as_many_samples_as_targets() -> None:
    images = [torch.ones(3, 8, 6), torch.ones(3, 5, 9)]
    targets = [{"labels": torch.tensor([1])}, {"labels": torch.tensor([0, 2])}]
    for batch in ((images, targets), [tuple(images), tuple(targets)]):
        _, _, samples, weight = weigh(batch, torch.zeros((), requires_grad=True))
        assert (samples, weight) == (2, 2.0)


def test_losses_by_name_are_those_of_an_evaluation_too() -> None:
    x, y = samples(4)
    torch.manual_seed(0)
    model = TorchModel(perceptron(), loss=both, data=(x, y), batch_size=2, optimizer=sgd())
    found = model.evaluate((x, y))
    expected = both(model.module(x), y)
    assert found.metrics == {name: value.item() for name, value in expected.items()}
    assert found.loss == pytest.approx(sum(found.metrics.values()))


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class Classifier(nn.Module):
    """A module as those of Hugging Face's transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.layer(inputs)
        return Output(None if labels is None else F.cross_entropy(logits, labels), logits)


X, Y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 2


def right(output: Output, labels: torch.Tensor) -> torch.Tensor:
    return (output.logits.argmax(1) == labels).double().mean()


@pytest.mark.parametrize(
    "data", [(X, Y), [{"inputs": x, "labels": y} for x, y in zip(X, Y, strict=True)]]
)
def test_the_output_of_a_module_may_have_the_loss(data: Any) -> None:
    def creator(worker: int, device: int) -> TorchModel:
        return TorchModel(
            Classifier(), data=data, batch_size=3, optimizer=sgd(), metrics={"right": right}
        )

    cluster = InProcessCluster(creator, num_workers=2)
    results = cluster.step(4)

    def plain() -> nn.Module:
        return Classifier().layer

    expected = Task(plain, loss=F.cross_entropy, data=(X, Y), batch_size=3).train(2, 4)
    found = {name.removeprefix("layer."): w for name, w in cluster.weights().items()}
    assert difference(found, expected) < 1e-12
    assert all(0 <= result.metrics["right"] <= 1 for result in results)


@pytest.mark.parametrize(
    ("module", "data", "loss", "metrics", "message"),
    [
        (Classifier(), (X,), None, {}, "no loss: the module returned Output whose loss is None"),
        (nn.Linear(3, 2).double(), (X,), None, {}, "no loss: .* a tensor .* without a loss"),
        (nn.Linear(3, 2).double(), (X, Y), lambda o, y: {}, {}, "the loss is dict"),
        (nn.Linear(3, 2).double(), (X, Y), lambda o, y: {"a": o}, {}, "loss 'a' is a tensor"),
        (
            nn.Linear(3, 2).double(),
            (X, Y),
            lambda o, y: {"a": o.mean()},
            {"a": lambda o, y: 1.0},
            "a loss is named 'a'",
        ),
    ],
)
def test_what_is_no_loss_is_refused(
    module: nn.Module, data: Any, loss: Any, metrics: Any, message: str
) -> None:
    model = TorchModel(module, loss=loss, data=data, batch_size=2, optimizer=sgd(), metrics=metrics)
    with pytest.raises(ModelError, match=message):
        model.evaluate(next(model.data.open([torch.arange(2).numpy()])))
