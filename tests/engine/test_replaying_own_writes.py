"""Replays of runs of models that write to their own parameters and buffers: to the bit, or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from steepest import ParameterServerStrategy
from steepest.core.engine.commit_log import CommitLog
from steepest.core.tensors.dtypes import merge_replicas
from steepest.errors import ConfigurationError
from steepest.testing import Fault, InProcessCluster, replay
from tests.engine.own_writes import STATEFUL
from tests.reference import Task, same_bits, samples

STRATEGY = ParameterServerStrategy(num_servers=1)


class Seen(nn.Module):
    """Follows what it sees, so that each replica has another mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4).double()
        self.mean = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(y.mean(0), alpha=0.5)
        return y - self.mean


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=0.1, momentum=0.5
    )


MODELS = {**STATEFUL, "seen": Seen}


def cluster_of(name: str, faults: tuple[Fault, ...] = ()) -> InProcessCluster:
    task = Task(MODELS[name], optimizer, samples(24, outputs=4))
    strategy = STRATEGY
    return InProcessCluster(
        task.creator(), num_workers=3, strategy=strategy, keep_log=True, replaces=True, faults=faults
    )  # fmt: skip


def creator(name: str) -> object:
    return Task(MODELS[name], optimizer, samples(24, outputs=4)).creator()


def in_two_parts(log: CommitLog) -> CommitLog:
    """The same run, as if the job had been put together again in the middle of it."""
    first = replace(log, commits=log.commits[:2])
    return replace(log, commits=log.commits[2:], start=2, earlier=(first,))


@pytest.mark.parametrize("name", STATEFUL)
def test_what_all_replicas_have_alike_goes_over_to_the_next_part(name: str) -> None:
    cluster = cluster_of(name)
    cluster.step(5)
    parameters = cluster.weights().keys()
    wanted = {key: value for key, value in cluster.state_dict().items() if key in parameters}
    assert same_bits(replay(in_two_parts(cluster.log()), creator(name)), wanted)


def test_what_the_log_does_not_tell_of_frozen_parameters_is_refused() -> None:
    cluster = cluster_of("seen")
    cluster.step(5)
    with pytest.raises(ConfigurationError, match="'mean'"):
        replay(in_two_parts(cluster.log()), creator("seen"))
    before = replace(cluster.log(), commits=cluster.log().commits[:2])
    replay(before, creator("seen"))


@pytest.mark.parametrize(
    ("name", "refused"), [("seen", True), ("momentum, copy", True), ("batch norm", False)]
)
def test_a_successor_that_began_with_a_mean_of_frozen_parameters_is_refused(
    name: str, refused: bool
) -> None:
    cluster = cluster_of(name, (Fault.kill("worker", 1, step=2, at="push"),))
    cluster.step(5)
    assert cluster.unmet == []
    if refused:
        with pytest.raises(ConfigurationError, match="frozen parameters"):
            replay(cluster.log(), creator(name))
    else:
        assert same_bits(replay(cluster.log(), creator(name)), cluster.weights())


def test_a_mean_of_the_same_values_has_their_bits() -> None:
    value = torch.rand(1000, dtype=torch.float64)
    for count in (2, 3, 7):
        assert torch.equal(
            merge_replicas([value.clone() for _ in range(count)], [1.0] * count), value
        )
