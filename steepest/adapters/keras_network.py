"""A compiled Keras model as functions of a batch: loss, gradients by tape, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
import torch

from steepest.adapters.keras_optimizers import read_optimizer as read_optimizer
from steepest.adapters.keras_variables import KerasVariables, as_torch
from steepest.errors import ConfigurationError, ModelError

_MEAN_BY_WEIGHT = "mean_with_sample_weight"
_MEANS = ("sum_over_batch_size", "mean", _MEAN_BY_WEIGHT)


def compiled(model: Any, loss: Any, optimizer: Any, metrics: Any) -> Any:
    """Compile a model with what a user has given, if it is not compiled; return the optimizer.

    Args:
        model: the user's.
        loss, optimizer, metrics: as `keras.Model.compile` takes them, or None.

    Raises:
        ConfigurationError: there is no optimizer; a loss for a model that has one.
        ModelError: no Keras model, or one of another backend.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"keras_model is a {type(model).__name__}: give a keras.Model")
    if keras.backend.backend() != "tensorflow":
        raise ModelError(
            f"Keras runs on {keras.backend.backend()}: set KERAS_BACKEND=tensorflow before it is "
            "imported"
        )
    if model.compiled:
        if loss is not None or metrics is not None:
            raise ConfigurationError(
                "the Keras model is compiled, and loss= or metrics= are given besides: give them to "
                "compile(), or do not compile it"
            )
        return model.optimizer if optimizer is None else keras.optimizers.get(optimizer)
    if optimizer is None:
        raise ConfigurationError(
            "no optimizer: compile the Keras model, or give optimizer=, such as "
            "keras.optimizers.SGD(0.1)"
        )
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics)
    return model.optimizer


class BatchResult(NamedTuple):
    """What was computed of one batch."""

    loss: float  # with the losses of regularizers and layers
    weight: float  # of the batch in means
    samples: int
    metrics: dict[str, Any]  # by name, as Keras returns them
    weights: dict[str, float]  # in means, of those metrics that are Keras' means
    # by name of the variable, last layers first; None where there is none
    gradients: dict[str, torch.Tensor | None]


class KerasNetwork:
    """A compiled Keras model, built here from a batch of one sample if need be: its variables, and its steps."""

    # ConfigurationError, ModelError: a model that cannot be trained this way.

    def __init__(self, model: Any, sample: Callable[[], Any]) -> None:
        _check(model)
        self.model = model
        if not model.built or not model.variables:
            model(keras.utils.unpack_x_y_sample_weight(as_tensors(sample()))[0])
        self.variables = KerasVariables(model)
        self._functions: dict[tuple[Any, ...], _Function] = {}

    def gradients(self, batch: Any, metrics: bool) -> BatchResult:
        """Return loss and gradients of a batch in training mode, and metrics if they are wanted.

        Raises:
            ModelError: a variable that servers train was written to, or the loss depends on none of them.
        """
        self.variables.check_next()
        function, (loss, weight, samples, measured, gradients) = self._run(True, metrics, batch)
        if function.new:
            function.new = False
            if written := self.variables.written():
                raise ModelError(
                    f"the model writes to its trained variable {written[0]!r} in a step, which "
                    "servers alone change: leave such layers (SpectralNormalization) out, or make "
                    "the variable with trainable=False"
                )
        if not gradients:
            raise ModelError(
                "the loss does not depend on any variable that is trained: compute it from the model's output, or set "
                "trainable=True on a layer"
            )
        taken = iter(gradients)
        by_name = {
            name: as_torch(next(taken)) if has else None for name, has in function.present.items()
        }
        return BatchResult(float(loss), float(weight), int(samples), *_plain(measured), by_name)

    def evaluate(self, batch: Any) -> BatchResult:
        """Return loss and metrics of a batch in inference mode."""
        _, (loss, weight, samples, measured, _) = self._run(False, True, batch)
        return BatchResult(float(loss), float(weight), int(samples), *_plain(measured), {})

    def _run(self, training: bool, metrics: bool, batch: Any) -> tuple[_Function, Any]:
        batch = as_tensors(batch)
        leaves = tf.nest.flatten(batch)
        kind = tuple((leaf.dtype, leaf.shape.rank) for leaf in leaves)
        key = training, metrics, kind, str(tf.nest.map_structure(lambda _: 0, batch))
        shapes = [leaf.shape for leaf in leaves]
        function = self._functions.get(key)
        if function is None or not function.takes(shapes):
            function = _Function(self, training, metrics, batch, function)
            self._functions[key] = function
        # dropout and the like depend on the step alone, whichever process computes it
        seeds = np.zeros((len(self.variables.seeds), 2), np.int64)
        seeds[:, 0] = np.random.randint(1, 2**31 - 1, len(seeds))
        return function, function.call(seeds, leaves)


