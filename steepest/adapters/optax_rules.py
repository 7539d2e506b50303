"""Optax's transformations run as they are, on each slice of the flat vector, by a torch optimizer.

A server that holds chunks of a model with such an optimizer needs JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, overload

import jax
import numpy as np
import torch

from steepest.adapters.jax_arrays import on_cpu, path_name, to_numpy, to_torch, torch_dtype
from steepest.adapters.optax_flow import is_elementwise
from steepest.adapters.optax_lookahead import Synced, looks_ahead
from steepest.core.optim.spec import OptimizerSpec, Schedule
from steepest.errors import ConfigurationError

#: dtypes of state that can be sent
_SENT = (
    *("float32", "float64", "float16", "bfloat16"),
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
)

#: The keys of a slice's state, its structure, and its arrays' shapes.
Form = tuple[list[str], Any, list[tuple[int, ...]]]


class OptaxRule:
    """A transformation, and the pytree of parameters in which it finds each by its place."""

    # Each parameter is updated by itself: the transformation sees a tree in which every other one is masked
    # (`optax.MaskedNode`), so that masks and labels by path mean what they mean elsewhere. skeleton: the tree, whose
    # leaves are the names; x64: it computes with 64 bits.

    def __init__(self, transformation: Any, skeleton: Any, x64: bool) -> None:
        self.transformation = transformation
        self.skeleton = skeleton
        self.x64 = x64
        self._forms: dict[Any, Form] = {}
        self._begin = jax.jit(self._begun, static_argnums=0)
        self._advance = jax.jit(self._advanced, static_argnums=0, donate_argnames="states")

    def __reduce__(self) -> tuple[Any, ...]:
        return OptaxRule, (self.transformation, self.skeleton, self.x64)

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Return the pytree of some parameters, by name, in which the others are masked."""
        from optax import MaskedNode

        return jax.tree.map(lambda name: values.get(name, MaskedNode()), self.skeleton)

    def form(self, name: str, value: Any) -> Form:
        """Return the keys, structure and shapes of a parameter's slice.

        Args:
            name: of the parameter.
            value: anything with the slice's shape and its dtype in JAX.
        """
        form_key = name, value.shape, str(value.dtype)
        if form_key not in self._forms:
            abstract = self.tree({name: jax.ShapeDtypeStruct(value.shape, value.dtype)})
            state = jax.eval_shape(self.transformation.init, abstract)
            leaves, structure = jax.tree_util.tree_flatten_with_path(state)
            own = path_name(_path_of(self.skeleton, name), ".")
            keys = [path_name(path, ".") for path, _ in leaves]
            short = [key.removesuffix(own).rstrip(".") or key for key in keys]
            keys = [key.replace("/", ".") for key in (short if _distinct(short) else keys)]
            self._forms[form_key] = keys, structure, [leaf.shape for _, leaf in leaves]
        return self._forms[form_key]

    def begin(self, names: tuple[str, ...], values: list[Any]) -> list[list[Any]]:
        """Return the first state of some slices, as lists of arrays."""
        return list(self._begin(names, values)) if names else []

    def advance(
        self, names: tuple[str, ...], values: Any, gradients: Any, states: Any, factor: Any
    ) -> tuple[list[Any], list[list[Any]]]:
        """Return the values and states of some slices after one update, times a factor.

        Do not use states that are JAX's arrays again: the new ones take their memory, unless a tensor shares it.
        """
        values, states = self._advance(names, values, gradients, states, factor)
        return jax.block_until_ready((values, states))  # type: ignore[no-any-return]

    def _begun(self, names: tuple[str, ...], values: list[Any]) -> list[list[Any]]:
        trees = [self.tree({name: value}) for name, value in zip(names, values, strict=True)]
        return [jax.tree.leaves(self.transformation.init(tree)) for tree in trees]

    def _advanced(
        self, names: tuple[str, ...], values: Any, gradients: Any, states: Any, factor: Any
    ) -> tuple[list[Any], list[list[Any]]]:
        after, kept = [], []
        for name, value, gradient, state in zip(names, values, gradients, states, strict=True):
            _, structure, _ = self.form(name, value)
            updates, state = self.transformation.update(
                self.tree({name: gradient}),
                jax.tree.unflatten(structure, state),
                self.tree({name: value}),
            )
            (update,) = jax.tree.leaves(updates)
            after.append((value + update * factor.astype(update.dtype)).astype(value.dtype))
            kept.append(jax.tree.leaves(state))
        return after, kept


def _path_of(skeleton: Any, name: str) -> Any:
    leaves, _ = jax.tree_util.tree_flatten_with_path(skeleton)
    return next(path for path, own in leaves if own == name)


def _distinct(keys: Sequence[str]) -> bool:
    return len(set(keys)) == len(keys)


