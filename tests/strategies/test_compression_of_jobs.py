"""Compressed training among real processes: the bits of one process, checkpoints, other strategies afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import AllreduceStrategy, DistributedSGD, ParameterServerStrategy, PowerSGD, TopK
from steepest.testing import InProcessCluster
from tests.reference import Task, difference, same_bits, samples, sgd
from tests.whole_checkpoints import all_of

pytestmark = pytest.mark.usefixtures("anywhere")


def wide() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 2)
    )


TASK = Task(wide, sgd(momentum=0.9), samples(24, dtype=torch.float32))


def left_out(path: Path) -> dict[str, torch.Tensor]:
    """By worker and parameter, from a checkpoint."""
    replicas = all_of(path).replicas
    return {
        key.removeprefix("compression:"): value
        for key, value in replicas.items()
        if "/left/" in key
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("choice", [TopK(0.1), PowerSGD(2)], ids=["top-k", "PowerSGD"])
def test_a_run_is_saved_and_goes_on_to_the_bit(tmp_path: Path, choice: Any) -> None:
    strategy = AllreduceStrategy(compression=choice, transport="tcp")
    straight = InProcessCluster(TASK.creator(), num_workers=2, strategy=strategy)
    straight.step(12)
    with DistributedSGD(TASK.creator(), num_workers=2, strategy=strategy) as trainer:
        trainer.fit(steps=6, progress=False)
        trainer.save(tmp_path)
        trainer.fit(steps=6, progress=False)
        assert same_bits(trainer.weights(), straight.weights())
        trainer.restore(tmp_path)
        trainer.fit(steps=6, progress=False)
        assert same_bits(trainer.weights(), straight.weights())
    kept = left_out(tmp_path)
    assert {key.split("/")[0] for key in kept} == {"0", "1"}
    assert any(value.any() for value in kept.values())

    other = ParameterServerStrategy(compression=choice, transport="tcp")
    with DistributedSGD(TASK.creator(), num_workers=3, strategy=other) as trainer:
        trainer.restore(tmp_path)
        trainer.save(tmp_path / "by three")
        found = left_out(tmp_path / "by three")
        assert {key.split("/")[0] for key in found} == {"0", "1", "2"}
        for name in {key.partition("/")[2] for key in kept}:  # nothing of it is lost
            before, after = (
                torch.stack(
                    [value for key, value in state.items() if key.partition("/")[2] == name]
                ).mean(0)
                for state in (kept, found)
            )
            assert torch.allclose(before, after, atol=1e-6)
        trainer.fit(steps=3, progress=False)


def test_what_was_left_out_goes_along_to_another_strategy() -> None:
    first = AllreduceStrategy(compression=TopK(0.1), transport="tcp")
    second = ParameterServerStrategy(compression=TopK(0.1), transport="tcp")
    straight = InProcessCluster(TASK.creator(), num_workers=2, strategy=first)
    straight.step(12)
    with DistributedSGD(TASK.creator(), num_workers=2, strategy=first) as trainer:
        trainer.fit(steps=6, progress=False)
        trainer.set_strategy(second)
        trainer.fit(steps=6, progress=False)
        assert difference(trainer.weights(), straight.weights()) < 1e-5
        trainer.set_strategy("allreduce")  # which has no use for it
        trainer.fit(steps=2, progress=False)
