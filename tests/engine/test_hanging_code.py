"""Users' code that does not return: the error names the process, the step, the samples, and the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DeadlineConfig, DistributedSGD, FailureConfig, TorchModel
from steepest.core.data.sampler import SamplePlan
from steepest.errors import DeadlineError, PeerLostError
from tests.reference import samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, pause, run_config
from tests.step_calls import PACKAGE

BAD = 37
X, Y = samples(64)


@pytest.fixture
def simulation() -> Iterator[Simulation]:
    simulation = Simulation(1)
    with quiet(), simulation.running():
        yield simulation


class Data(torch.utils.data.Dataset[Any]):
    """A sample of which does not come.

    Args:
        stops: stops its process, which answers nothing from then on; None to wait.
    """

    def __init__(self, stops: Simulation | None) -> None:
        self.stops = stops

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            if self.stops is not None:
                process = self.stops.world.here()
                assert process is not None
                self.stops.world.stop(process)
            wait_for_the_disk()
        return X[index], Y[index]


def wait_for_the_disk() -> None:
    pause(1e6)


def timed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    pause(0.05)
    return nn.functional.mse_loss(output, target)


def trainer(stops: Simulation | None, strategy: str) -> DistributedSGD:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            nn.Linear(3, 2).double(),
            loss=timed,
            data=Data(stops),
            batch_size=4,
            optimizer=sgd(),
        )

    config = run_config(failure=FailureConfig(spares=1, max_failures=1))
    return DistributedSGD(create, 2, strategy=strategy, run_config=config)


def place_of_the_bad_one() -> tuple[int, int, str]:
    """The step, counted from 1, the worker, and the samples of that share in words."""
    plan = SamplePlan(64, 8, 0)
    for step in range(8):
        for worker in range(2):
            share = plan.share(step, worker, 2).tolist()
            if BAD in share:
                return step + 1, worker, ", ".join(map(str, share))
    raise AssertionError


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "async"])
def test_a_sample_that_does_not_come_is_named_with_the_code_that_waits(
    strategy: str, simulation: Simulation
) -> None:
    step, worker, share = place_of_the_bad_one()
    with (
        trainer(None, strategy) as sgd_,
        pytest.raises(DeadlineError, match=r"still waiting for worker \d; nothing") as caught,
    ):
        sgd_.fit(steps=12, progress=False)
    found = re.search(r"; worker (\d) computes its share of (.*)$", str(caught.value))
    assert found is not None
    assert found[2] == f"step {step}: samples {share} of the data set"
    assert strategy == "async" or found[1] == str(worker)  # there any worker may get the share
    frames = str(caught.value.__cause__)
    assert f"worker {found[1]} is in:" in frames
    assert frames.index("in __getitem__") < frames.index("in wait_for_the_disk")
    assert PACKAGE not in frames


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_a_sample_that_stops_one_process_after_the_other_is_named(
    strategy: str, simulation: Simulation
) -> None:
    with trainer(simulation, strategy) as sgd_, pytest.raises(PeerLostError) as caught:
        sgd_.fit(steps=12, progress=False)
    assert "no sign of life for" in str(caught.value)
    said = r"; step \d+, the first without a result, has for it samples ([\d, ]+) of the data set"
    found = re.search(said, str(caught.value))
    assert found is not None
    assert str(BAD) in found[1].split(", ")


@pytest.mark.parametrize("late", [(1,), (0, 1)])
def test_processes_that_do_not_come_up_are_named(
    late: tuple[int, ...], simulation: Simulation
) -> None:
    def create(worker_index: int, device_index: int) -> TorchModel:
        if worker_index in late:
            pause(1e6)
        return TorchModel(
            nn.Linear(3, 2).double(),
            loss=nn.functional.mse_loss,
            data=(X, Y),
            batch_size=4,
            optimizer=sgd(),
        )

    config = run_config(deadlines=DeadlineConfig(start=1.0))
    with pytest.raises(DeadlineError) as caught:
        DistributedSGD(create, 2, run_config=config)
    missing, others = (
        ("worker 1", " (worker 0 did)") if late == (1,) else ("worker 0, worker 1", "")
    )
    assert str(caught.value) == (
        f"{missing} did not build the model within 5 s{others}: raise DeadlineConfig(start=...)"
    )
