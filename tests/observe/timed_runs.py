"""Runs whose workers take known times, of virtual time, and their timelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from steepest import DistributedSGD, TorchModel
from steepest.core.system import system
from steepest.observe.timeline.trace_file import read_trace
from tests.simulation.run import Simulation, run_config

SECONDS = (0.5, 2.0, 0.25)  # that each worker's forward pass takes, of virtual time
STEPS = 3  # that are recorded, from the second on


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


def record(path: Path, strategy: str, workers: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Record some steps of a run; return the events and the metadata."""
    with (
        Simulation(seed=1).running(),
        DistributedSGD(creator, workers, strategy=strategy, run_config=run_config()) as trainer,
    ):
        trainer.step()
        with trainer.timeline(path):
            trainer.fit(steps=STEPS, progress=False)
        trainer.step()
    return read_trace(path)
