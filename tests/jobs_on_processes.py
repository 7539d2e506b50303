"""Jobs on processes of this machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from steepest import DeadlineConfig, DistributedSGD, FailureConfig, RunConfig

SECONDS = 60.0
#: A death changes no bit: all wait for the successor, and go back two steps at most.
CONFIG = RunConfig(
    runtime="processes",
    failure=FailureConfig(patience=math.inf, snapshot_every=2, spares=0),
    deadlines=DeadlineConfig(step=SECONDS),
)


def trained(
    creator: Callable[..., Any], workers: int, epochs: int = 2, **settings: Any
) -> dict[str, torch.Tensor]:
    """Return the state that a job comes to; settings are those of `DistributedSGD`."""
    settings = {"seed": 3, "run_config": CONFIG, **settings}
    with DistributedSGD(creator, workers, **settings) as trainer:
        trainer.fit(epochs=epochs, progress=False)
        return trainer.state_dict()
