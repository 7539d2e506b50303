"""A model without any framework: logistic regression in NumPy, its gradient in closed form.

It is a `steepest.Model`, as an adapter for a framework is.
It reads 89% of scikit-learn's small digits that it has not seen; --strategy allreduce (or another one).
Needs `pip install 'steepest[demo]'`.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit("needs scikit-learn: pip install 'steepest[demo]'") from error

from steepest import Computed, DistributedSGD, Model, OptimizerSpec, ParameterLayout
from steepest.core.data.sources import as_source


class LogisticRegression(Model):
    """A softmax regression in float64, whose loss is the mean cross-entropy."""

    def __init__(self, data: Any, classes: int, batch_size: int, lr: float = 0.5) -> None:
        self.data, self.batch_size = as_source(data, batch_size)
        self.weights = {"weight": np.zeros((classes, data[0].shape[1])), "bias": np.zeros(classes)}
        self.layout = self.plan()
        # servers make the optimizer anew over their chunks: its settings and the names matter
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in self.weights]
        names = dict(zip(map(id, parameters), self.weights, strict=True))
        self.optimizer_spec = OptimizerSpec.read(torch.optim.SGD(parameters, lr=lr), names)

    def plan(self, **cut: Any) -> ParameterLayout:
        shapes = [(name, w.shape, torch.float64, True) for name, w in self.weights.items()]
        return ParameterLayout.plan(shapes, **cut)

    def relayout(self, cut: Any) -> None:
        self.layout = self.plan(split_tensors=not cut.whole, chunk_bytes=cut.chunk_bytes)

    def views(self, vector: torch.Tensor) -> dict[str, np.ndarray]:
        entries = enumerate(self.layout.entries)
        return {entry.name: self.layout.entry_view(vector, i).numpy() for i, entry in entries}

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        for name, view in self.views(weights).items():
            view[...] = self.weights[name]
        self.gradients = self.views(gradients)
        self.move(weights)

    def move(self, weights: torch.Tensor) -> None:
        self.weights = self.views(weights)

    def forward(self, batch: Any) -> tuple[np.ndarray, Computed]:
        features, labels = map(np.asarray, batch)
        scores = features @ self.weights["weight"].T + self.weights["bias"]
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        loss = -logs[np.arange(len(labels)), labels].mean()
        found = {"accuracy": (logs.argmax(axis=1) == labels).mean()}
        return logs, Computed(loss, len(labels), len(labels), found)

    def compute_gradients(self, batch: Any, ready: Any, metrics: bool) -> Computed:
        logs, computed = self.forward(batch)
        features, labels = map(np.asarray, batch)
        error = (np.exp(logs) - np.eye(logs.shape[1])[labels]) / len(labels)
        for name, gradient in (("bias", error.sum(axis=0)), ("weight", error.T @ features)):
            self.gradients[name][...] = gradient
            ready(self.layout.index[name], computed.weight, True)  # it may leave
        return computed if metrics else Computed(computed.loss, len(labels), len(labels), {})

    def evaluate(self, batch: Any) -> Computed:
        return self.forward(batch)[1]

    def source(self, data: Any, batch_size: int) -> Any:
        return as_source(data, batch_size)[0]

    def state(self) -> dict[str, torch.Tensor]:
        return {}  # nothing but parameters

    def load_state(self, state: Any) -> None:
        pass


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ps")
    strategy, (x, y) = parser.parse_args(argv).strategy, load_digits(return_X_y=True)
    train, test = (x[:1500] / 16, y[:1500]), (x[1500:] / 16, y[1500:])
    with DistributedSGD(lambda *_: LogisticRegression(train, 10, 32), 2, strategy=strategy) as sgd:
        sgd.fit(epochs=10, progress=False)
        seen = sgd.evaluate(test).metrics["accuracy"]
    print(f"test accuracy {seen:.1%}")
    return seen


if __name__ == "__main__":
    main()
