"""TensorFlowModel: a Keras model on TensorFlow, with its data, as a `Model`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steepest.adapters.tf_dataset import TensorFlowDataset
from steepest.core.data.protocol import Source
from steepest.core.models.protocol import (
    Computed,
    Model,
    Ready,
    checked_metrics,
    checked_weight,
)
from steepest.core.tensors.layout import ChunkSpec, ParameterLayout
from steepest.data.sources import as_source
from steepest.errors import ConfigurationError, ModelError

if TYPE_CHECKING:
    from steepest.adapters.keras_network import BatchResult


class TensorFlowModel(Model):
    """One replica: a Keras model on TensorFlow, with its data and batch size.

    The Keras model's trained variables share the memory of the library's flat vector, so that it
    has the current weights between steps (``sgd.for_model(lambda model:
    model.keras_model.get_weights())``).

    Gradients are means over a batch, as Keras' losses are. Dropout and other random layers are
    seeded for each batch anew, by the job's seed and the step. Metrics of several batches are
    averaged as Keras does: those that are means (accuracies, losses) by their own weights, of
    samples, masks and `weighted_metrics`, which is exact; others (AUC) by numbers of samples: a
    mean over batches, which is not exact.

    Args:
        keras_model: a `keras.Model`, compiled or not; built here if need be.
        data: arrays or tensors of one length as (x, y) or (x, y, sample_weight), where x and y may
            be tuples or dicts of arrays; a `tf.data.Dataset`; or what `TorchModel` takes.
        batch_size: samples per replica and step; by default that of the data set's ``.batch()``.
        loss: as `keras.Model.compile` takes it, for a model that is not compiled.
        optimizer: a Keras optimizer; by default the compiled model's.
        metrics: as `keras.Model.compile` takes them, for a model that is not compiled.
        learning_rate: the learning rate as a function of the number of steps before it (0 in the first
            step, whose `StepResult.step` is 1), instead of the optimizer's.

    Raises:
        ConfigurationError: TensorFlow is not installed; no loss or no optimizer, an optimizer that
            servers cannot run, bad data.
        ModelError: a model that cannot be trained by parts of a batch, or has nothing to train.

    Example:
        >>> import keras  # doctest: +SKIP
        >>> network = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])  # doctest: +SKIP
        >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # doctest: +SKIP
        >>> network.compile("adam", loss, metrics=["accuracy"])  # doctest: +SKIP
        >>> model = TensorFlowModel(network, data=(x, y), batch_size=32)  # doctest: +SKIP
    """

    def __init__(
        self,
        keras_model: Any,
        *,
        data: Any,
        batch_size: int | None = None,
        loss: Any = None,
        optimizer: Any = None,
        metrics: Any = None,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        network = _import_network()
        optimizer = network.compiled(keras_model, loss, optimizer, metrics)
        self.keras_model = keras_model
        self.data, self.batch_size = _as_source(data, batch_size)
        self._network = network.KerasNetwork(keras_model, self._sample)
        self._variables = self._network.variables
        self._trained = list(self._variables.trained)
        if not self._trained:
            raise ModelError(
                "nothing to train: every layer has trainable=False, or no weights; set trainable=True on one"
            )
        trained = {name: self._variables.parameters[name] for name in self._trained}
        self.optimizer_spec = network.read_optimizer(optimizer, trained, learning_rate)
        self.layout = self._plan(ChunkSpec())
        self._vector: torch.Tensor | None = None  # the flat weights, after `bind`
        self._gradients: dict[str, torch.Tensor] = {}

    def _sample(self) -> Any:
        """Return a batch of one sample."""
        if self.data.size is None:
            raise ModelError(
                "the Keras model is not built, and its data choose their own samples: call the "
                "model once, or give its first layer a keras.Input"
            )
        return next(self.data.open([np.zeros(1, np.int64)], prefetch=False))

    def _plan(self, cut: ChunkSpec) -> ParameterLayout:
        trained = set(self._trained)
        parameters = [
            (name, tuple(value.shape), value.dtype, name in trained)
            for name, value in self._values(self._variables.parameters)
        ]
        return ParameterLayout.plan(
            parameters,
            split_tensors=self.optimizer_spec.elementwise and not cut.whole,
            together=self.optimizer_spec.together,
            chunk_bytes=cut.chunk_bytes,
            fragments=cut.fragments,
            aligned=True,  # variables lie in the flat vector itself
        )

    def _values(self, variables: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and values of variables; the values lie where the variables have them."""
        for name, variable in variables.items():
            yield name, self._variables.value(variable)

    # -- Model ---------------------------------------------------------------------------------

    def relayout(self, cut: ChunkSpec) -> None:
        """Cut `layout` into other chunks; see `steepest.core.models.protocol.Model.relayout`."""
        self.layout = self._plan(cut)

    def bind(self, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Move the parameters into flat vectors; see `steepest.core.models.protocol.Model.bind`.

        Raises:
            ModelError: the vectors do not lie in the processor's memory.
        """
        if weights.device.type != "cpu":
            raise ModelError(
                f"TensorFlowModel trains on the CPU, not on {weights.device}: leave GPUs out of "
                "ResourceConfig"
            )
        for name, value in self._values(self._variables.parameters):
            self.layout.entry_view(weights, self.layout.index[name]).copy_(value)
        self._gradients = {
            name: self.layout.entry_view(gradients, self.layout.index[name])
            for name in self._trained
        }
        self.move(weights)

    def move(self, weights: torch.Tensor) -> None:
        """Move trained variables into another vector; see `Model.move`."""
        self._vector = weights
        self._variables.attach(
            {
                name: self.layout.entry_view(weights, self.layout.index[name])
                for name in self._trained
            }
        )

    def compute_gradients(self, batch: Any, ready: Ready, metrics: bool) -> Computed:
        """Compute a batch's gradients in one graph; see `Model.compute_gradients`."""
        result = self._network.gradients(batch, metrics)
        weight = checked_weight(result.weight)
        for name, gradient in result.gradients.items():
            self._hand_over(self.layout.index[name], gradient, self._gradients[name], weight, ready)
        return self._computed(result)

    def _hand_over(
        self,
        index: int,
        gradient: torch.Tensor | None,
        view: torch.Tensor,
        weight: float,
        ready: Ready,
    ) -> None:
        """Copy an entry's gradient into its view of the flat vector, and report it."""
        # Of an entry in several chunks, the first part leaves while the next one is copied.
        if gradient is None:
            view.zero_()
            ready(index, weight, False)
            return
        chunks = self.layout.chunks_of[index]
        if len(chunks) < 2:
            view.copy_(gradient)
            ready(index, weight, True)
            return
        for chunk in chunks:
            slices = self.layout.chunks[chunk].slices
            part = next(slice(p.start, p.stop) for p in slices if p.entry == index)
            view.view(-1)[part].copy_(gradient.view(-1)[part])
            ready(index, weight, True, chunk)

    def evaluate(self, batch: Any) -> Computed:
        """Return loss and metrics in inference mode; see `Model.evaluate`."""
        return self._computed(self._network.evaluate(batch))

    @staticmethod
    def _computed(result: BatchResult) -> Computed:
        metrics = checked_metrics(result.metrics)
        weight = checked_weight(result.weight)
        return Computed(result.loss, weight, result.samples, metrics, result.weights)

    def source(self, data: Any, batch_size: int) -> Source:
        """Return a source of batches for `evaluate`."""
        return _as_source(data, batch_size)[0]

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of running means and the like, and of changed frozen parameters, by name."""
        state = {name: value.clone() for name, value in self._values(self._variables.state)}
        for name, value, installed in self._frozen():
            if not torch.equal(value, installed):
                state[name] = value.clone()
        return state

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the values that `state` returned.

        Frozen parameters that it does not name get the installed ones.

        Raises:
            ModelError: the model has no variable of that name, or of another shape.
        """
        frozen = {name: installed for name, _, installed in self._frozen()}
        for name, value in {**frozen, **state}.items():
            if name in self._trained:
                continue  # it was frozen when the state was taken
            variable = self._variables.state.get(name)
            if variable is None and name in frozen:
                variable = self._variables.parameters[name]
            if variable is None or tuple(variable.shape) != tuple(value.shape):
                has = "no variable" if variable is None else f"one of shape {tuple(variable.shape)}"
                raise ModelError(
                    f"the state has {name!r} of shape {tuple(value.shape)}, the model has {has} of "
                    "that name: was it made by another model?"
                )
            self._variables.set_value(variable, value)

    def _frozen(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (name, the model's value now, the installed value) of each frozen parameter."""
        for name, value in self._values(self._variables.parameters):
            if name not in self._gradients and self._vector is not None:
                yield name, value, self.layout.entry_view(self._vector, self.layout.index[name])


def _import_network() -> Any:
    """Return the modules that need TensorFlow; ConfigurationError: it is not installed."""
    try:
        from steepest.adapters import keras_network
    except ImportError as error:
        raise ConfigurationError(
            f"TensorFlowModel needs TensorFlow and Keras 3 ({error}): pip install "
            "'steepest[tensorflow]'"
        ) from error
    return keras_network


def _as_source(data: Any, batch_size: int | None) -> tuple[Source, int]:
    """Return training data as a source, and the batch size; see `steepest.data.sources.as_source`."""
    if type(data).__module__.startswith("tensorflow.python.data."):
        data = TensorFlowDataset(data)
        batch_size = batch_size or data.batch_size
    own = (tuple, list, dict, *_tensor_types())
    if isinstance(data, (tuple, list)) and any(isinstance(part, own) for part in data):
        arrays: list[Any] = []
        shape = _flatten(data, arrays)
        source, batch_size = as_source(tuple(arrays), batch_size)
        return _Packed(source, shape), batch_size
    return as_source(data, batch_size)


def _flatten(data: Any, arrays: list[Any]) -> Any:
    """Append the arrays of a structure of tuples, lists and dicts to a list; return their places."""
    if isinstance(data, dict):
        return {key: _flatten(value, arrays) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return tuple(_flatten(value, arrays) for value in data)
    arrays.append(data.numpy() if isinstance(data, _tensor_types()) else data)
    return len(arrays) - 1


def _tensor_types() -> tuple[Any, ...]:
    """Return TensorFlow's class of tensors, which is imported already."""
    import tensorflow as tf

    return (tf.Tensor,)


def _pack(places: Any, arrays: Any) -> Any:
    """Return a structure with arrays in their places."""
    if isinstance(places, dict):
        return {key: _pack(place, arrays) for key, place in places.items()}
    if isinstance(places, tuple):
        return tuple(_pack(place, arrays) for place in places)
    return arrays[places]


class _Packed:
    """A source that puts the arrays of another one's batches into a structure."""

    def __init__(self, source: Source, places: Any) -> None:
        self.size = source.size
        self._source, self._places = source, places
        self.contents = getattr(source, "contents", None)

    def open(self, shares: Iterable[Any], prefetch: bool = True) -> Iterator[Any]:
        for batch in self._source.open(shares, prefetch):
            yield _pack(self._places, batch)
