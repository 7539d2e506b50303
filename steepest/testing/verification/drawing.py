"""Puts aside what makes a batch's result more than a mean over its samples, to see whether anything else does.

Random numbers are drawn by sample, so that a sample gets the same ones in whatever batch it is. Dropout drops
nothing, and batch normalization takes its running statistics; or dropout is drawn by sample too, and batch
normalization stays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

from steepest.core.engine.generators import restore, seed_everything, states

_DROPOUTS = (
    "dropout",
    "alpha_dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
)
_SHAPED = ("rand", "randn", "randint")
_LIKE = {"rand_like": "rand", "randn_like": "randn"}
_IN_PLACE = (
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
    "log_normal_",
    "geometric_",
    "cauchy_",
)


class Draws:
    """Random numbers by sample.

    Attributes:
        rows: a number for each sample of the present batch; none before the first.
    """

    def __init__(self) -> None:
        self.rows: Sequence[int] = ()
        self._calls = 0

    def begin_batch(self, rows: Sequence[int]) -> None:
        """Draw for a batch with these samples from now on."""
        self.rows, self._calls = rows, 0

    def generators(self, shape: Sequence[int]) -> list[torch.Generator] | None:
        """Return a generator for each row of a tensor that has one for each sample; None for any other tensor."""
        if not self.rows or not shape or shape[0] != len(self.rows):
            return None
        self._calls += 1
        return [
            torch.Generator().manual_seed((row + self._calls) & (2**63 - 1)) for row in self.rows
        ]


@contextlib.contextmanager
def put_aside(draws: Draws, *, drops: bool = False) -> Iterator[None]:
    """Draw random numbers by sample in this context, so that no sample depends on others of its batch.

    Args:
        draws: what is drawn.
        drops: whether dropout drops, by sample, and batch normalization is as it is. What torch drops in kernels
            of its own, in attention and between layers of recurrent modules, is not dropped in any case.
    """
    with contextlib.ExitStack() as whole:
        put = functools.partial(_put, whole)
        for name in _DROPOUTS:
            put(F, name, _dropping(name, draws) if drops else lambda input, *_, **__: input)
        put(
            torch,
            "dropout",
            _dropping("dropout", draws) if drops else lambda input, *_, **__: input,
        )
        attention = F.scaled_dot_product_attention
        put(F, "scaled_dot_product_attention", _without_dropout(attention))
        if not drops:
            put(F, "batch_norm", _by_running_statistics(F.batch_norm))
        for name in _SHAPED:
            put(torch, name, _shaped(getattr(torch, name), draws))
        for name, shaped in _LIKE.items():
            put(torch, name, _like(getattr(torch, name), getattr(torch, shaped)))
        for name in ("bernoulli", "multinomial"):
            put(torch, name, _of_first(getattr(torch, name), draws))
        put(torch, "normal", _normal(torch.normal, draws))
        for name in _IN_PLACE:
            put(torch.Tensor, name, _in_place(getattr(torch.Tensor, name), draws))
        put(DataLoader, "__init__", _seeding_samples(DataLoader.__init__))
        yield


def _put(whole: contextlib.ExitStack, where: Any, name: str, value: Any) -> None:
    whole.callback(setattr, where, name, getattr(where, name))
    setattr(where, name, value)


def _dropping(name: str, draws: Draws) -> Callable[..., Any]:
    """Return one of torch's dropouts, drawn by sample."""
    original = getattr(F, name)

    def call(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        several = draws.generators(tuple(input.shape)) if training and p > 0 else None
        if several is None:
            result: torch.Tensor = original(input, p, training, inplace)
            return result
        kept, before = [], states()
        try:
            for row, generator in zip(torch.split(input, 1), several, strict=True):
                torch.default_generator.manual_seed(generator.initial_seed())
                kept.append(original(row, p, training))
        finally:
            restore(before)
        dropped = torch.cat(kept)
        return input.copy_(dropped) if inplace else dropped

    return call


def _without_dropout(attention: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *more: Any,
        **named: Any,
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *more, **named)

    return call


def _by_running_statistics(batch_norm: Callable[..., Any]) -> Callable[..., Any]:
    def call(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        mean = input.new_zeros(input.shape[1]) if running_mean is None else running_mean
        variance = input.new_ones(input.shape[1]) if running_var is None else running_var
        return batch_norm(input, mean, variance, weight, bias, False, momentum, eps)

    return call


def _shaped(original: Callable[..., Any], draws: Draws) -> Callable[..., Any]:
    bounds = 2 if original.__name__ == "randint" else 0

    def call(*arguments: Any, **named: Any) -> Any:
        own, size = list(arguments), named.get("size")
        low_high: list[Any] = []
        if bounds:
            tensors = [
                at for at, each in enumerate(own) if isinstance(each, tuple | list | torch.Size)
            ]
            if tensors:
                low_high, size = own[: tensors[0]], own[tensors[0]]
        elif size is None and own:
            size = own[0] if isinstance(own[0], tuple | list | torch.Size) else own
        if size is None or named.get("generator") is not None or named.get("out") is not None:
            return original(*arguments, **named)
        several = draws.generators(tuple(size))
        if several is None:
            return original(*arguments, **named)
        rest = {
            name: value
            for name, value in named.items()
            if name not in ("size", "generator", "requires_grad")
        }
        parts = [original(*low_high, tuple(size)[1:], generator=each, **rest) for each in several]
        return torch.stack(parts).requires_grad_(bool(named.get("requires_grad")))

    return call


def _like(original: Callable[..., Any], shaped: Callable[..., Any]) -> Callable[..., Any]:
    def call(input: torch.Tensor, **named: Any) -> Any:
        rest = {
            k: v
            for k, v in named.items()
            if k in ("dtype", "device", "requires_grad") and v is not None
        }
        return shaped(tuple(input.shape), **{"dtype": input.dtype, "device": input.device, **rest})

    return call


def _of_first(original: Callable[..., Any], draws: Draws) -> Callable[..., Any]:
    def call(input: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        several = None
        if not {"generator", "out"} & named.keys():
            several = draws.generators(tuple(input.shape))
        if several is None:
            return original(input, *arguments, **named)
        return torch.stack(
            [
                original(row, *arguments, generator=g, **named)
                for row, g in zip(input, several, strict=True)
            ]
        )

    return call


def _normal(original: Callable[..., Any], draws: Draws) -> Callable[..., Any]:
    def call(mean: Any = 0.0, std: Any = 1.0, *arguments: Any, **named: Any) -> Any:
        shape = tuple(named.get("size", ())) or tuple(arguments[0] if arguments else ())
        for each in (mean, std):
            if isinstance(each, torch.Tensor):
                shape = (
                    tuple(np.broadcast_shapes(shape, each.shape)) if shape else tuple(each.shape)
                )
        several = None if {"generator", "out"} & named.keys() else draws.generators(shape)
        if several is None:
            return original(mean, std, *arguments, **named)
        noise = torch.stack([torch.empty(shape[1:]).normal_(generator=each) for each in several])
        return mean + std * noise

    return call


def _in_place(original: Callable[..., Any], draws: Draws) -> Callable[..., Any]:
    def call(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        several = (
            None if named.get("generator") is not None else draws.generators(tuple(self.shape))
        )
        if several is None or any(isinstance(each, torch.Tensor) for each in arguments):
            return original(self, *arguments, **named)
        for row, generator in zip(self, several, strict=True):
            original(row, *arguments, **{**named, "generator": generator})
        return self

    return call


def _seeding_samples(original: Callable[..., None]) -> Callable[..., None]:
    """Let the data sets of loaders draw by the number of the sample."""

    def begin(self: Any, dataset: Any, *arguments: Any, **named: Any) -> None:
        kind = type(dataset)
        if hasattr(kind, "__getitem__") and not isinstance(dataset, IterableDataset | list | tuple):
            with contextlib.suppress(TypeError):  # a class whose objects stay of it
                object.__setattr__(dataset, "__class__", _drawing_by_number(kind))
        original(self, dataset, *arguments, **named)

    return begin


def _drawing_by_number(kind: Any) -> Any:
    if getattr(kind, "_draws_by_number", False):
        return kind

    get: Callable[[Any, Any], Any] = kind.__getitem__

    def item(self: Any, index: Any) -> Any:
        before = states()
        seed_everything(int(index) + 1 if isinstance(index, int | np.integer) else 0)
        try:
            return get(self, int(index) if isinstance(index, np.integer) else index)
        finally:
            restore(before)

    def items(self: Any, indices: Any) -> list[Any]:
        return [item(self, index) for index in indices]

    own = {
        "__getitem__": item,
        "__getitems__": items,
        "_draws_by_number": True,
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), own)
