"""Something to train with JAX, by the library or with a plain optax loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from steepest import JaxModel
from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.job import ModelCreator
from tests.reference import Weights, samples


def network(dtype: str = "float64") -> dict[str, Any]:
    """The parameters of a small perceptron, the same ones each time."""
    generator = np.random.default_rng(1)
    shapes = {"0.bias": (4,), "0.weight": (3, 4), "2.bias": (2,), "2.weight": (4, 2)}
    kind = jnp.dtype(dtype)
    return {name: generator.normal(0, 0.5, shape).astype(kind) for name, shape in shapes.items()}


def output_of(params: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ params["0.weight"] + params["0.bias"])
    return hidden @ params["2.weight"] + params["2.bias"]


def squared_error(params: Any, batch: Any) -> Any:
    x, y = batch
    return jnp.mean((output_of(params, x) - y) ** 2)


def with_noise(params: Any, batch: Any, rng: Any) -> Any:
    """Drops half of the inputs of each sample."""
    x, y = batch
    return squared_error(params, (x * jax.random.bernoulli(rng, 0.5, x.shape), y))


@dataclass(frozen=True)
class JaxTask:
    """Something to train in float64, by the library (`creator`) or serially (`train`)."""

    params: Callable[[], Any] = network
    loss: Callable[..., Any] = squared_error
    optimizer: Any = field(default_factory=lambda: optax.sgd(0.1))
    data: tuple[Any, ...] = field(default_factory=lambda: tuple(a.numpy() for a in samples(13)))
    batch_size: int = 2
    settings: Mapping[str, Any] = field(default_factory=dict)
    x64: bool = True

    def creator(self) -> ModelCreator:
        """A `model_creator`."""

        def create(worker_index: int, device_index: int) -> JaxModel:
            with jax.enable_x64(self.x64):
                return JaxModel(
                    self.params(),
                    loss=self.loss,
                    optimizer=self.optimizer,
                    data=self.data,
                    batch_size=self.batch_size,
                    **self.settings,
                )

        return create

    def train(self, replicas: int, steps: int, seed: int = 0) -> Weights:
        """Train with a plain optax loop on the samples that replicas take together in each step."""
        plan = SamplePlan(len(self.data[0]), replicas * self.batch_size, seed)
        with jax.enable_x64(self.x64):
            params = self.params()
            state = self.optimizer.init(params)
            gradients, update = jax.jit(jax.grad(self.loss)), jax.jit(self.optimizer.update)
            for step in range(steps):
                index = plan.share(step, 0, 1)
                found = gradients(params, tuple(array[index] for array in self.data))
                updates, state = update(found, state, params)
                params = optax.apply_updates(params, updates)
            return JaxModel.named(params)


def bound(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat vectors of weights and gradients to which a model is bound."""
    weights, gradients = model.layout.allocate(), model.layout.allocate()
    model.bind(weights, gradients)
    return weights, gradients


def classifier(x: Any, y: Any) -> JaxModel:
    """A model with three layers for the contract of all models: classes `y` of `x`."""
    sizes = [(3, 4), (4, 3), (3, 2)]
    generator = np.random.default_rng(1)
    params = {
        f"{2 * i}.{name}": generator.normal(0, 0.5, shape)
        for i, size in enumerate(sizes)
        for name, shape in (("bias", size[1:]), ("weight", size))
    }

    def loss(params: Any, batch: Any) -> Any:
        hidden, target = batch
        for i in range(3):
            hidden = hidden @ params[f"{2 * i}.weight"] + params[f"{2 * i}.bias"]
            hidden = jnp.tanh(hidden) if i < 2 else hidden
        losses = optax.softmax_cross_entropy_with_integer_labels(hidden, target)
        return losses.mean(), {"accuracy": jnp.mean(hidden.argmax(1) == target)}

    with jax.enable_x64(True):
        return JaxModel(params, loss=loss, optimizer=optax.sgd(0.1), data=(x, y), batch_size=4)
