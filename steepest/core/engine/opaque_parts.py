"""What a job's models have beside the flat vector, of which the engine knows no more: `OpaqueParts`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from steepest.core.engine.stores import Stores
from steepest.core.messages.fields import Schema
from steepest.core.messages.permissions import Line
from steepest.core.optim.spec import OptimizerSpec
from steepest.core.strategies.strategy import Strategy
from steepest.core.tensors.layout import ParameterLayout


class OpaqueParts(Protocol):
    """What models have beside the parameters of the flat vector, for which the opaque chunks of their layout stand.

    `Extension.opaque` finds it in a model; it is the same in all workers, and hashable.
    """

    @property
    def lines(self) -> Mapping[Line, Schema]:
        """The messages about it, which the engine does not know, by who may send them to whom."""

    def require(self, strategy: Strategy, spec: OptimizerSpec) -> None:
        """Check that it can be trained so; ConfigurationError otherwise.

        Args:
            strategy: of the job.
            spec: the optimizer of the dense parameters.
        """

    def difference(self, other: OpaqueParts) -> str | None:
        """Return in words how that of another replica differs from this, or None when they agree."""

    def keeps_state(self, strategy: Strategy) -> bool:
        """Return whether workers keep some of it that no server holds."""

    def stores(self, layout: ParameterLayout, seed: int) -> Stores:
        """Return what makes the stores of a job with a layout and a seed."""
