"""A Keras model's variables: names that do not depend on the process, and memory shared with torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import torch
from keras.src.random.seed_generator import global_seed_generator

from steepest.core.tensors.layout import ALIGNMENT
from steepest.errors import ModelError


def as_torch(value: Any) -> torch.Tensor:
    """Return a TensorFlow tensor or variable as a torch tensor over the same memory."""
    tensor: torch.Tensor = torch.from_dlpack(tf.convert_to_tensor(value))  # type: ignore[attr-defined]
    return tensor


def as_tensorflow(tensor: torch.Tensor) -> Any:
    """Return a torch tensor as a TensorFlow tensor over the same memory.

    It begins at a multiple of `ALIGNMENT` bytes: elsewhere TensorFlow's kernels end the process.
    """
    assert tensor.data_ptr() % ALIGNMENT == 0, "the memory is not aligned"
    capsule = torch.utils.dlpack.to_dlpack(tensor)  # type: ignore[attr-defined]
    return tf.experimental.dlpack.from_dlpack(capsule)


class KerasVariables:
    """The variables of a built Keras model, by names that are alike in all processes."""

    # ModelError: servers cannot train one.

    def __init__(self, model: Any) -> None:
        layers = list(model._flatten_layers())
        made_to_train = {id(v) for layer in layers for v in layer._trainable_variables}
        generators = [g for layer in layers for g in layer._seed_generators]
        # the states of its generators of random numbers
        self.seeds = [generator.state for generator in (*generators, global_seed_generator())]
        seeds = set(map(id, self.seeds))
        named = _named(model.name, layers, [v for v in model.variables if id(v) not in seeds])
        # made to be trained, frozen ones included, in the model's order
        self.parameters = {n: v for n, v in named.items() if id(v) in made_to_train}
        # what the model itself changes, such as running means
        self.state = {n: v for n, v in named.items() if n not in self.parameters}
        trainable = {id(v) for v in model.trainable_variables}
        # the names of those that are trained
        self.trained = [n for n, v in self.parameters.items() if id(v) in trainable]
        for name in self.trained:
            _check(name, self.parameters[name])
        self._shared: dict[str, tuple[Any, int]] = {}
        self._checked = 0

    @staticmethod
    def value(variable: Any) -> torch.Tensor:
        """Return a variable's value where it lies; it must not be written to."""
        return as_torch(variable.value)

    @staticmethod
    def set_value(variable: Any, value: torch.Tensor) -> None:
        """Set a variable that is not trained."""
        variable.assign(as_tensorflow(value.detach().clone(memory_format=torch.contiguous_format)))

    def attach(self, views: Mapping[str, torch.Tensor]) -> None:
        """Let all trained variables share memory with views of a flat vector, by name."""
        # TensorFlow copies a shared value before it writes to it, so that no write reaches the vector.
        for name, view in views.items():
            tensor = as_tensorflow(view)
            self.parameters[name].value.assign(tensor)
            self._shared[name] = tensor, view.data_ptr()  # kept: what has two users is copied

    def written(self) -> list[str]:
        """Return the names of trained variables that have been assigned another value."""
        return [name for name in self._shared if self._is_written(name)]

    def check_next(self) -> None:
        """Check that one trained variable, another in each call (all take long), was assigned no other value.

        Raises:
            ModelError: the model has assigned one.
        """
        name = self.trained[self._checked % len(self.trained)]
        self._checked += 1
        if name in self._shared and self._is_written(name):
            raise ModelError(
                f"the Keras model's variable {name!r} was assigned another value on a worker, but "
                "servers hold the weights: call DistributedSGD.set_weights(), or assign it in "
                "model_creator before TensorFlowModel is made"
            )

    def _is_written(self, name: str) -> bool:
        tensor, address = self._shared[name]
        now = as_torch(self.parameters[name].value).data_ptr()
        return bool(tensor.shape.num_elements()) and now != address


def _check(name: str, variable: Any) -> None:
    """Check that servers can update a variable as Keras would; ModelError otherwise."""
    if variable.constraint is not None:
        raise ModelError(
            f"variable {name!r} has the constraint {type(variable.constraint).__name__}, which "
            "servers do not apply: leave it out, or add a regularizer"
        )
    if getattr(variable, "overwrite_with_gradient", False):
        raise ModelError(
            f"variable {name!r} takes its gradient for its value, which servers do not: train in "
            "float32 or bfloat16"
        )


def _named(root: str, layers: Iterable[Any], variables: Sequence[Any]) -> dict[str, Any]:
    """Return variables by names that are alike in all processes.

    Keras numbers layers without a name through a process ("dense_7"); here within each model, in its variables'
    order.
    """
    kinds = {_snake_case(type(layer).__name__) for layer in layers} | {"variable"}
    numbered = re.compile(rf"((?:.*_)?(?:{'|'.join(map(re.escape, kinds))}))(?:_\d+)?")
    taken: dict[tuple[str, ...], str] = {}
    counts: dict[tuple[str, ...], int] = {}
    variables_by_name: dict[str, Any] = {}
    for variable in variables:
        path = tuple(variable.path.split("/"))
        path = path[1:] if path[0] == root and len(path) > 1 else path
        parts: tuple[str, ...] = ()
        for depth, part in enumerate(path, start=1):
            if path[:depth] not in taken:
                match = numbered.fullmatch(part)
                base = match[1] if match else part
                place = (*parts, base)
                number = counts.get(place, 0) if match else 0
                counts[place] = number + 1
                taken[path[:depth]] = f"{base}_{number}" if number else base
            parts = (*parts, taken[path[:depth]])
        name, again = "/".join(parts), 1
        while name in variables_by_name:  # Keras lets a layer have two weights of one name
            again += 1
            name = f"{'/'.join(parts)}#{again}"
        variables_by_name[name] = variable
    return variables_by_name


def _snake_case(name: str) -> str:
    """Return the name that Keras gives the first layer of a class."""
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