class _Function:
    """A step as a graph, for batches of one structure."""

    # narrower: the function for batches of this structure so far, whose shapes do not fit. Attributes: present: by name
    # of a trained variable, last layers first, whether it has a gradient; new: whether it is to be checked what the
    # step has written.

    def __init__(
        self,
        network: KerasNetwork,
        training: bool,
        metrics: bool,
        batch: Any,
        narrower: _Function | None,
    ) -> None:
        self._network, self._training, self._metrics = network, training, metrics
        self._structure = batch
        self.present: dict[str, bool] = {}
        self.new = True
        shapes = [leaf.shape for leaf in tf.nest.flatten(batch)]
        self._shapes = [
            tf.TensorShape([None, *shape[1:]]) if shape.rank else shape for shape in shapes
        ]
        if narrower is not None:
            self._shapes = [
                own.most_specific_compatible_shape(other)
                for own, other in zip(self._shapes, narrower._shapes, strict=True)
            ]
        self._call: Any = self._step
        if not network.model.run_eagerly:
            signature = [tf.TensorSpec([len(network.variables.seeds), 2], tf.int64)]
            for leaf, shape in zip(tf.nest.flatten(batch), self._shapes, strict=True):
                signature.append(tf.TensorSpec(shape, leaf.dtype))
            jit = True if network.model.jit_compile else None
            graph = tf.function(
                self._step, input_signature=signature, jit_compile=jit, autograph=False
            )
            self._call = graph.get_concrete_function()  # to look it up takes half a millisecond

    def takes(self, shapes: list[Any]) -> bool:
        """Return whether batches of these shapes fit."""
        return all(
            own.is_compatible_with(shape) for own, shape in zip(self._shapes, shapes, strict=True)
        )

    def call(self, seeds: Any, leaves: list[Any]) -> Any:
        """Return loss, weight, samples, metrics and gradients of a batch."""
        return self._call(tf.constant(seeds), *leaves)

    def _step(self, seeds: Any, *leaves: Any) -> Any:
        variables = self._network.variables
        batch = tf.nest.pack_sequence_as(self._structure, leaves)
        for index, state in enumerate(variables.seeds):
            state.assign(tf.cast(seeds[index], state.dtype))
        if not self._training:
            loss, weight, samples, measured = self._forward(batch)
            return loss, weight, samples, measured, []
        names = variables.trained[::-1]
        values = [variables.parameters[name].value for name in names]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            loss, weight, samples, measured = self._forward(batch)
        gradients = tape.gradient(loss, values)
        self.present = {
            name: gradient is not None for name, gradient in zip(names, gradients, strict=True)
        }
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
        return loss, weight, samples, measured, dense

    def _forward(self, batch: Any) -> tuple[Any, Any, Any, Any]:
        """Return loss, weight, samples, and metrics with the weights of those that are means, of a batch."""
        model = self._network.model
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if self._metrics:
            model.reset_metrics()  # to what they are of this batch alone
        mode = {"training": self._training} if model._call_has_training_arg else {}
        output = model(x, **mode)
        loss = model._compute_loss(
            x=x, y=y, y_pred=output, sample_weight=sample_weight, training=self._training
        )
        if loss.shape.rank:
            raise ModelError(
                f"the loss has shape {tuple(loss.shape)}: let it be the batch's mean, a number"
            )
        measured, weights = {}, {}
        if self._metrics:
            measured = dict(model.compute_metrics(x, y, output, sample_weight))
            measured.pop("loss", None)  # of a tracker of Keras' own loop
            weights = {name: count for name, count in _counts(model).items() if name in measured}
        samples = tf.shape(tf.nest.flatten(x)[0])[0]
        return loss, _weight(model, samples, output, sample_weight), samples, (measured, weights)


