"""Modules of Flax, linen's and nnx's, as the parameters, state and loss of a `JaxModel`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

from steepest.errors import ModelError

try:
    from flax import linen, nnx
    from flax.core import unfreeze
except ImportError as error:
    raise ModelError("modules of Flax need Flax: pip install 'steepest[jax]'") from error

#: names of a module's argument, or of its field, that tells training from evaluation
_TRAINING = ("train", "training", "is_training")
_EVALUATION = ("deterministic", "use_running_average")


class Parts(NamedTuple):
    """The parts of a `JaxModel`."""

    params: Any
    state: Any  # None without any
    loss: Callable[..., Any]
    notice: str  # what the user should know of the module's modes; "" for nothing


def parts_of(module: Any, variables: Any, loss: Callable[..., Any]) -> Parts:
    """Return the parts of a `JaxModel`, for batches ``(*inputs, target)`` and a loss of (output, target).

    Raises:
        ModelError: it is no linen or nnx module with parameters, or a linen module's variables are missing.
    """
    if isinstance(module, nnx.Module):
        if variables is not None:
            raise ModelError("an nnx.Module has its variables itself: leave variables out")
        return _of_nnx(module, loss)
    if not isinstance(module, linen.Module):
        raise ModelError(f"module is a {type(module).__name__}: give a module of flax linen or nnx")
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise ModelError(
            'a linen module needs its variables, a dict with "params": give what '
            "module.init(key, *inputs) returned"
        )
    return _of_linen(module, variables, loss)


def _of_linen(module: Any, variables: Any, loss: Callable[..., Any]) -> Parts:
    variables = unfreeze(variables)  # as `apply` returns what has changed of them
    state = {name: value for name, value in variables.items() if name != "params"}
    arguments = inspect.signature(type(module).__call__).parameters
    fields = dict(_fields_of_mode(module))
    own = {name: name in _EVALUATION for name in fields if "." not in name}
    evaluated = module.clone(**own) if own else module

    def run(params: Any, batch: Any, rng: Any, state: Any, train: bool) -> Any:
        *inputs, target = batch
        modes = _modes(arguments, train)
        keys = dict(zip(("params", "dropout"), jax.random.split(rng), strict=True))
        mutable = [*state] if train and state else False
        output = (module if train else evaluated).apply(
            {"params": params, **(state or {})}, *inputs, rngs=keys, mutable=mutable, **modes
        )
        if mutable:
            output, state = output
        result = loss(output, target), output
        return (*result, state) if state else result

    return Parts(variables["params"], state or None, run, _notice_of_linen(module, fields))


def _fields_of_mode(module: Any, path: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the fields of a linen module, and of the modules in its fields, that tell training from evaluation."""
    for field in dataclasses.fields(module):
        value = getattr(module, field.name, None)
        if isinstance(value, bool) and field.name in (*_TRAINING, *_EVALUATION):
            yield path + field.name, value
        elif field.name != "parent":  # Flax' own, of a module that is in another one
            leaves, _ = jax.tree_util.tree_flatten_with_path(
                value, is_leaf=lambda leaf: isinstance(leaf, linen.Module)
            )
            for keys, leaf in leaves:
                if isinstance(leaf, linen.Module):
                    within = jax.tree_util.keystr(keys)
                    yield from _fields_of_mode(leaf, f"{path}{field.name}{within}.")


def _notice_of_linen(module: Any, fields: Mapping[str, bool]) -> str:
    """Return what becomes of fields that tell training from evaluation."""
    if not fields:
        return ""
    own = ", ".join(f"{name}={value}" for name, value in fields.items() if "." not in name)
    inner = ", ".join(f"{name}={value}" for name, value in fields.items() if "." in name)
    said = f"{type(module).__name__} has modes as fields:"
    if own:
        said += f" {own} is kept in training, and set for evaluation."
    if inner:
        said += f" {inner} is kept in training and in evaluation."
    return said + " Let __call__ have an argument `train`, which is set for both."


def _of_nnx(module: Any, loss: Callable[..., Any]) -> Parts:
    graph, kept, random, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    state = nnx.to_pure_dict(rest)
    arguments = inspect.signature(type(module).__call__).parameters

    def run(params: Any, batch: Any, rng: Any, state: Any, train: bool) -> Any:
        *inputs, target = batch
        inner, key = jax.random.split(rng)
        own = _filled(kept, params), _reseeded(random, inner), _filled(rest, state or {})
        whole = nnx.merge(graph, *own)
        if not train:  # for training the module is as it was given: a layer may be fixed
            _evaluating(whole)
        keys = {"rngs": nnx.Rngs(key)} if "rngs" in arguments else {}
        output = whole(*inputs, **keys, **_modes(arguments, train))
        result = loss(output, target), output
        changed = nnx.to_pure_dict(nnx.split(whole, nnx.Param, nnx.RngState, ...)[3])
        return (*result, changed) if state else result

    return Parts(nnx.to_pure_dict(kept), state or None, run, _notice_of_nnx(module))


def _evaluating(module: Any) -> None:
    """Set an nnx module, and all in it, to evaluation mode."""
    for _, each in nnx.iter_modules(module):
        for name in (*_TRAINING, *_EVALUATION):
            if name in vars(each) and isinstance(vars(each)[name], (bool, type(None))):
                setattr(each, name, name in _EVALUATION)


def _notice_of_nnx(module: Any) -> str:
    """Return which layers of an nnx module are trained in evaluation mode, as they were given; "" for none."""
    fixed = [
        f"{'.'.join(map(str, path))}.{name}".lstrip(".") + f"={vars(each)[name]}"
        for path, each in nnx.iter_modules(module)
        for name in (*_TRAINING, *_EVALUATION)
        if vars(each).get(name) is (name in _EVALUATION)
    ]
    if not fixed:
        return ""
    return (
        f"{type(module).__name__} is trained with {', '.join(fixed)}, as it was given: call its train() before if "
        "this is not what you want."
    )


def _modes(arguments: Mapping[str, Any], train: bool) -> dict[str, bool]:
    """Return those of a module's arguments that tell training from evaluation."""
    modes = {name: train for name in _TRAINING if name in arguments}
    return modes | {name: not train for name in _EVALUATION if name in arguments}


def _filled(form: Any, values: Any) -> Any:
    """Return an nnx.State like another one, with the values of a dict."""
    filled = jax.tree.map(lambda value: value, form)
    nnx.replace_by_pure_dict(filled, values)
    return filled


def _reseeded(random: Any, rng: Any) -> Any:
    """Return the nnx.State of random streams, each with a key of its own, before its first draw."""
    leaves, structure = jax.tree.flatten(random)
    keys = jax.random.split(rng, max(len(leaves), 1))
    for index, leaf in enumerate(leaves):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[index] = jax.random.split(keys[index], leaf.shape) if leaf.shape else keys[index]
        else:
            leaves[index] = jax.numpy.zeros_like(leaf)
    return jax.tree.unflatten(structure, leaves)
