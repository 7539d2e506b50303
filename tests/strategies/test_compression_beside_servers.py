"""Compressed training with a worker beside a server, to which it compresses nothing: checkpoints restore all bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import DistributedSGD, LocalStrategy, ParameterServerStrategy, PowerSGD
from tests.reference import Task, Weights, same_bits, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation
from tests.whole_checkpoints import all_of

STRATEGIES: dict[str, Any] = {
    "int8 changes": LocalStrategy(sync_every=2, num_servers=1, compression="int8"),
    "PowerSGD changes": LocalStrategy(sync_every=2, num_servers=1, compression=PowerSGD(2)),
    "PowerSGD gradients": ParameterServerStrategy(num_servers=1, compression=PowerSGD(2)),
    "int8 gradients": ParameterServerStrategy(num_servers=2, compression="int8"),
}
TASK = Task(
    lambda: nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 2)),
    sgd(momentum=0.9),
    samples(24, dtype=torch.float32),
)


def bits(trainer: DistributedSGD) -> Weights:
    return {parameter: value.clone() for parameter, value in trainer.weights().items()}


@pytest.mark.few(3)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_worker_that_leaves_nothing_out_is_one_of_the_checkpoint_all_the_same(
    tmp_path: Path, name: str, workers: int
) -> None:
    def job() -> DistributedSGD:
        return DistributedSGD(TASK.creator(), workers, strategy=STRATEGIES[name])

    def apart() -> Simulation:
        return Simulation(7, cpus=(1,) * workers)

    with quiet(), apart().running(), job() as trainer:
        trainer.fit(steps=5, progress=False)
        trainer.save(tmp_path / "saved")
        trainer.fit(steps=5, progress=False)
        expected = bits(trainer)
    with quiet(), apart().running(), job() as trainer:
        trainer.restore(tmp_path / "saved")
        trainer.save(tmp_path / "again")
        trainer.fit(steps=5, progress=False)
        assert same_bits(bits(trainer), expected)
    saved, again = (all_of(tmp_path / path).replicas for path in ("saved", "again"))
    assert same_bits(saved, again)
    states = {key.split("/")[0]: 0 for key in saved if key.startswith("compression:")}
    assert len(states) in (0, workers)
