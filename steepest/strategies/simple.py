"""The reference for the other strategies: the driver averages gradients."""

from __future__ import annotations

from dataclasses import dataclass

from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import ChunkSpec

_WHOLE = 1 << 62  # bytes of a chunk: more than a model has


@dataclass(frozen=True, kw_only=True)
class SimpleStrategy(Strategy):
    """Average gradients on the driver.

    It is slow, and the reference for the other strategies.

    Attributes:
        clip_norm: the greatest norm of a gradient, as for `ParameterServerStrategy`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    name = "simple"

    @property
    def cut(self) -> ChunkSpec:
        """One chunk, of the whole model."""
        return ChunkSpec(_WHOLE)

    @property
    def in_driver(self) -> bool:
        """Whether the driver is the only server: it is."""
        return True

    def servers_for(self, nodes: int, workers: int) -> int:
        """Return 1."""
        return 1
