"""A model that puts other Parameter objects in the places of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.messages.driver import Failure, Result
from steepest.core.strategies.strategy import Strategy
from steepest.errors import ModelError
from steepest.testing import InProcessCluster
from tests.reference import Task


class Replacing(nn.Module):
    """A second encoder follows the first by new parameters in each forward pass.

    Args:
        trained: puts one in the place of a trained parameter, too.
    """

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(3, 4).double(), nn.Linear(3, 4).double()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.trained = trained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("weight", "bias"):
            own, new = getattr(self.key, name), getattr(self.query, name)
            setattr(
                self.key, name, nn.Parameter((own * 0.5 + new * 0.5).detach(), requires_grad=False)
            )
        if self.trained:
            self.query.bias = nn.Parameter(self.query.bias.detach() * 0.5)
        with torch.no_grad():
            target = self.key(x)
        return self.query(x) - target - 1


def make_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def task(trained: bool = False) -> Task:
    generator = torch.Generator().manual_seed(1)
    data = tuple(torch.randn(12, size, generator=generator, dtype=torch.float64) for size in (3, 4))
    return Task(lambda: Replacing(trained), make_optimizer, data, batch_size=6)


STRATEGIES = [ParameterServerStrategy(num_servers=1), AllreduceStrategy()]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_are_those_that_the_module_has_now(strategy: Strategy) -> None:
    cluster = InProcessCluster(task().creator(), num_workers=2, strategy=strategy)
    wanted = cluster.state_dict()
    for _ in range(3):
        query = {name: wanted[f"query.{name}"] for name in ("weight", "bias")}
        assert isinstance(cluster.step()[-1], Result)
        found = cluster.state_dict()
        for name, value in query.items():
            torch.testing.assert_close(
                found[f"key.{name}"], wanted[f"key.{name}"] * 0.5 + value * 0.5
            )
        wanted = found


def test_a_state_is_loaded_into_the_parameters_that_the_module_has_now() -> None:
    model = task().creator()(0, 0)
    model.bind(model.layout.allocate(), model.layout.allocate())
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    model.module(torch.ones(2, 3, dtype=torch.float64))
    model.load_state({"key.bias": torch.full((4,), 3.0, dtype=torch.float64)})
    assert torch.equal(model.module.key.bias, torch.full((4,), 3.0, dtype=torch.float64))
    assert torch.equal(model.module.key.weight, before["key.weight"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_trained_parameter_cannot_be_replaced(strategy: Strategy) -> None:
    cluster = InProcessCluster(task(trained=True).creator(), num_workers=2, strategy=strategy)
    before = cluster.weights()
    failure = cluster.step()[-1]
    assert isinstance(failure, Failure)
    assert "'query.bias'" in failure.error
    assert all(torch.equal(value, before[name]) for name, value in cluster.weights().items())


def test_a_frozen_parameter_that_is_gone_is_named() -> None:
    model = task().creator()(0, 0)
    model.bind(model.layout.allocate(), model.layout.allocate())
    del model.module.key.bias
    with pytest.raises(ModelError, match=r"'key\.bias'"):
        model.state()
