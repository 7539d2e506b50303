"""Logistic regression in plain NumPy: a small example of a model without torch modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from steepest.data.sources import Source, as_source
from steepest.errors import ConfigurationError
from steepest.models.protocol import Arrive, Computed, Ready
from steepest.optim.spec import OptimizerSpec
from steepest.tensors.layout import ChunkSpec, ParameterLayout

Array = npt.NDArray[np.float64]


class NumpyLogisticRegression:
    """A softmax regression with its gradient in closed form, in float64, as a `Model`.

    Args:
        data: (features, labels): (N, F) floats and (N,) class indices.
        classes: number of classes.
        batch_size: samples per replica and step.
        learning_rate, momentum: of SGD.
        l2: the loss is the mean cross-entropy plus ``l2 / 2 * sum(weight ** 2)``.

    Raises:
        ConfigurationError: features or labels of another shape or dtype, or labels out of range.

    Example:
        >>> import numpy as np
        >>> model = NumpyLogisticRegression((np.eye(3), np.arange(3)), classes=3, batch_size=3)
        >>> model.layout.entries[1].shape
        (3, 3)
    """

    def __init__(
        self,
        data: tuple[Any, Any],
        *,
        classes: int,
        batch_size: int,
        learning_rate: float = 0.1,
        momentum: float = 0.0,
        l2: float = 0.0,
    ) -> None:
        features, labels = np.asarray(data[0], dtype=np.float64), np.asarray(data[1])
        shaped = (
            features.ndim == 2 and labels.ndim == 1 and labels.size and labels.dtype.kind in "iu"
        )
        if not shaped or labels.min() < 0 or labels.max() >= classes:
            raise ConfigurationError(
                f"features of shape {features.shape}, {labels.dtype} labels of shape "
                f"{labels.shape}: give (N, F) floats and (N,) integers, class indices below "
                f"classes={classes}"
            )
        self.data, self.batch_size = as_source((features, labels), batch_size)
        self._l2 = l2
        self._shapes = {"weight": (classes, features.shape[1]), "bias": (classes,)}
        self.layout = self._plan(ChunkSpec())
        self.optimizer_spec = OptimizerSpec.read(
            torch.optim.SGD(
                parameters := [
                    torch.nn.Parameter(torch.zeros(shape)) for shape in self._shapes.values()
                ],
                lr=learning_rate,
                momentum=momentum,
            ),
            dict(zip(map(id, parameters), self._shapes, strict=True)),
        )
        self._weights: dict[str, Array] = {
            name: np.zeros(shape) for name, shape in self._shapes.items()
        }
        self._gradients: dict[str, Array] = {}

    def _plan(self, cut: ChunkSpec) -> ParameterLayout:
        parameters = [(name, shape, torch.float64, True) for name, shape in self._shapes.items()]
        return ParameterLayout.plan(
            parameters, split_tensors=not cut.whole, chunk_bytes=cut.chunk_bytes
        )

    def relayout(self, cut: ChunkSpec) -> None:
        """Cut `layout` into other chunks; see `steepest.models.protocol.Model.relayout`."""
        self.layout = self._plan(cut)

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Move the parameters into flat vectors; see `steepest.models.protocol.Model.bind`."""
        for index, entry in enumerate(self.layout.entries):
            view = self.layout.entry_view(weights, index).numpy()
            view[...] = self._weights[entry.name]
            self._weights[entry.name] = view
            self._gradients[entry.name] = self.layout.entry_view(gradients, index).numpy()

    def move(self, weights: torch.Tensor) -> None:
        """Make the parameters views of another vector; see `Model.move`."""
        for index, entry in enumerate(self.layout.entries):
            self._weights[entry.name] = self.layout.entry_view(weights, index).numpy()

    def _forward(self, batch: Any) -> tuple[float, Array, Array, npt.NDArray[np.int64]]:
        features, labels = batch
        scores = features @ self._weights["weight"].T + self._weights["bias"]
        scores -= scores.max(axis=1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        penalty = 0.5 * self._l2 * float((self._weights["weight"] ** 2).sum())
        return penalty - float(logs[np.arange(len(labels)), labels].mean()), logs, features, labels

    def compute_gradients(
        self, batch: Any, ready: Ready, metrics: bool, arrive: Arrive = lambda entry: None
    ) -> Computed:
        """Compute a batch's gradient; see `steepest.models.protocol.Model.compute_gradients`."""
        arrive(None)
        loss, logs, features, labels = self._forward(batch)
        count = len(labels)
        difference = np.exp(logs)
        difference[np.arange(count), labels] -= 1
        difference /= count
        self._gradients["bias"][...] = difference.sum(axis=0)
        ready(self.layout.index["bias"], float(count), True)
        self._gradients["weight"][...] = (
            difference.T @ features + self._l2 * self._weights["weight"]
        )
        ready(self.layout.index["weight"], float(count), True)
        return Computed(loss, float(count), count, self._metrics(logs, labels) if metrics else {})

    def evaluate(self, batch: Any) -> Computed:
        """Return loss and accuracy of one batch."""
        loss, logs, _, labels = self._forward(batch)
        return Computed(loss, float(len(labels)), len(labels), self._metrics(logs, labels))

    @staticmethod
    def _metrics(logs: Array, labels: npt.NDArray[np.int64]) -> dict[str, float]:
        return {"accuracy": float((logs.argmax(axis=1) == labels).mean())}

    def source(self, data: Any, batch_size: int) -> Source:
        """Return a source of batches for `evaluate`."""
        return as_source((np.asarray(data[0], dtype=np.float64), np.asarray(data[1])), batch_size)[
            0
        ]

    def state(self) -> dict[str, torch.Tensor]:
        """Return an empty dict: every value is a parameter."""
        return {}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: there is no state."""
