"""Trainers inside tasks, actors, placement groups and trials of Ray: with runtime="auto" they are jobs on that Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from steepest import DistributedSGD
from steepest.runtime.job_runtime import runtime
from steepest.testing import InProcessCluster, linear_model_creator
from tests.reference import Weights, same_bits

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.usefixtures("ray_cluster")]


@ray.remote(num_cpus=1)
def task(strategy: str) -> tuple[Weights, str]:
    return train(strategy)


@ray.remote(num_cpus=1)
class Actor:
    def train(self, strategy: str) -> tuple[Weights, str]:
        return train(strategy)


def train(strategy: str) -> tuple[Weights, str]:
    """Return weights, and what has run the workers."""
    with DistributedSGD(linear_model_creator(), num_workers=2, strategy=strategy) as sgd:
        sgd.fit(steps=5, progress=False)
        return sgd.weights(), runtime().name


def trial(settings: dict[str, Any]) -> None:
    from ray import tune

    weights, name = train("ps")
    sums = {each: value.sum().item() for each, value in weights.items()}
    tune.report({"runtime": name, "sums": sums})


@pytest.fixture(scope="module")
def expected() -> Weights:
    cluster = InProcessCluster(linear_model_creator(), num_workers=2)
    cluster.step(5)
    return cluster.weights()


def test_inside_a_task_and_an_actor(expected: Weights) -> None:
    actor = Actor.remote()  # type: ignore[attr-defined]
    calls = [task.remote("ps"), *(actor.train.remote(each) for each in ("simple", "ps"))]
    for weights, name in ray.get(calls):
        assert name == "ray"
        assert same_bits(weights, expected)
    ray.kill(actor)


def test_inside_a_placement_group_workers_take_its_bundles(expected: Weights) -> None:
    group = placement_group([{"CPU": 1}] * 3)
    inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    weights, name = ray.get(task.options(scheduling_strategy=inside).remote("ps"))
    assert name == "ray"
    assert same_bits(weights, expected)
    remove_placement_group(group)


@pytest.mark.filterwarnings("ignore")  # Tune's own
def test_inside_a_trial_of_tune(expected: Weights, tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune", reason="pip install 'steepest[tune]'")
    settings = tune.RunConfig(storage_path=str(tmp_path), verbose=0)
    (refused,) = tune.Tuner(trial, run_config=settings).fit()
    assert "ResourcesError: 2 workers need {'CPU': 1.0} each, but" in str(refused.error)
    assert "tune.with_resources(trainable, DistributedSGD.resources(" in str(refused.error)
    own = tune.with_resources(trial, DistributedSGD.resources(2))
    (found,) = tune.Tuner(own, run_config=settings).fit()
    assert found.error is None
    assert found.metrics is not None
    assert found.metrics["runtime"] == "ray"
    assert found.metrics["sums"] == {each: value.sum().item() for each, value in expected.items()}
