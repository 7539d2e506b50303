"""Means of metrics over batches, replicas and workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Measured(NamedTuple):
    """Metrics of some samples."""

    metrics: Mapping[str, float]  # means over the samples, by name
    weight: float  # of the samples in means
    weights: Mapping[str, float]  # of those metrics that have another weight than the samples


def mean_metrics(parts: Iterable[Measured]) -> tuple[dict[str, float], dict[str, float]]:
    """Return means by name over parts, some of which may lack a metric, and the weights of metrics with their own.

    A metric without weight in all parts is NaN, or, if it has weights of its own, the value of the first part.
    """
    parts = list(parts)
    means: dict[str, float] = {}
    weights: dict[str, float] = {}
    for name in sorted({name for part in parts for name in part.metrics}):
        having = [part for part in parts if name in part.metrics]
        values = [(part.metrics[name], part.weights.get(name, part.weight)) for part in having]
        own = any(name in part.weights for part in having)
        total = sum([weight for _, weight in values])
        if total:
            means[name] = sum([value * weight for value, weight in values if weight]) / total
        else:
            means[name] = values[0][0] if own else math.nan
        if own:
            weights[name] = total
    return means, weights