class _TensorState(MutableMapping[str, torch.Tensor]):
    """One tensor's state by key: kept as JAX's arrays, and read as tensors."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def __getitem__(self, key: str) -> torch.Tensor:
        value = self.arrays[key]
        return value if isinstance(value, torch.Tensor) else to_torch(value)

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self.arrays[key] = value

    def __delitem__(self, key: str) -> None:
        del self.arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


class OptaxOptimizer(torch.optim.Optimizer):
    """A torch optimizer that updates (name, tensor) pairs by an optax transformation, times each group's "lr"."""

    # The state of each tensor has the transformation's own arrays by key, such as "0.mu", as tensors.

    #: whether `OptimizerSpec.build` gives each tensor with its parameter's name
    takes_names = True
    #: whether gradients are as they were after a step
    keeps_gradients = True

    def __init__(self, groups: Iterable[dict[str, Any]], rule: OptaxRule) -> None:
        super().__init__(groups, {"lr": 1.0})
        self._rule = rule
        self._forms: dict[torch.Tensor, Form] = {}

    @staticmethod
    def describe(defaults: Mapping[str, Any]) -> str:
        """Return a name of the optimizer made with these arguments: optax's, and its state's keys."""
        rule: OptaxRule = defaults["rule"]
        parts: dict[str, None] = {}
        for name in jax.tree.leaves(rule.skeleton):
            keys, _, _ = rule.form(name, jax.ShapeDtypeStruct((1,), "float32"))
            parts |= dict.fromkeys(keys)
        return f"optax({', '.join(parts)})"

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every tensor that has a gradient; call no closure.

        Raises:
            ValueError: a tensor's state is not the transformation's.
        """
        for group in self.param_groups:
            pairs = zip(group["param_names"], group["params"], strict=True)
            chosen = [(name, tensor) for name, tensor in pairs if tensor.grad is not None]
            if chosen:
                with on_cpu(self._rule.x64):
                    self._update(tuple(n for n, _ in chosen), [t for _, t in chosen], group["lr"])
        return None

    def _update(
        self, names: tuple[str, ...], tensors: Sequence[torch.Tensor], factor: float
    ) -> None:
        values = [to_numpy(tensor) for tensor in tensors]
        forms = [self._form(*each) for each in zip(names, tensors, values, strict=True)]
        fresh = [i for i, t in enumerate(tensors) if forms[i][0] and not self.state.get(t)]
        began = self._rule.begin(tuple(names[i] for i in fresh), [values[i] for i in fresh])
        first = dict(zip(fresh, began, strict=True))
        states = [
            first[i] if i in first else self._arrays(names[i], tensor, forms[i])
            for i, tensor in enumerate(tensors)
        ]
        gradients = [to_numpy(tensor.grad) for tensor in tensors if tensor.grad is not None]
        scale = (np.float64 if self._rule.x64 else np.float32)(factor)
        new_values, states = self._rule.advance(names, values, gradients, states, scale)
        for i, (tensor, state, (keys, _, _)) in enumerate(zip(tensors, states, forms, strict=True)):
            np.copyto(values[i], np.asarray(new_values[i]))
            self.state[tensor] = _TensorState(dict(zip(keys, state, strict=True)))

    def _form(self, name: str, tensor: torch.Tensor, value: Any) -> Form:
        if tensor not in self._forms:
            self._forms[tensor] = self._rule.form(name, value)
        return self._forms[tensor]

    def _arrays(self, name: str, tensor: torch.Tensor, form: Form) -> list[Any]:
        """Return a tensor's state as arrays in the same memory, in the transformation's order.

        Raises:
            ValueError: the state is not the transformation's.
        """
        keys, _, shapes = form
        state = self.state[tensor]
        if state.keys() != set(keys):
            raise ValueError(
                f"the state of {name!r} has {sorted(state)}, its optax transformation has {keys}"
            )
        kept = state.arrays if isinstance(state, _TensorState) else state
        return [
            to_numpy(kept[key].reshape(shape)) if isinstance(kept[key], torch.Tensor) else kept[key]
            for key, shape in zip(keys, shapes, strict=True)
        ]


def optax_spec(
    transformation: Any,
    params: Any,
    skeleton: Any,
    *,
    x64: bool,
    learning_rate: float | Callable[[int], float] = 1.0,
) -> OptimizerSpec:
    """Return the recipe of an optax transformation.

    Args:
        transformation: an `optax.GradientTransformation`.
        params: by name, the trained parameters, in the pytree's order: anything with shape and
            dtype.
        skeleton: a pytree whose leaves are the names of all parameters, frozen ones included.
        x64: whether it computes with types of 64 bits.
        learning_rate: a factor of its updates, or one for each step.

    Raises:
        ConfigurationError: it is none, needs all parameters at once, more than gradients and
            parameters, or random numbers; or it keeps state that cannot be sent; or the learning
            rate cannot be computed, or is given beside `optax.lookahead`.
    """
    if not all(callable(getattr(transformation, name, None)) for name in ("init", "update")):
        raise ConfigurationError(
            f"optimizer is of type {type(transformation).__name__}: give an "
            "optax.GradientTransformation, such as optax.sgd(0.1)"
        )
    rule = OptaxRule(transformation, skeleton, x64)
    with on_cpu(x64):
        shapes = {n: jax.ShapeDtypeStruct(tuple(p.shape), p.dtype) for n, p in params.items()}
        abstract = rule.tree(shapes)
        synced = looks_ahead(transformation, abstract)
        if synced:
            transformation = Synced(transformation)
            rule = OptaxRule(transformation, skeleton, x64)
        elementwise = is_elementwise(transformation, abstract, list(shapes))
        for leaf in jax.tree.leaves(jax.eval_shape(transformation.init, abstract)):
            if torch_dtype(leaf.dtype) is None or str(leaf.dtype) not in _SENT:
                raise ConfigurationError(
                    f"the optax transformation keeps state of dtype {leaf.dtype}, which servers do not: "
                    f"give one whose state has one of {', '.join(_SENT)}"
                )
    lr = 1.0 if callable(learning_rate) else learning_rate
    schedule = learning_rate if callable(learning_rate) else None
    if synced and learning_rate != 1.0:
        raise ConfigurationError(
            "learning_rate= with optax.lookahead, whose slow parameters it would leave behind: give the "
            "transformation inside of lookahead the rate, or its schedule"
        )
    groups = ((tuple(shapes), {} if synced else {"lr": lr}),)
    spec = OptimizerSpec(
        OptaxOptimizer, {"rule": rule}, groups, elementwise, learning_rate=schedule
    )
    Schedule(spec).at(1)  # a schedule that cannot run is found here, not on a server
    return spec
