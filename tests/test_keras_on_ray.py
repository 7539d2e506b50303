"""Keras models in real processes: a worker is killed, a checkpoint continues in other processes."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

from pathlib import Path

from tests.keras_tools import compute_in, double  # noqa: F401 - a fixture

import numpy as np
import pytest

from steepest import DistributedSGD
from steepest.data.sampler import SamplePlan
from steepest.models.tensorflow import TensorFlowModel
from steepest.testing import Fault, with_faults
from tests.reference import difference
from tests.test_keras_training import BATCH, TASKS, X, Y, named

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.usefixtures("ray_cluster", "double"),
]
TASK = TASKS["adam"]


def creator(worker_index: int, device_index: int) -> TensorFlowModel:
    compute_in("float64")
    return TASK.creator()(worker_index, device_index)


def test_a_worker_is_killed_and_a_checkpoint_continues_in_other_processes(tmp_path: Path) -> None:
    faults = [Fault.kill("worker", 1, step=3)]
    (lives := tmp_path / "lives").mkdir()
    with DistributedSGD(with_faults(creator, faults, lives=lives), num_workers=2) as trainer:
        trainer.fit(steps=7, progress=False)
        assert trainer.stats().replaced == 1
        trainer.save(tmp_path / "checkpoint")
        trainer.fit(steps=5, progress=False)
        of_keras = trainer.foreach_model(lambda model: model.keras_model.get_weights())
        weights, evaluated = trainer.weights(), trainer.evaluate((X, Y))
        threads = trainer.for_model(
            lambda model: __import__("os").environ["TF_NUM_INTRAOP_THREADS"]
        )
    assert threads == "1"
    with DistributedSGD(creator, num_workers=2, strategy="allreduce") as other:
        other.restore(tmp_path / "checkpoint")
        other.fit(steps=5, progress=False)
        assert difference(other.weights(), weights) < 1e-13
    module, plan = TASK.compiled(), SamplePlan(len(X), 2 * BATCH, 0)
    for step in range(12):
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
