"""How local SGD attaches to the workers of a job."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job
from steepest.core.engine.replicas import Memory, Replicas, WorkShare
from steepest.core.models.protocol import Model
from steepest.strategies.local_sgd.replicas import LocalReplicas


class LocalSgd(Extension):
    """Replicas with an optimizer of their own, if the strategy asks for them."""

    def replicas(
        self,
        job: Job,
        share: WorkShare,
        models: Sequence[Model],
        devices: Sequence[torch.device],
        memory: Memory | None,
    ) -> Replicas | None:
        """Return `LocalReplicas` if workers apply the model's optimizer."""
        if not job.strategy.local:
            return None
        return LocalReplicas(
            models,
            devices,
            job.description.optimizer_spec,
            share,
            updates_before=job.updates_before,
            clip_norm=job.clip_norm,
            memory=memory,
            delay=job.strategy.delay,
            blend=job.strategy.blend,
        )
