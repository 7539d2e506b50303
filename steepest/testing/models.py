"""Models for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from steepest.core.engine.job import ModelCreator
from steepest.tables.modules.torch_model import TorchModel


def linear_model_creator(
    *,
    samples: int = 20,
    batch_size: int = 4,
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
    **settings: Any,
) -> ModelCreator:
    """Return a model creator for tests: linear regression in float64 on fixed random data.

    Args:
        samples: in the data set.
        batch_size: samples per replica and step.
        optimizer: as of `TorchModel`; by default SGD with a learning rate of 0.1.
        settings: further arguments of `TorchModel`.
    """

    def create(worker_index: int, device_index: int) -> TorchModel:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
        y = torch.randn(samples, 2, generator=generator, dtype=torch.float64)
        return TorchModel(
            torch.nn.Linear(3, 2).double(),
            loss=torch.nn.functional.mse_loss,
            data=(x, y),
            batch_size=batch_size,
            optimizer=optimizer or (lambda module: torch.optim.SGD(module.parameters(), lr=0.1)),
            **settings,
        )

    return create
