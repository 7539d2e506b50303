"""Losses as users' code returns them: a number, several by name, with a weight, or in an output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from steepest.errors import ModelError
from steepest.models.protocol import checked_weight
from steepest.models.scalars import describe

#: A mean over a batch as a tensor with one number, or several of them by name.
Loss = torch.Tensor | Mapping[str, torch.Tensor]


def call(module: torch.nn.Module, batch: Any) -> Any:
    """Return a module's output for a batch: a dict is given by name, a tuple or list in order."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def own_loss(output: Any) -> torch.Tensor:
    """Return the loss that a module's output has as its attribute `loss`.

    Raises:
        ModelError: it has none.
    """
    loss = getattr(output, "loss", None)
    if loss is None:
        what = "whose loss is None" if hasattr(output, "loss") else "without a loss"
        raise ModelError(
            f"no loss: the module returned {describe(output)} {what}: give loss=, or a module "
            "(and, in each batch, the labels) whose output has .loss, or subclass TorchModel and "
            "write loss(self, batch)"
        )
    found: torch.Tensor = loss
    return found


def weigh(batch: Any, result: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], int, float]:
    """Return what a batch's loss says.

    Args:
        batch: of any form.
        result: as `TorchModel.loss` returns it.

    Returns:
        The loss; the losses by name of which it is the sum, if any; the number of samples; the
        weight.

    Raises:
        ModelError: it is no loss.
    """
    samples = sample_count(batch)
    if isinstance(result, tuple) and len(result) != 2:
        raise ModelError(
            f"the loss is a tuple of {len(result)}: return it alone, or (loss, weight)"
        )
    loss, weight = result if isinstance(result, tuple) else (result, float(samples))
    parts: dict[str, torch.Tensor] = {}
    if isinstance(loss, Mapping) and loss:
        parts = {name: _checked(f"loss {name!r}", value) for name, value in loss.items()}
        loss = sum((value.reshape(()) for value in parts.values()), torch.zeros(()))
    return _checked("the loss", loss), parts, samples, checked_weight(weight)


def _checked(what: str, loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        raise ModelError(
            f"{what} is {describe(loss)}: return the batch's mean as a tensor with one real "
            "number, which knows its gradient"
        )
    return loss


def with_parts(parts: Mapping[str, torch.Tensor], metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics, with losses by name among them.

    Raises:
        ModelError: a metric has the name of a loss, or a loss is not named by a string.
    """
    found = dict(metrics)
    for name, value in parts.items():
        if name in metrics or not isinstance(name, str):
            raise ModelError(
                f"a loss is named {name!r:.200}: name it by a string that no metric has"
            )
        found[name] = value.item()
    return found


def sample_count(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first array, or first list.

    A list of dicts, such as a detector's targets, has one for each sample, whose images may then
    be a list too.
    """
    if (
        isinstance(batch, (tuple, list))
        and batch
        and all(isinstance(b, torch.Tensor) for b in batch)
    ):
        return next((len(tensor) for tensor in batch if tensor.ndim), 1)
    for part in batch if isinstance(batch, (tuple, list)) else ():
        if isinstance(part, (tuple, list)) and part and isinstance(part[0], Mapping):
            return len(part)
    arrays = (len(leaf) for leaf in _leaves(batch) if getattr(leaf, "ndim", 0))
    lists = (len(leaf) for leaf in _leaves(batch) if isinstance(leaf, (tuple, list)))
    return next(arrays, next(lists, 1))


def _leaves(batch: Any) -> Iterator[Any]:
    """Yield the parts of a batch: arrays, scalars, and whole lists of scalars."""
    values = (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, (tuple, list))
        else ()
    )
    if isinstance(batch, Mapping) or any(
        isinstance(v, (tuple, list, Mapping)) or hasattr(v, "ndim") for v in values
    ):
        for value in values:
            yield from _leaves(value)
    else:
        yield batch
