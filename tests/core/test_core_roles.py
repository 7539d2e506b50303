"""The core's roles train by themselves: the results of one process, and errors that change nothing."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.generators import seed_everything
from steepest.core.strategies.allreduce import AllreduceStrategy
from steepest.core.strategies.parameter_server import ParameterServerStrategy
from steepest.core.strategies.strategy import Strategy
from tests.core import models
from tests.core.joined import Joined

EPOCHS, SEED = 2, 3
STRATEGIES: dict[str, Strategy] = {
    "ps": ParameterServerStrategy(num_servers=2),
    "allreduce": AllreduceStrategy(),
    "async": ParameterServerStrategy(mode="async"),
    "ssp": ParameterServerStrategy(mode="ssp"),
}


def trained_alone(workers: int) -> dict[str, torch.Tensor]:
    """Return the weights of plain PyTorch training in one process, on the batches of so many workers."""
    seed_everything(SEED)
    net, (x, y) = models.network(), models.data()
    optimizer = models.optimizer(net)
    plan = SamplePlan(models.SAMPLES, workers * models.BATCH, SEED)
    for step in range(EPOCHS * plan.steps_per_epoch):
        chosen = torch.from_numpy(plan.share(step, 0, 1))
        optimizer.zero_grad()
        F.cross_entropy(net(x[chosen]), y[chosen]).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_synchronous_strategies_train_as_one_process_does(workers: int) -> None:
    found = {}
    steps = EPOCHS * -(-models.SAMPLES // (workers * models.BATCH))
    for name in ("ps", "allreduce"):
        with Joined(models.classifier, workers, STRATEGIES[name], SEED) as job:
            results = job.step(steps)
            found[name] = job.weights()
            assert sum(result.samples for result in results) == EPOCHS * models.SAMPLES

    for name, value in trained_alone(workers).items():
        torch.testing.assert_close(found["ps"][name], value, rtol=0, atol=1e-14)
        assert torch.equal(found["ps"][name], found["allreduce"][name])


@pytest.mark.parametrize("name", ["async", "ssp"])
def test_asynchronous_strategies_learn(name: str) -> None:
    steps = -(-models.SAMPLES // (2 * models.BATCH))  # of an epoch
    with Joined(models.classifier, 2, STRATEGIES[name], SEED) as job:
        results = job.step(12 * steps)

    losses = [result.loss or 0.0 for result in results]
    assert sum(losses[-steps:]) < 0.3 * sum(losses[:steps])
    assert sum(result.samples for result in results) == 12 * models.SAMPLES


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loss_that_raises_is_told_and_no_weight_is_changed(name: str) -> None:
    with Joined(models.poisoned, 2, STRATEGIES[name], SEED) as job:
        before = job.weights()
        failure = job.fail()
        assert "no loss for any sample" in failure.error
        assert "in loss" in failure.traceback
        assert all(torch.equal(value, before[key]) for key, value in job.weights().items())


def test_no_thread_is_left_of_a_job() -> None:
    with Joined(models.classifier, 2, STRATEGIES["ps"], SEED) as job:
        job.step(1)
    assert not [each for each in threading.enumerate() if each.name.startswith("steepest worker")]
