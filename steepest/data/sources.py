"""Training data as users give them, Ray Datasets among them."""

from __future__ import annotations

from typing import Any

from steepest.core.data import sources
from steepest.core.data.protocol import Source


def as_source(data: Any, batch_size: int | None) -> tuple[Source, int]:
    """Return a user's training data as a source, and the batch size.

    Args:
        data: a materialized Ray Dataset, or anything that `steepest.core.data.sources.as_source` takes.
        batch_size: as there.

    Raises:
        ConfigurationError: as there; or a Dataset that is not materialized.
    """
    if type(data).__module__.startswith("ray.data."):  # whose program has imported Ray
        from steepest.data.ray_dataset import RayDataset

        data = RayDataset(data)
    return sources.as_source(data, batch_size)
