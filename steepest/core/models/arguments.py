"""Checks of the arguments of a `TorchModel`."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from steepest.core.models.names import plain
from steepest.core.optim.detached_schedule import check_scheduler
from steepest.errors import ConfigurationError, ModelError
from steepest.validation import require_choice, require_positive


def check_module(module: Any) -> None:
    """Check that an object is a module that can be trained in several processes; ModelError otherwise."""
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"module is a {type(module).__name__}: give a torch.nn.Module")
    synchronised = [
        name for name, child in module.named_modules() if isinstance(child, torch.nn.SyncBatchNorm)
    ]
    if synchronised and not (
        torch.distributed.is_available() and torch.distributed.is_initialized()
    ):
        raise ModelError(
            f"module {synchronised[0]!r} is a SyncBatchNorm, which without a process group of "
            "torch.distributed "
            "does not synchronise: use BatchNorm, or a norm without running statistics (GroupNorm, "
            "LayerNorm)"
        )
    if lazy := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        raise ModelError(
            f"parameter {lazy[0]!r} is lazy: run the module once before handing it over"
        )


def chosen_buffers(chosen: Mapping[str, str] | None, module: torch.nn.Module) -> dict[str, str]:
    """Return how replicas' values of buffers and parameters are merged, by name.

    Args:
        chosen: "mean" or "first" by pattern of names, as a user gives it; the last one that fits a name counts.
        module: the user's.

    Raises:
        ConfigurationError: another value, or a pattern that fits no buffer and no parameter.
    """
    if chosen is None:
        return {}
    if not isinstance(chosen, Mapping) or not all(isinstance(pattern, str) for pattern in chosen):
        raise ConfigurationError(
            f'buffers={chosen!r:.200}: give "mean" or "first" by name, such as {{"queue": "first"}}'
        )
    buffers = [plain(name) for name, _ in module.named_buffers(remove_duplicate=False)]
    names = [*buffers, *(plain(name) for name, _ in module.named_parameters())]
    by_name = {}
    for pattern, value in chosen.items():
        require_choice(f"buffers[{pattern!r:.80}]", value, ("mean", "first"))
        fitting = fnmatch.filter(names, pattern)
        if not fitting:
            raise ConfigurationError(
                f"buffers={{{pattern!r:.80}: ...}} fits none of the module's buffers "
                f"({', '.join(buffers[:8]) or 'there are none'}) "
                'and parameters: give a name of named_buffers(), or a pattern such as "*.queue"'
            )
        by_name.update(dict.fromkeys(fitting, value))
    return by_name


def check_reduction(reduction: Any, loss: Any, size: int | None) -> bool:
    """Return whether losses are sums over a batch.

    Args:
        reduction: as a user gives it.
        loss: the user's, which may have a reduction of its own, such as
            `torch.nn.MSELoss(reduction="sum")`, or a partial function of `torch.nn.functional`.
        size: number of samples of the data; None if they choose their own batches.

    Raises:
        ConfigurationError: `reduction` is neither "mean" nor "sum", or differs from the loss' own;
            or the data choose their own batches and losses are sums.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"reduction={reduction!r:.80}: give 'mean' or 'sum'")
    own = getattr(loss, "reduction", None)
    if isinstance(loss, functools.partial):
        own = loss.keywords.get("reduction", own)
    if own in ("none", "mean", "sum") and own != reduction:
        raise ConfigurationError(
            f"loss has reduction={own!r}, where TorchModel has reduction={reduction!r}: give both "
            "the same, 'mean' or 'sum'. Sums that are taken for means would make the updates of "
            "two workers half as large as those of one"
        )
    if reduction == "sum" and size is None:
        raise ConfigurationError(
            "reduction='sum' with data that choose their own batches: how many samples a step has "
            "is not known before it; return the mean loss, or give data with a length (a map-style "
            "dataset)"
        )
    return bool(reduction == "sum")


def check_not_sparse(module: torch.nn.Module, trained: Container[int]) -> None:
    """Check that no embedding has sparse gradients, which would be sent whole.

    Args:
        trained: the ids of the network's trained parameters.

    Raises:
        ModelError: an embedding has sparse gradients.
    """
    for name, child in module.named_modules():
        has_rows = isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        if has_rows and child.sparse and id(child.weight) in trained:
            where = f"{plain(name) or 'the module'!r}, {type(child).__name__}(sparse=True),"
            raise ModelError(sparse_gradient(where, child.weight))


def sparse_gradient(where: str, parameter: torch.Tensor) -> str:
    """Return why a parameter's sparse gradient, (n, dim), is refused, and what to do.

    Args:
        where: its name, or its module's.
    """
    return (
        f"{where} has a sparse gradient, but parameters are sent whole: {parameter.nbytes:,} bytes "
        "from each worker in each step, whatever the batch; use steepest.Embedding or "
        "steepest.EmbeddingBag, of which only what a batch uses travels, or sparse=False"
    )


def check_functions(
    loss: Any, optimizer: Any, metrics: Any, lr_scheduler: Any, learning_rate: Any
) -> None:
    """Check the functions of a `TorchModel`, each easily mistaken for its result; ConfigurationError otherwise."""
    if isinstance(loss, type) and issubclass(loss, torch.nn.Module):
        raise ConfigurationError(f"loss={loss.__name__} is a class: give {loss.__name__}()")
    _check_function("loss", loss, "(output, target)", "torch.nn.functional.cross_entropy")
    example = "lambda module: torch.optim.SGD(module.parameters(), lr=0.1)"
    if optimizer is None or (
        isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    ):
        raise ConfigurationError(
            f"optimizer={getattr(optimizer, '__name__', None)}: give a function of the module, "
            f"such as {example}"
        )
    _check_function("optimizer", optimizer, "the module", example)
    example = "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"
    if (
        isinstance(lr_scheduler, type)
        and issubclass(lr_scheduler, LRScheduler)
        and not _takes_one_argument(lr_scheduler)
    ):
        raise ConfigurationError(
            f"lr_scheduler={lr_scheduler.__name__} needs more than the optimizer: give a function of it, "
            f"such as {example}"
        )
    if isinstance(lr_scheduler, (ReduceLROnPlateau, list, tuple)):
        check_scheduler(lr_scheduler, f"lr_scheduler is a {type(lr_scheduler).__name__}")
    _check_function("lr_scheduler", lr_scheduler, "the optimizer", example)
    _check_function(
        "learning_rate",
        learning_rate,
        "the step",
        "lambda step: 0.1 / (1 + step); a rate that stays the same is the optimizer's lr=",
    )
    if metrics is not None and not (
        isinstance(metrics, Mapping) and all(map(callable, metrics.values()))
    ):
        raise ConfigurationError(
            f"metrics={metrics!r:.80}: give functions of (output, target) by name, such as "
            '{"accuracy": steepest.accuracy}'
        )


def _takes_one_argument(function: Any) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    return True


def _check_function(name: str, value: Any, arguments: str, example: str) -> None:
    if value is not None and not callable(value):
        raise ConfigurationError(
            f"{name} is of type {type(value).__name__}: give a function of {arguments}, such as "
            f"{example}"
        )


def check_precision(autocast: Any, loss_scale: Any) -> None:
    """Check `autocast` and `loss_scale` of a `TorchModel`; ConfigurationError: one is out of range."""
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigurationError(
            f"autocast={autocast!r}: give torch.bfloat16, torch.float16 or None"
        )
    require_positive("loss_scale", loss_scale)
