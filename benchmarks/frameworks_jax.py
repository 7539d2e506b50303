"""What `benchmarks.frameworks` measures with JAX: Flax networks, in a plain loop and as models."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen

from steepest import JaxModel

SAMPLES = 4096


class Layers(linen.Module):
    sizes: tuple[int, ...]

    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = x.reshape(len(x), -1)
        for size in self.sizes:
            x = linen.relu(linen.Dense(size)(x))
        return linen.Dense(10)(x)


class Convolutions(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        for features in (32, 64):
            x = linen.relu(linen.Conv(features, (3, 3))(x))
            x = linen.avg_pool(x, (2, 2), (2, 2))
        x = linen.relu(linen.Dense(256)(x.reshape(len(x), -1)))
        return linen.Dense(10)(x)


@dataclass(frozen=True)
class Workload:
    """A network on random pictures of 28 x 28, and its optimizer."""

    says: str
    network: Callable[[], linen.Module]
    optimizer: Callable[[], Any]
    batch: int
    steps: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(0)
        x = generator.normal(size=(SAMPLES, 28, 28, 1)).astype(np.float32)
        return x, generator.integers(0, 10, SAMPLES)

    def variables(self) -> Any:
        return self.network().init(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))


WORKLOADS = {
    "convnet": Workload(
        "0.8 million parameters, batch 64, Adam", Convolutions, lambda: optax.adam(1e-3), 64, 10
    ),
    "mlp": Workload(
        "1.9 million parameters, batch 256, Adam",
        lambda: Layers((1024, 1024)),
        lambda: optax.adam(1e-3),
        256,
        20,
    ),
    "large": Workload(
        "25 million parameters, batch 64, momentum",
        lambda: Layers((4096, 4096, 1024)),
        lambda: optax.sgd(1e-3, momentum=0.9),
        64,
        4,
    ),
    "small": Workload(
        "0.2 million parameters, batch 64, Adam",
        lambda: Layers((256, 128)),
        lambda: optax.adam(1e-3),
        64,
        100,
    ),
}


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def model_creator(workload: Workload) -> Callable[[int, int], JaxModel]:
    """The model as steepest trains it."""

    def create(worker_index: int, device_index: int) -> JaxModel:
        return JaxModel.from_flax(
            workload.network(),
            workload.variables(),
            loss=cross_entropy,
            optimizer=workload.optimizer(),
            data=workload.data(),
            batch_size=workload.batch,
        )

    return create


class Plain:
    """The usual loop of JAX in a process of its own."""

    def __init__(self, workload: Workload) -> None:
        self.x, self.y = workload.data()
        self.batch = workload.batch
        self.generator = np.random.default_rng(0)
        network, optimizer = workload.network(), workload.optimizer()
        self.params = workload.variables()["params"]
        self.state = optimizer.init(self.params)

        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            def loss(params: Any) -> Any:
                return cross_entropy(network.apply({"params": params}, x), y)

            value, gradients = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, value

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def run(self, steps: int) -> float:
        """Take some steps; return the seconds that they took."""
        began = time.perf_counter()
        for _ in range(steps):
            index = self.generator.integers(0, SAMPLES, self.batch)
            batch = self.x[index], self.y[index]
            self.params, self.state, loss = self.step(self.params, self.state, *batch)
            float(loss)  # as a loop that shows it
        return time.perf_counter() - began
