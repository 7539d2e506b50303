"""Keras models under every strategy: the weights of Keras' own training in one process."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from tests.adapters.keras_tools import compute_in, double  # noqa: F401 - a fixture

import keras
import numpy as np
import pytest
import torch

from steepest import DistributedSGD
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.local import LocalStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.strategies.simple import SimpleStrategy
from steepest.core.data.sampler import SamplePlan
from steepest.adapters.tensorflow import TensorFlowModel
from steepest.testing import Fault, InProcessCluster, replay
from tests.simulation.run import run_config
from tests.pairs import diagonal, mostly_full
from tests.reference import Weights, difference, same_bits
from tests.adapters.keras_tasks import BATCH, RNG, STEPS, TASKS, WORDS, Task, X, Y, named

pytestmark = pytest.mark.usefixtures("double")


@cache
def serial(name: str, replicas: int) -> list[Weights]:
    return TASKS[name].trace(replicas)


def of_keras(cluster: InProcessCluster) -> list[Weights]:
    """The weights that each worker's Keras model has, as a function of a user's sees them."""
    futures = [
        worker.at_version(0, STEPS, lambda replicas: named(replicas.models[0].keras_model))
        for worker in cluster.workers
    ]
    return [cluster.wait(future, "the models") for future in futures]


TOGETHER = {
    "ps": ParameterServerStrategy(num_servers=2, chunk_bytes=64),
    "allreduce": AllreduceStrategy(chunk_bytes=64),
    "simple": SimpleStrategy(),
}


@diagonal(name=TASKS, workers=[2, 3, 1], strategy=TOGETHER)
def test_synchronous_training_equals_keras_in_one_process(
    name: str, workers: int, strategy: str
) -> None:
    cluster = InProcessCluster(
        TASKS[name].creator(), num_workers=workers, strategy=TOGETHER[strategy]
    )
    cluster.step(STEPS)
    expected = serial(name, workers)
    assert difference(cluster.weights(), expected[STEPS]) < 1e-12
    assert difference(expected[0], expected[STEPS]) > 1e-3
    for of_a_worker in of_keras(cluster):
        assert difference(of_a_worker, expected[STEPS]) < 1e-12


ALONE = {
    "async": ParameterServerStrategy(mode="async"),
    "ssp": ParameterServerStrategy(mode="ssp", staleness=1),
    "local": LocalStrategy(sync_every=1),
}


@pytest.mark.parametrize("strategy", mostly_full(ALONE, "async", "local"))
def test_one_worker_takes_the_steps_of_keras_whatever_the_strategy(strategy: str) -> None:
    cluster = InProcessCluster(TASKS["adam"].creator(), strategy=ALONE[strategy])
    cluster.step(STEPS)
    for weights in (cluster.weights(), *of_keras(cluster)):
        assert difference(weights, serial("adam", 1)[STEPS]) < 1e-12


def dropout() -> Any:
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    return keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(2)])


REPLAYED = {
    "async": (ParameterServerStrategy(mode="async"), 2),
    "corrected": (ParameterServerStrategy(mode="async", correction="learning_rate"), 2),
    "ssp": (ParameterServerStrategy(mode="ssp", staleness=1), 3),
    "local": (LocalStrategy(sync_every=2), 2),
    "ps": (ParameterServerStrategy(), 2),
}


@pytest.mark.parametrize("name", mostly_full(REPLAYED, "corrected", "local"))
def test_a_run_is_replayed_serially_to_the_same_bits(name: str) -> None:
    creator = Task(dropout, lambda: keras.optimizers.Adam(0.01)).creator()
    strategy, workers = REPLAYED[name]
    cluster = InProcessCluster(
        creator, num_workers=workers, strategy=strategy, keep_log=True, shuffle=1
    )
    cluster.step(STEPS)
    assert same_bits(replay(cluster.log(), creator), cluster.weights())


def test_a_worker_that_dies_is_replaced_and_the_weights_are_those_of_keras() -> None:
    cluster = InProcessCluster(
        TASKS["adam"].creator(),
        num_workers=3,
        strategy=TOGETHER["ps"],
        faults=[Fault.kill("worker", 1, step=3, at="push")],
        replaces=True,
    )
    cluster.step(STEPS)
    assert cluster.unmet == []
    assert difference(cluster.weights(), serial("adam", 3)[STEPS]) < 1e-12


def test_a_checkpoint_continues_under_another_strategy(tmp_path: Path, simulated: None) -> None:
    config = run_config()

    def creator(worker_index: int, device_index: int) -> TensorFlowModel:
        compute_in("float64")  # which is of each thread
        return TASKS["adam"].creator()(worker_index, device_index)

    with DistributedSGD(creator, num_workers=2, strategy=TOGETHER["ps"], run_config=config) as one:
        one.fit(steps=4, progress=False)
        one.save(tmp_path / "checkpoint")
    with DistributedSGD(creator, num_workers=2, strategy="allreduce", run_config=config) as other:
        other.restore(tmp_path / "checkpoint")
        other.fit(steps=STEPS - 4, progress=False)
        assert difference(other.weights(), serial("adam", 2)[STEPS]) < 1e-12


def test_a_local_run_equals_keras_models_that_are_averaged() -> None:
    task = Task()
    cluster = InProcessCluster(task.creator(), num_workers=2, strategy=LocalStrategy(sync_every=2))
    cluster.step(2)
    modules = [task.compiled(eagerly=True) for _ in range(2)]
    shared = modules[0].get_weights()
    plan = SamplePlan(len(X), 2 * 2 * BATCH, 0)
    for step in range(2):
        seen, changes = [], []
        for worker, module in enumerate(modules):
            module.set_weights(shared)
            shares = [plan.share(step, 2 * worker + update, 4) for update in range(2)]
            for index in shares:
                module.train_on_batch(X[index], Y[index])
            seen.append(sum(map(len, shares)))
            changes.append([w - old for w, old in zip(module.get_weights(), shared, strict=True)])
        both = zip(shared, *changes, strict=True)
        shared = [w + (seen[0] * a + seen[1] * b) / sum(seen) for w, a, b in both]
    modules[0].set_weights(shared)
    assert difference(cluster.weights(), named(modules[0])) < 1e-12


def test_loss_and_metrics_are_those_of_keras() -> None:
    task = Task(metrics=("mae",))
    cluster = InProcessCluster(task.creator(), num_workers=2, strategy=TOGETHER["ps"])
    module, plan = task.compiled(eagerly=True), SamplePlan(len(X), 2 * BATCH, 0)
    for step, result in enumerate(cluster.step(4)):
        index = plan.share(step, 0, 1)
        loss, error = module.train_on_batch(X[index], Y[index])
        module.reset_metrics()
        assert result.loss == pytest.approx(float(loss), abs=1e-12)
        assert result.metrics["mae"] == pytest.approx(float(error), abs=1e-12)
        assert result.samples == len(index)


def test_class_weights_are_sample_weights_and_a_worker_predicts() -> None:
    def classes() -> Any:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])

    labels, costs = RNG.integers(0, 2, 13), {0: 1.0, 1: 5.0}
    weights = np.array(list(costs.values()))[labels]

    def compiled(eagerly: bool) -> Any:
        keras.utils.set_random_seed(1)
        module, loss = classes(), "sparse_categorical_crossentropy"
        module.compile(keras.optimizers.Nadam(0.1), loss, run_eagerly=eagerly)
        return module

    def creator(worker_index: int, device_index: int) -> TensorFlowModel:
        return TensorFlowModel(compiled(False), data=(X, labels, weights), batch_size=BATCH)

    cluster = InProcessCluster(creator, num_workers=2)
    cluster.step(4)
    module, plan = compiled(True), SamplePlan(len(X), 2 * BATCH, 0)
    for step in range(4):
        index = plan.share(step, 0, 1)
        module.train_on_batch(X[index], labels[index], class_weight=costs)
    assert difference(cluster.weights(), named(module)) < 1e-12
    predict = cluster.workers[0].at_version(
        0, 4, lambda replicas: replicas.models[0].keras_model.predict(X, verbose=0)
    )
    predicted = cluster.wait(predict, "predictions")
    assert np.allclose(predicted, module.predict(X, verbose=0), atol=1e-12)


def test_float32_equals_keras_to_rounding() -> None:
    compute_in("float32")
    data = X.astype(np.float32), Y.astype(np.float32)
    task = Task(data=data, optimizer=lambda: keras.optimizers.Adam(0.01))
    cluster = InProcessCluster(task.creator(), num_workers=2, strategy=TOGETHER["ps"])
    cluster.step(STEPS)
    assert difference(cluster.weights(), task.trace(2)[STEPS]) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {"devices_per_worker": 2, "accumulate": 2, "num_workers": 1},
        {"global_batch_size": 5, "num_workers": 2},
    ],
)
def test_a_step_may_be_cut_into_devices_micro_batches_and_uneven_shares(settings: Any) -> None:
    task = TASKS["weights"]
    cluster = InProcessCluster(task.creator(), strategy=TOGETHER["ps"], **settings)
    cluster.step(4)
    module = task.compiled(eagerly=True)
    plan = cluster.job.plan()
    for step in range(4):
        index = plan.share(step, 0, 1)
        module.train_on_batch(*(array[index] for array in task.data))
    assert difference(cluster.weights(), named(module)) < 1e-12


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
def test_a_model_is_saved_with_the_running_means_of_all_workers(
    tmp_path: Path, simulated: None
) -> None:
    task = Task(dropout, lambda: keras.optimizers.Adam(0.01))

    def creator(worker_index: int, device_index: int) -> TensorFlowModel:
        compute_in("float64")  # which is of each thread
        return task.creator()(worker_index, device_index)

    with DistributedSGD(creator, num_workers=2, run_config=run_config()) as sgd:
        sgd.fit(steps=3, progress=False)
        states = sgd.foreach_model(lambda model: model.state())
        assert states[0].keys() == {
            "batch_normalization/moving_mean",
            "batch_normalization/moving_variance",
        }
        assert not torch.equal(*(state["batch_normalization/moving_mean"] for state in states))
        evaluated = sgd.evaluate((X, Y))
        # as the page says
        means = {n: v for n, v in sgd.state_dict().items() if n not in sgd.weights()}
        path = str(tmp_path / "model.keras")

        def save(model: Any) -> None:
            model.load_state(means)
            model.keras_model.save(path)

        sgd.for_model(save)
    module = keras.models.load_model(path, compile=False)
    module.compile(loss="mse")
    found = float(module.evaluate(X, Y, verbose=0))
    assert evaluated.loss == pytest.approx(found, abs=1e-12)


def weighed() -> Any:
    """Classes of words, of which zeros are masked; metrics with and without the samples' weights."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    inputs = keras.Input((4,), dtype="int32")
    words = layers.Embedding(5, 3, mask_zero=True)(inputs)
    module = keras.Model(inputs, layers.Dense(2)(words))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    module.compile(
        keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], weighted_metrics=["accuracy"]
    )
    return module


