"""What attaches to a job's workers beside dense models, their push and their pull."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from steepest.models.protocol import Model

if TYPE_CHECKING:
    from steepest.engine.job import Job
    from steepest.engine.replicas import Memory, Replicas, WorkShare


class Extension:
    """A way of training that the engine does not know; those who build a job's roles pass it to `hosting`.

    It is asked as a worker's parts are made, and answers for the jobs that concern it; by default for
    none. Used on the router's thread.
    """

    def replicas(
        self,
        job: Job,
        share: WorkShare,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        memory: Memory | None,
    ) -> Replicas | None:
        """Return replicas that compute in another way than `Replicas`, or None; arguments as those of `Replicas`."""
        return None
