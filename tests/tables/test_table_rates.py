"""Learning rates of embedding tables: their own, or following those of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD, FailureConfig, ParameterServerStrategy
from steepest.core.data.sampler import SamplePlan
from steepest.errors import ConfigurationError, ModelRaisedError
from steepest.strategies.local import LocalStrategy
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.row_optimizers import FTRL, SGD, Adagrad, RowOptimizer
from steepest.tables.rows.table import Table
from steepest.testing import InProcessCluster
from tests.modes import make, trained
from tests.reference import Task, Weights, difference, sgd
from tests.simulation.run import Simulation, run_config
from tests.table_jobs import trainer
from tests.table_tasks import (
    OPTIMIZERS,
    all_weights,
    explained,
    first_rows,
    mostly_long,
    rows_of,
    table_task,
    torchs,
)

STEPS = 7


def decay(step: int) -> float:
    """A factor that warms up from 0, and falls."""
    return min(step / 2, 1.0) * 0.8**step


def following(name: str, lr_scheduler: Any = None, **settings: Any) -> Task:
    ours = replace(OPTIMIZERS[name].ours, follows=0)
    return replace(table_task(sgd(), row_optimizer=ours), lr_scheduler=lr_scheduler, **settings)


def by_torch(task: Task, name: str, rates: Callable[[int], float]) -> Weights:
    """The weights of torch's model, both of whose optimizers have a schedule."""
    torch.manual_seed(0)
    ours, theirs = task.module(), torchs()
    theirs.load_state_dict({**first_rows(ours), **ours.state_dict()})
    tables = [theirs.users.weight, theirs.items.weight]
    optimizers = [task.optimizer(theirs.head), OPTIMIZERS[name].theirs(tables)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, rates) for each in optimizers]
    plan = SamplePlan(len(task.data[0]), 6, 0)
    for step in range(STEPS):
        index = torch.from_numpy(plan.share(step, 0, 1))
        users, items, target = (column[index] for column in task.data)
        theirs.zero_grad()
        task.loss(theirs(users, items), target).backward()
        with torch.sparse.check_sparse_tensor_invariants():
            for each in (*optimizers, *schedules):
                each.step()
    return {key: value.detach() for key, value in theirs.state_dict().items()}


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("mode", mostly_long(["sync", "allreduce"], "sync"))
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_a_table_that_follows_has_the_schedule_of_the_model(name: str, mode: str) -> None:
    scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, decay)  # noqa: E731
    task = following(name, scheduler)
    cluster = make(mode, task)
    trained(cluster, STEPS)
    assert difference(all_weights(cluster, task), by_torch(task, name, decay)) < 1e-9
    explained(cluster, task)


def test_it_follows_a_function_of_the_step() -> None:
    task = following("Adagrad", learning_rate=lambda step: 0.1 * decay(step))
    cluster = make("sync", task)
    trained(cluster, STEPS)
    assert difference(all_weights(cluster, task), by_torch(task, "Adagrad", decay)) < 1e-9


def test_other_tables_keep_their_own() -> None:
    scheduled = replace(
        table_task(sgd(), row_optimizer=SGD(lr=0.3)), learning_rate=lambda step: 0.0
    )
    plain = table_task(sgd(lr=0.0), row_optimizer=SGD(lr=0.3))
    jobs = [make("sync", task) for task in (scheduled, plain)]
    for cluster in jobs:
        trained(cluster, 3)
    theirs, ours = (rows_of(cluster) for cluster in jobs)
    assert all(torch.equal(value, ours[name]) for name, value in theirs.items())


