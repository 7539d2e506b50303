"""Losses as users' code returns them: a number, several by name, with a weight, or in an output."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from steepest.core.models.protocol import Share, checked_weight
from steepest.core.models.scalars import describe
from steepest.errors import ModelError

#: Packages whose lines errors for users do not name.
OURS = ("torch.", "steepest.")

_ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's text
#: what to do about that
ONE_SAMPLE = (
    "BatchNorm got a batch of one sample, which has no statistics: the last batch of an epoch, of which each worker "
    "computes a part, is smaller than the others; leave it out by a DataLoader(..., drop_last=True), or give another "
    "batch size"
)

#: A mean over a batch as a tensor with one number, or several of them by name.
Loss = torch.Tensor | Mapping[str, torch.Tensor]


def call(module: torch.nn.Module, batch: Any) -> Any:
    """Return a module's output for a batch: a dict is given by name, a tuple or list in order."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


def own_loss(output: Any) -> torch.Tensor:
    """Return the loss that a module's output has as its attribute `loss`; ModelError: it has none."""
    loss = getattr(output, "loss", None)
    if loss is None:
        what = "whose loss is None" if hasattr(output, "loss") else "without a loss"
        raise ModelError(
            f"no loss: the module returned {describe(output)} {what}: give loss=, or a module "
            "(and, in each batch, the labels) whose output has .loss, or subclass TorchModel and "
            "write loss(self, batch)"
        )
    mean: torch.Tensor = loss
    return mean


def users_line() -> str:
    """Return file, line and function of the innermost caller outside torch and steepest.

    "?" if none (torch's threads).
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(OURS):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def of_one_sample(error: BaseException) -> bool:
    """Return whether an error is BatchNorm's of a batch of a single sample, see `ONE_SAMPLE`."""
    return isinstance(error, ValueError) and str(error).startswith(_ONE_VALUE)


def called_backward(line: str) -> str:
    """Return the text of the error for a loss that has called backward() at a line."""
    where = "" if line == "?" else f" ({line})"
    return (
        f"the loss calls backward() itself{where}: return the loss and leave backward() to "
        "steepest, which calls it once and takes the gradients as they are computed"
    )


class Weighed(NamedTuple):
    """The loss of a batch."""

    loss: torch.Tensor  # as returned, or the sum of several
    parts: dict[str, torch.Tensor]  # the losses by name of which it is the sum, if any
    samples: int
    weight: float  # of the batch in means


def weigh(batch: Any, result: Any, share: Share | None, sums: bool = False) -> Weighed:
    """Return the loss, samples and weight of a batch.

    Args:
        batch: the batch.
        result: the return value of `TorchModel.loss`.
        share: numbers of samples; None if they are read off the batch.
        sums: whether losses are sums over the batch, without a weight of their own.

    Raises:
        ModelError: the result is no loss, or its number of samples is not known.
    """
    if isinstance(result, tuple) and (len(result) != 2 or sums):
        raise ModelError(
            f"the loss is a tuple of {len(result)}: "
            + ("with reduction='sum' " if sums else "")
            + ("return it alone" if sums else "return it alone, or (loss, weight)")
        )
    weighed = isinstance(result, tuple)
    loss, weight = result if weighed else (result, None)
    samples = samples_of(batch, share, weighed=weighed)
    parts: dict[str, torch.Tensor] = {}
    if isinstance(loss, Mapping) and loss:
        parts = {name: _checked(f"loss {name!r}", value) for name, value in loss.items()}
        loss = sum((value.reshape(()) for value in parts.values()), torch.zeros(()))
    weight = checked_weight(weight) if weighed else float(samples)
    return Weighed(_checked("the loss", loss), parts, samples, weight)


def _checked(what: str, loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
        raise ModelError(
            f"{what} is {describe(loss)}: return the batch's mean as a tensor with one real "
            "number, which knows its gradient"
        )
    return loss


def with_parts(
    parts: Mapping[str, torch.Tensor], metrics: Mapping[str, float], per: int
) -> dict[str, float]:
    """Return metrics with losses by name, divided by `per` to be means.

    Raises:
        ModelError: a metric has the name of a loss, or a loss is not named by a string.
    """
    numbers = dict(metrics)
    for name, value in parts.items():
        if name in metrics or not isinstance(name, str):
            raise ModelError(
                f"a loss is named {name!r:.200}: name it by a string that no metric has"
            )
        numbers[name] = value.item() / per
    return numbers


def samples_of(batch: Any, share: Share | None, *, weighed: bool) -> int:
    """Return the number of samples in a batch; ModelError: its arrays have several lengths.

    Args:
        share: numbers of samples; None if the data choose their own batches.
        weighed: whether the batch has a weight of its own, so that the number is only reported, and the length of
            its last array, usually the target, will do.
    """
    if share is not None:
        return share.samples
    if (count := _count(batch)) is not None:
        return count
    lengths = _lengths(batch)
    if weighed:
        return lengths[-1]
    raise ModelError(
        f"the batch has arrays of lengths {', '.join(map(str, dict.fromkeys(lengths)))}, and its "
        "data choose their own batches: which of these counts samples? Give the loss a weight, the "
        "number of samples (TorchModel: return (mean loss, number); JaxModel: weight=), or give "
        "data with a length (a map-style dataset), whose samples the library counts itself"
    )


def _count(batch: Any) -> int | None:
    """Return the number of samples in a batch: the common length of its arrays; None if lengths differ.

    Arrays may lie in lists. A list of dicts, such as a detector's targets, has one for each sample, whose images may
    then be a list too.
    """
    if isinstance(batch, (tuple, list)):
        for part in batch:
            if isinstance(part, (tuple, list)) and part and isinstance(part[0], Mapping):
                return len(part)
    lengths = _lengths(batch)
    if len(set(lengths)) <= 1:
        return lengths[0] if lengths else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    outer = {len(p) for p in parts if getattr(p, "ndim", 0) or isinstance(p, (tuple, list))}
    return outer.pop() if len(outer) == 1 else None


def _lengths(batch: Any) -> list[int]:
    """Return the lengths of a batch's arrays; of its lists of scalars if it has no array."""
    leaves = list(_leaves(batch))
    arrays = [len(leaf) for leaf in leaves if getattr(leaf, "ndim", 0)]
    return arrays or [len(leaf) for leaf in leaves if isinstance(leaf, (tuple, list))]


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