def _counts(model: Any) -> dict[str, Any]:
    """Return what Keras' means of a batch were divided by, by the names under which Keras returns these means."""
    leaves = [leaf for metric in model.metrics for leaf in getattr(metric, "metrics", [metric])]
    try:
        for leaf in leaves:  # Keras alone knows the names that it gives to results
            is_mean = isinstance(leaf, keras.metrics.Mean)
            leaf.result = (lambda leaf=leaf: leaf.count + 0) if is_mean else lambda: None
        return {
            name: count for name, count in model.get_metrics_result().items() if count is not None
        }
    finally:
        for leaf in leaves:
            vars(leaf).pop("result", None)


def _weight(model: Any, samples: Any, output: Any, sample_weight: Any) -> Any:
    """Return the weight of a batch, by which Keras' mean over a larger batch is that over its parts.

    Raises:
        ModelError: several outputs are averaged over different numbers of entries.
    """
    outputs = tf.nest.flatten(output)
    masks = [m for o in outputs if (m := getattr(o, "_keras_mask", None)) is not None]
    weighted = sample_weight is not None and _MEAN_BY_WEIGHT in _reductions(model)
    if len(outputs) > 1 and (masks or weighted):
        raise ModelError(
            "the model has several outputs, and masks or weights by which each of them has a mean "
            "of its own: give it one output, or losses with reduction='sum_over_batch_size' and no "
            "mask"
        )
    if not masks and not weighted:
        return tf.cast(samples, tf.float64)
    weight = tf.cast(masks[0], tf.float64) if masks else tf.constant(1.0, tf.float64)
    if weighted:
        own = tf.cast(tf.nest.flatten(sample_weight)[0], tf.float64)
        while masks and own.shape.rank < weight.shape.rank:
            own = own[..., tf.newaxis]
        weight = weight * own
    return tf.reduce_sum(weight)


def _reductions(model: Any) -> set[Any]:
    """Return how the compiled losses are reduced."""
    losses = [loss for loss in tf.nest.flatten(model.loss) if loss is not None]
    return {getattr(loss, "reduction", "sum_over_batch_size") for loss in losses}


def _check(model: Any) -> None:
    """Check that a model can be trained by parts of a batch; ConfigurationError or ModelError otherwise."""
    for method, advice in (
        (
            "train_step",
            "put the loss into compute_loss(), which is called, a GAN's two losses too: "
            "docs/howto/from_tensorflow.md shows one",
        ),
        ("make_train_function", "leave it out: the library makes the step"),
    ):
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise ModelError(f"{type(model).__name__} has a {method}() of its own: {advice}")
    if model._distribute_strategy is not None:
        raise ModelError(
            "the Keras model was made in the scope of a tf.distribute strategy: make it outside, "
            "and give DistributedSGD the strategy="
        )
    if other := [reduction for reduction in _reductions(model) if reduction not in _MEANS]:
        raise ConfigurationError(
            f"the loss has reduction={other[0]!r}, which depends on the number of workers: leave it "
            "at 'sum_over_batch_size', the mean over the batch"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "synchronized", False):
            raise ModelError(
                f"layer {layer.name!r} is a BatchNormalization(synchronized=True), which only "
                "synchronises under tf.distribute: leave synchronized out, or take a norm without "
                "running statistics (GroupNormalization, LayerNormalization)"
            )
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ModelError(
                f"layer {layer.name!r} has an activity_regularizer, a sum over the batch that "
                "depends on the number of workers: call add_loss() with a mean over the batch in a "
                "layer of your own"
            )


def as_tensors(batch: Any) -> Any:
    """Return a batch of arrays, tensors of torch or lists, in its structure, as tensors."""
    if isinstance(batch, Mapping):
        return {key: as_tensors(value) for key, value in batch.items()}
    if isinstance(batch, tuple) or (
        isinstance(batch, list) and batch and not np.isscalar(batch[0])
    ):
        return tuple(map(as_tensors, batch))
    if isinstance(batch, torch.Tensor):
        batch = batch.numpy()
    return None if batch is None else tf.convert_to_tensor(batch)


def _plain(measured: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """Return metrics as NumPy values, and weights of some of them."""
    metrics, weights = measured
    plain = {name: np.asarray(value) for name, value in metrics.items()}
    return plain, {name: float(count) for name, count in weights.items()}