class Falling(nn.Module):
    """One row, which falls by its learning rate in each update, and so does a weight."""

    def __init__(self, optimizer: RowOptimizer) -> None:
        super().__init__()
        table = Table("t", 1, optimizer=optimizer, initial=Zeros(), dtype="float64")
        self.rows = Embedding(table)
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.other = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return what is to be as small as can be."""
        return (
            self.rows(torch.zeros(len(samples), dtype=torch.int64))[:, 0] + self.weight + self.other
        )


def groups(module: nn.Module) -> torch.optim.Optimizer:
    """Two parameter groups with learning rates of their own."""
    weight, other = module.weight, module.other
    return torch.optim.SGD([{"params": [weight], "lr": 0.5}, {"params": [other], "lr": 0.25}])


def falling(optimizer: RowOptimizer, **settings: Any) -> Task:
    data = torch.zeros(24), torch.zeros(24)
    loss = lambda output, target: output.mean()  # noqa: E731
    return Task(lambda: Falling(optimizer), groups, data, loss, table_shards=1, **settings)


def value(sgd: DistributedSGD) -> float:
    return float(sgd.export_table("t").values[0, 0])


@pytest.mark.long
def test_rates_that_are_set_reach_the_tables_that_follow(tmp_path: Path) -> None:
    """The second group's, here; a restored checkpoint and another size have them too."""
    task = falling(SGD(lr=8.0, follows=1))
    strategy = ParameterServerStrategy(num_servers=2)
    with trainer(task.creator(), strategy, simulation=Simulation(5)) as sgd:
        sgd.step()
        assert value(sgd) == -8
        sgd.set_learning_rate([0.0, 0.125])
        sgd.step()
        assert value(sgd) == -12
        sgd.save(tmp_path / "saved")
        sgd.resize(3)
        sgd.step()
        assert value(sgd) == -16
        sgd.set_learning_rate(None)
        sgd.step()
        assert value(sgd) == -24
        sgd.restore(tmp_path / "saved")
        sgd.step()
        assert value(sgd) == -16


def test_both_factors_count_under_async() -> None:
    """That of the schedule, and 1 / staleness."""
    task = falling(SGD(lr=8.0, follows=0), learning_rate=lambda step: 0.25)
    cluster = make("async-rate", task, shuffle=4)
    trained(cluster, 4)
    log = cluster.log()
    assert min(commit.rate for commit in log.commits) < 1
    fallen = -4.0 * sum(commit.rate for commit in log.commits)
    values = [value for name, value in rows_of(cluster).items() if name.endswith("/values")]
    assert torch.cat(values).item() == pytest.approx(fallen, rel=1e-12)


def test_the_factor_is_of_gradients_where_a_rate_scales_rows() -> None:
    """FTRL's rows are as large as its rate: half of a rate must not halve what is there."""
    task = falling(FTRL(lr=1.0, follows=0), learning_rate=lambda step: 0.5 if step < 3 else 0.0)
    cluster = make("sync", task, 1)
    trained(cluster, 3)
    before = rows_of(cluster)
    trained(cluster, 2)
    after = rows_of(cluster)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert all(name.endswith(("written", "sightings", "updates")) for name in changed)


@pytest.mark.parametrize(
    ("optimizer", "dense", "strategy", "words"),
    [
        (SGD(follows=2), groups, None, "follows=2 of table 't': the model's optimizer has 2"),
        (SGD(follows=0), sgd(lr=0.0), None, "has the learning rate 0"),
        (SGD(follows=0), groups, LocalStrategy(), "under the strategy 'local'"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    optimizer: RowOptimizer, dense: Any, strategy: Any, words: str
) -> None:
    task = replace(falling(optimizer), optimizer=dense)
    with pytest.raises(ConfigurationError, match=words):
        InProcessCluster(task.creator(), num_workers=2, strategy=strategy)


def test_a_negative_rate_that_tables_cannot_follow_is_told_and_the_job_goes_back() -> None:
    """Torch's optimizers take steps with such a rate."""
    task = falling(SGD(lr=8.0, follows=0), learning_rate=lambda step: 0.5 if step < 2 else -0.25)
    config = run_config(failure=FailureConfig(snapshot_every=1))
    with trainer(task.creator(), simulation=Simulation(2), run_config=config) as training:
        training.step()
        training._supervisor.snapshots.ensure()
        training.step()
        told = "the optimizer raised in step 3: Conf.*: lr of parameter group 0=-0.25: give"
        with pytest.raises(ModelRaisedError, match=told):
            training.fit(
                steps=3, progress=False
            )  # a step's result may come before its update raises
        step = training._training.step
        assert step in (1, 2)
        assert value(training) == -8 * step


@pytest.mark.parametrize("wrong", [-1, 0.5, True, "0"])
def test_it_is_a_parameter_group_that_is_followed(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="follows"):
        Adagrad(follows=wrong)
