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
    """Return means by name over parts, of which some may lack a metric, and the weights of those that have their own.

    A metric that weighs nothing in all parts is NaN; one with a weight of its own is what the first part says.
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
