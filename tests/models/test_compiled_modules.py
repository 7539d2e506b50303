"""Names of parameters and buffers are those of the plain module, however it is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD
from steepest.errors import ConfigurationError
from tests.reference import Task, difference, same_bits, samples
from tests.simulation.run import Simulation, run_config


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
        self.again = nn.Linear(3, 3).double()
        self.again.weight = self.body[0].weight
        self.head = nn.Linear(3, 2).double()
        self.head.bias.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.body(x)).tanh())


def compiled_whole() -> Any:
    return torch.compile(Tied(), backend="eager")


def compiled_in_part() -> Any:
    module = Tied()
    module.body = torch.compile(module.body, backend="eager")  # type: ignore[assignment]
    return module


@pytest.mark.long
@pytest.mark.parametrize("make", [compiled_whole, compiled_in_part])
def test_a_compiled_module_has_plain_names(make: Any) -> None:
    torch.manual_seed(0)
    net = make()  # compiles on first use, which the virtual time of a simulation does not bear
    net(torch.zeros(4, 3, dtype=torch.float64))
    plain, given = Task(Tied, data=samples(12), batch_size=4), net.state_dict()
    with Simulation().running():
        with DistributedSGD(plain.creator(), 2, run_config=run_config()) as trainer:
            trainer.fit(steps=3, progress=False)
            expected = trainer.state_dict()
        task = Task(make, data=samples(12), batch_size=4)
        with DistributedSGD(task.creator(), 2, run_config=run_config()) as trainer:
            trainer.fit(steps=3, progress=False)
            state = trainer.state_dict()
            assert state.keys() == Tied().state_dict().keys()
            assert difference(state, expected) < 1e-12
            Tied().load_state_dict(state)
            trainer.load_state_dict(given)
            assert any("_orig_mod" in name for name in given)
            weights = trainer.weights()
            assert torch.equal(weights["body.0.weight"], net.state_dict()[next(iter(given))])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(wrong: float) -> None:
    with (
        Simulation().running(),
        DistributedSGD(Task().creator(), 2, run_config=run_config()) as trainer,
    ):
        before = trainer.weights()
        with pytest.raises(ConfigurationError, match="'0.bias' holds NaN or infinity"):
            trainer.set_weights({"2.bias": torch.ones(2), "0.bias": torch.full((4,), wrong)})
        assert same_bits(trainer.weights(), before)
