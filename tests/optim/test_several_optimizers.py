"""Several optimizers over disjoint parameters: all step, as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import AllreduceStrategy, DistributedSGD, ParameterServerStrategy, TorchModel
from steepest.core.data.sampler import SamplePlan
from steepest.core.optim.spec import Schedule
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster
from tests.reference import Task, Weights, difference, perceptron, samples, snapshot
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config


def adagrad_and_adam(module: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adagrad(module[0].parameters(), lr=0.1),
        torch.optim.Adam(
            [{"params": module[2].weight}, {"params": module[2].bias, "lr": 0.02}], lr=0.05
        ),
    ]


def with_a_whole_matrix(module: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.SGD([module[0].weight, module[0].bias, module[2].bias], 0.1, momentum=0.9),
        torch.optim.Adafactor([module[2].weight], lr=0.05),
    ]


FACTORIES = [adagrad_and_adam, with_a_whole_matrix]


def decay(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def task(factory: Any) -> Task:
    return Task(optimizer=factory, data=samples(24), batch_size=3, lr_scheduler=decay)


def serial(factory: Any, steps: int) -> Weights:
    torch.manual_seed(0)
    net = perceptron()
    optimizers = factory(net)
    schedulers = [decay(optimizer) for optimizer in optimizers]
    x, y = samples(24)
    plan = SamplePlan(24, 6, 0)
    for step in range(steps):
        index = torch.from_numpy(plan.share(step, 0, 1))
        net.zero_grad()
        nn.functional.mse_loss(net(x[index]), y[index]).backward()
        for each in (*optimizers, *schedulers):
            each.step()
    return snapshot(net)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [None, 64], ids=str)
@pytest.mark.parametrize("factory", FACTORIES)
def test_all_optimizers_step(factory: Any, strategy: int | None) -> None:
    config = ParameterServerStrategy(num_servers=2, chunk_bytes=strategy)
    cluster = InProcessCluster(task(factory).creator(), num_workers=2, strategy=config)
    cluster.step(12)
    assert difference(cluster.weights(), serial(factory, 12)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("factory", FACTORIES)
def test_their_state_goes_on_elsewhere(factory: Any, tmp_path: Path) -> None:
    creator = task(factory).creator()
    with quiet(), Simulation().running():
        with DistributedSGD(creator, 2, run_config=run_config()) as trainer:
            trainer.fit(steps=4, progress=False)
            trainer.set_strategy(AllreduceStrategy(chunk_bytes=64))
            trainer.fit(steps=4, progress=False)
            trainer.save(tmp_path / "saved")
        with DistributedSGD(creator, 2, run_config=run_config()) as trainer:
            trainer.restore(tmp_path / "saved")
            trainer.fit(steps=4, progress=False)
            assert difference(trainer.weights(), serial(factory, 12)) < 1e-12


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1)] * 2, "two optimizers have the same"),
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1), None], "a list with NoneType"),
        (lambda m: [], "returned list"),
    ],
)
def test_what_is_no_list_of_optimizers_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        task(factory).creator()(0, 0)


@pytest.mark.parametrize(
    "schedulers",
    [
        lambda both: [decay(both[0]), decay(both[1])],
        lambda both: [decay(both), decay(both)],
        lambda both: tuple(map(decay, both)),
        [decay, decay],
    ],
)
def test_two_schedules_are_refused_with_what_to_do(schedulers: Any) -> None:
    two = replace(task(adagrad_and_adam), lr_scheduler=schedulers)
    with pytest.raises(ConfigurationError, match=r"makes one scheduler.*LambdaLR\(optimizer, \["):
        two.creator()(0, 0)


def test_a_schedule_for_each_of_them() -> None:
    def each(both: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(
            both, [lambda n: 0.9**n, lambda n: 1.0, lambda n: 2.0]
        )

    found = Schedule(
        replace(task(adagrad_and_adam), lr_scheduler=each).creator()(0, 0).optimizer_spec
    )
    assert [group.get("lr") for group in found.at(2)] == [pytest.approx(0.081), None, 0.04]


def adams(module: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(part.parameters(), lr=0.1) for part in module]


class Phases(TorchModel):
    """The second half is updated in every third step alone, as the page of several losses has it."""

    calls = 0

    def loss(self, batch: Any) -> Any:
        self.calls += 1
        return losses(self.module, *batch, every=self.calls)


def losses(module: Any, x: torch.Tensor, y: torch.Tensor, every: int) -> dict[str, torch.Tensor]:
    found = {"first": nn.functional.mse_loss(module[0](x), y)}
    if every % 3 == 0:
        target = module[0](x).detach()
        found["second"] = nn.functional.mse_loss(module[1](x), target)
    return found


def halves() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(3, 2) for _ in range(2)).double()


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", [ParameterServerStrategy(), AllreduceStrategy()])
def test_one_half_may_be_updated_more_often_than_the_other(strategy: Any) -> None:
    data = samples(24)

    def create(worker: int, device: int) -> TorchModel:
        return Phases(halves(), data=data, batch_size=12, optimizer=adams)

    cluster = InProcessCluster(create, num_workers=2, strategy=strategy)
    cluster.step(10)
    torch.manual_seed(0)
    module = halves()
    optimizers = adams(module)
    for step in range(1, 11):
        module.zero_grad()
        sum(losses(module, *data, every=step).values()).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
    assert difference(cluster.weights(), snapshot(module)) < 1e-12
