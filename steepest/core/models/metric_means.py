"""Comparison of a metric of a batch with those of its halves: tells functions that are no mean over samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from steepest.core.models.containers import changed_parts
from steepest.core.models.scalars import as_number

_ROUNDING = 1e-4  # of a mean of float32, relative to the largest of the three values
_NO_MEAN = (
    "metric {!r} is no mean over samples: of a batch of {} it is {:.4g}, and of the two halves of that batch {:.4g} on "
    "average. Results are means over batches and workers, so its value changes with batch_size and num_workers: give a "
    "metric of TorchMetrics, which evaluate() computes once, of all samples (docs/howto/auc.md)"
)


def told_of_no_mean(
    functions: Mapping[str, Callable[[Any, Any], Any]],
    values: Mapping[str, Any],
    output: Any,
    target: Any,
    samples: int,
) -> str:
    """Return a warning of the first metric whose value is not the mean of its values over the batch's two halves.

    Args:
        functions: of (output, target), by name.
        values: what they have returned of the whole batch.
        output: of the module; together with the target it is compared only if each of its tensors has a row for
            each sample.
        target: of the batch.
        samples: in the batch, at least two.

    Returns:
        The warning; "" if there is none, or if a function cannot tell: it raises, or returns NaN.
    """
    tensors = [each for each in _leaves((output, target)) if each.ndim]
    if not tensors or any(len(each) != samples for each in tensors):
        return ""
    half = samples // 2
    parts = [
        (rows.stop - rows.start, _rows(output, rows), _rows(target, rows))
        for rows in (slice(0, half), slice(half, samples))
    ]
    coarse = max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)
    for name, function in functions.items():
        try:
            found = [as_number(function(*given)) for _, *given in parts]
        except Exception:  # noqa: BLE001 - it was asked for whole batches, and need not take a part of one
            continue
        numbers = [each for each in (as_number(values[name]), *found) if each is not None]
        if len(numbers) < 3 or not all(map(math.isfinite, numbers)):
            continue
        whole = numbers[0]
        mean = (
            sum(count * each for (count, *_), each in zip(parts, numbers[1:], strict=True))
            / samples
        )
        if abs(whole - mean) > max(_ROUNDING, 4 * coarse) * max(map(abs, numbers)):
            return _NO_MEAN.format(name, samples, whole, mean)
    return ""


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(each)


def _rows(value: Any, rows: slice) -> Any:
    """Return a value with some rows of each tensor; what has no rows as it is."""
    if isinstance(value, torch.Tensor):
        return value[rows] if value.ndim else value
    if isinstance(value, (tuple, list, Mapping)):
        return changed_parts(value, lambda each: _rows(each, rows))
    return value
