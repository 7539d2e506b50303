"""Keras models and settings to train with, and plain Keras' weights to compare with."""

# ruff: noqa: I001 - keras_tools comes first: it skips the module where there is no TensorFlow

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.adapters.keras_tools import double  # noqa: F401 - first: it skips the module where there is no TensorFlow

import keras
import numpy as np
import torch

from steepest.core.data.sampler import SamplePlan
from steepest.adapters.keras_variables import KerasVariables
from steepest.adapters.tensorflow import TensorFlowModel
from tests.reference import Weights

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(13, 3)), RNG.normal(size=(13, 2))
WORDS, WEIGHTS = RNG.integers(0, 5, (13, 4)), RNG.random(13)
STEPS, BATCH = 9, 2


def dense() -> Any:
    layers = [keras.layers.Dense(4, "tanh", kernel_regularizer="l2"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((3,)), *layers])


def words() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((4,)), layers.Embedding(5, 3), layers.Flatten(), layers.Dense(2)]
    )


def with_frozen() -> Any:
    module = dense()
    module.layers[0].trainable = False
    return module


def stairs() -> Any:
    return keras.optimizers.schedules.PiecewiseConstantDecay([2, 5], [0.03, 0.02, 0.01])


def nesterov() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


@dataclass(frozen=True)
class Task:
    """Something to train, by the library (`creator`) or by Keras alone (`trace`)."""

    module: Callable[[], Any] = dense
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1, momentum=0.9)
    data: tuple[Any, ...] = (X, Y)
    metrics: tuple[str, ...] = ()

    def compiled(self, eagerly: bool = False) -> Any:
        keras.utils.set_random_seed(1)
        module = self.module()
        settings = {"metrics": list(self.metrics), "run_eagerly": eagerly}
        module.compile(self.optimizer(), "mse", **settings)
        return module

    def creator(self) -> Callable[[int, int], TensorFlowModel]:
        def create(worker_index: int, device_index: int) -> TensorFlowModel:
            return TensorFlowModel(self.compiled(), data=self.data, batch_size=BATCH)

        return create

    def trace(self, replicas: int) -> list[Weights]:
        """The weights before the first step of Keras' `train_on_batch` and after each."""
        module = self.compiled(eagerly=True)  # to trace a graph takes longer than the steps
        plan = SamplePlan(len(X), replicas * BATCH, 0)
        found = [named(module)]
        for step in range(STEPS):
            index = plan.share(step, 0, 1)
            module.train_on_batch(*(array[index] for array in self.data))
            found.append(named(module))
        return found


def named(module: Any) -> Weights:
    parameters = KerasVariables(module).parameters
    return {name: torch.from_numpy(v.numpy().copy()) for name, v in parameters.items()}


TASKS = {
    "momentum": Task(),
    "adam": Task(optimizer=lambda: keras.optimizers.Adam(stairs(), amsgrad=True)),
    "weights": Task(data=(X, Y, WEIGHTS), optimizer=lambda: keras.optimizers.Adagrad(0.1)),
    "words": Task(words, nesterov, (WORDS, Y)),
    "frozen": Task(with_frozen, lambda: keras.optimizers.RMSprop(0.01, clipnorm=0.5)),
}
