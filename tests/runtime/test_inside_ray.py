"""Trainers inside a task and an actor of Ray: the driver of a job is wherever the trainer is."""

from __future__ import annotations

import pytest
import ray

from steepest import DistributedSGD
from steepest.testing import InProcessCluster, linear_model_creator
from tests.reference import Weights, same_bits

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=1)
def task(strategy: str) -> Weights:
    return train(strategy)


@ray.remote(num_cpus=1)
class Actor:
    def train(self, strategy: str) -> Weights:
        return train(strategy)


def train(strategy: str) -> Weights:
    with DistributedSGD(linear_model_creator(), num_workers=2, strategy=strategy) as sgd:
        sgd.fit(steps=5, progress=False)
        return sgd.weights()


def test_inside_a_task_and_an_actor() -> None:
    expected = InProcessCluster(linear_model_creator(), num_workers=2)
    expected.step(5)
    assert same_bits(ray.get(task.remote("ps")), expected.weights())
    actor = Actor.remote()  # type: ignore[attr-defined]
    for strategy in ("simple", "ps"):
        assert same_bits(ray.get(actor.train.remote(strategy)), expected.weights())
    ray.kill(actor)