def flat() -> Any:
    keras.utils.set_random_seed(0)
    module = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    module.compile(
        keras.optimizers.SGD(0.1), loss, metrics=["accuracy"], weighted_metrics=["accuracy"]
    )
    return module


CLASSES = RNG.integers(0, 2, (12, 4))
UNEVEN = np.where(np.arange(12) < 6, 10.0, 0.1)  # the first of two workers has nearly all


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (flat, (WORDS[:12] - 2.0, CLASSES[:, 0], UNEVEN)),
        (weighed, (WORDS[:12], CLASSES)),
        (weighed, (WORDS[:12], CLASSES, UNEVEN[:, None] * np.ones((1, 4)))),
    ],
    ids=["weights", "mask", "mask and weights"],
)
def test_metrics_are_those_of_keras_however_samples_are_dealt_out(
    make: Any, data: Any, workers: int, simulated: None
) -> None:
    """Of a data set and of a step, each with its own weights."""

    def creator(worker_index: int, device_index: int) -> TensorFlowModel:
        compute_in("float64")  # which is of each thread
        return TensorFlowModel(make(), data=data, batch_size=12 // workers)

    module = make()
    x, y, *weights = data
    weight = weights[0] if weights else None
    expected = module.evaluate(
        x, y, sample_weight=weight, batch_size=12, verbose=0, return_dict=True
    )
    expected.pop("loss")
    trained = module.train_on_batch(x, y, sample_weight=weight, return_dict=True)
    trained.pop("loss")
    with DistributedSGD(creator, num_workers=workers, run_config=run_config()) as sgd:
        found = [sgd.evaluate(data, batch_size=size).metrics for size in (12, 5)]
        step = sgd.step().metrics
    for each in found:
        assert each == pytest.approx(expected, abs=1e-6)  # Keras' own are float32
    assert step == pytest.approx(trained, abs=1e-6)
    assert weight is None or len(set(map(float, expected.values()))) > 1
