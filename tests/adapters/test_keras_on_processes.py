"""Keras models in processes, which have the weights of Keras' own training; the benchmark."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

import os

from tests.adapters.keras_tools import compute_in, double  # noqa: F401 - a fixture

import numpy as np
import pytest

from steepest import DistributedSGD, RunConfig
from steepest.core.data.sampler import SamplePlan
from steepest.adapters.tensorflow import TensorFlowModel
from tests.reference import difference
from tests.adapters.keras_tasks import BATCH, TASKS, X, Y, named

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("machine", "double")]
TASK = TASKS["adam"]


def creator(worker_index: int, device_index: int) -> TensorFlowModel:
    compute_in("float64")
    return TASK.creator()(worker_index, device_index)


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_the_models_of_all_workers_are_those_of_keras(audit: float) -> None:
    with DistributedSGD(creator, num_workers=2, run_config=RunConfig(audit=audit)) as trainer:
        trainer.fit(steps=7, progress=False)
        of_keras = trainer.foreach_model(lambda model: model.keras_model.get_weights())
        threads = trainer.foreach_worker(lambda view: os.environ["TF_NUM_INTRAOP_THREADS"])
        weights, evaluated = trainer.weights(), trainer.evaluate((X, Y))
        assert "difference" not in [event.kind for event in trainer.stats().events]
    assert threads == ["1", "1"]
    module, plan = TASK.compiled(), SamplePlan(len(X), 2 * BATCH, 0)
    for step in range(7):
        index = plan.share(step, 0, 1)
        module.train_on_batch(X[index], Y[index])
    assert difference(weights, named(module)) < 1e-12
    assert evaluated.loss == pytest.approx(float(module.evaluate(X, Y, verbose=0)), abs=1e-12)
    for found in of_keras:
        for mine, own in zip(found, module.get_weights(), strict=True):
            assert np.allclose(mine, own, atol=1e-12)


def test_the_benchmark_of_frameworks_runs(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.frameworks import main

    settings = ["--framework", "tensorflow", "--workload", "small", "--rounds", "2", "--steps", "2"]
    found = main(settings)
    assert {who: len(times) for who, times in found["small"].items()} == {"plain": 2, "steepest": 2}
    assert "): plain " in capsys.readouterr().out
