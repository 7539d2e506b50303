"""What stands for the values that replicas change themselves, and which of them differ too much for that."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from steepest import TorchModel
from steepest.core.engine.job import Description, check_agreement
from steepest.core.engine.model_building import build_models
from steepest.core.engine.replica_states import differing_buffers, merged_states
from steepest.core.strategies.parameter_server import ParameterServerStrategy
from steepest.core.tensors.layout import ChunkSpec
from steepest.errors import ConfigurationError, ModelError
from steepest.testing import InProcessCluster
from tests.reference import samples, sgd


class Teacher(nn.Module):
    """It has a copy of its layer that follows it, some buffers, and a queue that no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2).double()
        self.follower = nn.Linear(3, 2).double().requires_grad_(False)
        self.queue = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("codes", torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.queue[0] = x[0]
                self.codes += x[0]
                for own, other in zip(
                    self.follower.parameters(), self.layer.parameters(), strict=True
                ):
                    own.add_(other * x.mean())
        return self.layer(x)


def teacher(buffers: dict[str, str] | None = None, workers: int = 2) -> Any:
    def creator(worker: int, device: int) -> TorchModel:
        return TorchModel(
            Teacher(), loss=nn.functional.mse_loss, data=samples(4 * workers), batch_size=2,
            optimizer=sgd(), buffers=buffers,
        )  # fmt: skip

    return creator


@cache
def described() -> Description:
    return build_models(teacher(), 0, 1, 0, ChunkSpec())[1]


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("buffers", [None, {"queue": "first", "co*": "mean"}])
def test_a_model_says_what_stands_for_all(buffers: dict[str, str] | None, workers: int) -> None:
    """Frozen parameters and buffers alike."""
    creator = teacher(buffers, workers)
    strategy = ParameterServerStrategy(num_servers=2)
    cluster = InProcessCluster(creator, num_workers=workers, strategy=strategy)
    cluster.step(2)
    each = [
        cluster.workers[worker].at_version(0, -1, lambda replicas: replicas.states()[0]).result()
        for worker in range(workers)
    ]
    found = cluster.state_dict()
    for name in ("queue", "codes", "follower.weight"):
        of_one = name == ("codes" if buffers is None else "queue")
        values = torch.stack([state[name] for state in each])
        assert torch.allclose(found[name], values[0] if of_one else values.mean(dim=0), rtol=1e-12)
        assert workers == 1 or not torch.equal(values[0], values[1])


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.2, 1.7]), False),  # a statistic
        (torch.eye(4)[0], torch.eye(4)[1], True),  # a key
        (torch.tensor([[0.5, 0.5], [0.0, 0.1]]), torch.tensor([[0.5, 0.5], [0.9, 0.1]]), True),
        (torch.tensor(1), torch.tensor(2), True),
        (torch.tensor(True), torch.tensor(False), True),
        (torch.tensor(float("inf")), torch.tensor(float("inf")), False),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 0.0]), True),
        (torch.tensor([1 + 1j]), torch.tensor([-1 - 1j]), True),
        (torch.zeros(0), torch.zeros(2), True),  # a list that grows
        (torch.zeros(0), torch.zeros(0), False),
        (torch.tensor(3, dtype=torch.uint32), torch.tensor(4, dtype=torch.uint32), False),  # a seed
    ],
)
def test_buffers_differ_that_no_mean_explains(
    one: torch.Tensor, other: torch.Tensor, differ: bool
) -> None:
    for last in (one, other):
        states = [{"buffer": one}, {"buffer": one}, {"buffer": last}]
        assert differing_buffers(states, described()) == (
            ["buffer"] if differ and last is other else []
        )
    chosen = replace(described(), merging={"buffer": "first"})
    assert not differing_buffers([{"buffer": one}, {"buffer": other}], chosen)
    found = merged_states([{"buffer": one}, {"buffer": other}], chosen)["buffer"]
    assert found is one


@pytest.mark.parametrize(
    ("buffers", "told"),
    [
        ({"quue": "first"}, r"buffers={'quue': ...} fits none of .* buffers \(codes\)"),
        ({"codes": "median"}, r"buffers\['codes'\]='median'.*mean"),
        (["codes"], r"buffers=\['codes'\]: give"),
    ],
)
def test_a_choice_that_nothing_fits_is_refused(buffers: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        teacher(buffers)(0, 0)


def test_workers_choose_alike() -> None:
    other = build_models(teacher({"codes": "mean"}), 1, 1, 0, ChunkSpec())[1]
    with pytest.raises(ModelError, match="choice of buffers"):
        check_agreement(described(), other, "worker 0", "worker 1")
