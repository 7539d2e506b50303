"""Models whose workers take known times, of virtual time."""

from __future__ import annotations

import torch

from steepest import TorchModel
from steepest.core.system import system

SECONDS = (0.5, 2.0, 0.25)  # that each worker's forward pass takes, of virtual time


def creator(worker_index: int, device_index: int) -> TorchModel:
    """A model whose forward pass lasts so long as `SECONDS` say."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        system().sleep(SECONDS[worker_index])
        return torch.nn.functional.mse_loss(output, target)

    torch.manual_seed(1)
    return TorchModel(
        torch.nn.Linear(3, 2).double(),
        loss=loss,
        data=(torch.ones(24, 3).double(), torch.ones(24, 2).double()),
        batch_size=4,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    )
