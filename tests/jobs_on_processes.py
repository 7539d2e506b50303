"""Jobs on processes of this machine, of which each test module has one template."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from steepest import DeadlineConfig, DistributedSGD, FailureConfig, RunConfig
from steepest.runtime.job_runtime import using
from steepest.runtime.machine.runtime import MachineRuntime

SECONDS = 60.0
#: A death changes no bit: all wait for the successor, and go back two steps at most.
CONFIG = RunConfig(
    runtime="processes",
    failure=FailureConfig(patience=math.inf, snapshot_every=2, spares=0),
    deadlines=DeadlineConfig(step=SECONDS),
)


@pytest.fixture(scope="module")
def machine_of_module() -> Iterator[MachineRuntime]:
    """What runs the jobs of all tests of a module."""
    made = MachineRuntime()
    yield made
    made.close()


@pytest.fixture
def machine(machine_of_module: MachineRuntime) -> Iterator[MachineRuntime]:
    """What runs a test's jobs; afterwards this process has the runtime of others again."""
    with using(machine_of_module):
        yield machine_of_module


def trained(
    creator: Callable[..., Any], workers: int, epochs: int = 2, **settings: Any
) -> dict[str, torch.Tensor]:
    """Return the state that a job comes to; settings are those of `DistributedSGD`."""
    settings = {"seed": 3, "run_config": CONFIG, **settings}
    with DistributedSGD(creator, workers, **settings) as trainer:
        trainer.fit(epochs=epochs, progress=False)
        return trainer.state_dict()
