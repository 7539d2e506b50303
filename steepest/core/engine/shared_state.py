"""The part of a job's state that its servers and its coordinator hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from steepest.core.engine.commit_log import Commit
from steepest.core.optim.portable import Record
from steepest.core.tensors.layout import ParameterLayout


@dataclass
class SharedState:
    """The state of servers and coordinator at one version, as far as it was read; see `WorkerState` for the rest."""

    version: int  # of the weights
    #: The flat vector (uint8, of the layout's size); None if it was not read, or `holders` have it.
    weights: torch.Tensor | None = None
    #: The optimizer's state, slice by slice, and opaque chunks, piece by piece.
    records: list[Record] = field(default_factory=list)
    #: Of the coordinator: "ledger" (see `Leases.state`), "history", "open" if a step has begun (see `OpenStep.state`)
    #: and, if the schedule has a state that can be carried, "schedule" (see `Schedule.state`), which may be of an
    #: earlier step.
    state: dict[str, Any] = field(default_factory=dict)
    #: From the arrival of a server's first part to that of its last: the most of all servers.
    seconds: float = 0.0
    #: Every commit up to this version, and perhaps later ones; None if they were not kept or are not known.
    log: list[Commit] | None = None
    #: Without weights, the processes that have each chunk.
    holders: Mapping[int, Sequence[Any]] | None = None

    def named(self, layout: ParameterLayout) -> dict[str, torch.Tensor]:
        """Return the weights, which were read, by name."""
        assert self.weights is not None
        return layout.named(self.weights)
