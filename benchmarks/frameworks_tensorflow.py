"""What `benchmarks.frameworks` measures with TensorFlow: Keras networks, under `fit` and as models."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from steepest import TensorFlowModel

SAMPLES = 4096
SHAPE = (28, 28, 1)


@dataclass(frozen=True)
class Workload:
    """A network on random pictures of 28 x 28, and its optimizer."""

    says: str
    layers: Callable[[], list[Any]]
    optimizer: Callable[[], Any]
    batch: int
    steps: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(0)
        x = generator.normal(size=(SAMPLES, *SHAPE)).astype(np.float32)
        return x, generator.integers(0, 10, SAMPLES)

    def model(self) -> Any:
        keras.utils.set_random_seed(0)
        logits = keras.layers.Dense(10)
        model = keras.Sequential([keras.Input(SHAPE), *self.layers(), logits])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(self.optimizer(), loss)
        return model


def convolutions() -> list[Any]:
    found: list[Any] = []
    for filters in (32, 64):
        found += [keras.layers.Conv2D(filters, 3, padding="same", activation="relu")]
        found += [keras.layers.AveragePooling2D(2)]
    return [*found, keras.layers.Flatten(), keras.layers.Dense(256, activation="relu")]


def dense(*sizes: int) -> list[Any]:
    return [
        keras.layers.Flatten(),
        *(keras.layers.Dense(size, activation="relu") for size in sizes),
    ]


WORKLOADS = {
    "convnet": Workload(
        "0.8 million parameters, batch 64, Adam",
        convolutions,
        lambda: keras.optimizers.Adam(1e-3),
        64,
        20,
    ),
    "mlp": Workload(
        "1.9 million parameters, batch 256, Adam",
        lambda: dense(1024, 1024),
        lambda: keras.optimizers.Adam(1e-3),
        256,
        20,
    ),
    "large": Workload(
        "25 million parameters, batch 64, momentum",
        lambda: dense(4096, 4096, 1024),
        lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
        64,
        6,
    ),
    "small": Workload(
        "0.2 million parameters, batch 64, Adam",
        lambda: dense(256, 128),
        lambda: keras.optimizers.Adam(1e-3),
        64,
        200,
    ),
}


def model_creator(workload: Workload) -> Callable[[int, int], TensorFlowModel]:
    """The model as steepest trains it."""

    def create(worker_index: int, device_index: int) -> TensorFlowModel:
        return TensorFlowModel(workload.model(), data=workload.data(), batch_size=workload.batch)

    return create


class Plain:
    """Keras' `fit` in a process of its own."""

    def __init__(self, workload: Workload) -> None:
        self.model = workload.model()
        samples = tf.data.Dataset.from_tensor_slices(workload.data())
        self.batches = samples.repeat().batch(workload.batch).prefetch(2)

    def run(self, steps: int) -> float:
        """Take some steps; return the seconds that they took."""
        began = time.perf_counter()
        self.model.fit(self.batches, steps_per_epoch=steps, epochs=1, verbose=0)
        return time.perf_counter() - began


class Mirrored:
    """One of two processes under `MultiWorkerMirroredStrategy`, in a loop of one's own."""

    def __init__(self, workload: Workload, index: int, addresses: list[str]) -> None:
        task = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = workload.model()
            model.optimizer.build(model.trainable_variables)
        size = workload.batch * len(addresses)

        def replica_step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                losses = keras.ops.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True
                )
                loss = tf.nn.compute_average_loss(losses, global_batch_size=size)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)

        self.step = tf.function(lambda batch: strategy.run(replica_step, args=batch))
        samples = tf.data.Dataset.from_tensor_slices(workload.data()).repeat().batch(size)
        options = tf.data.Options()
        shards = tf.data.experimental.AutoShardPolicy.DATA
        options.experimental_distribute.auto_shard_policy = shards
        batches = samples.with_options(options)
        self.batches = iter(strategy.experimental_distribute_dataset(batches))

    def run(self, steps: int) -> float:
        """Take some steps; return the seconds that they took."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step(next(self.batches))
        return time.perf_counter() - began
