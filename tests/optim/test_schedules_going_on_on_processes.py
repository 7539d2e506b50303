"""Schedules that go on in other processes: checkpoints, other strategies and sizes, deaths."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR

from steepest import AllreduceStrategy, DistributedSGD, FailureConfig, LocalStrategy, RunConfig
from steepest.core.protocol.commit_state import SCHEDULE_EVERY
from tests.reference import Task, samples

pytestmark = pytest.mark.usefixtures("machine_of_module")
COUNT = "STEEPEST_TEST_SCHEDULED"


class Counting(ExponentialLR):
    """Counts in the process that it is in."""

    def step(self, epoch: int | None = None) -> None:
        os.environ[COUNT] = str(int(os.environ.get(COUNT, "0")) + 1)
        super().step(epoch)


def grouped(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(module.parameters())]
    )


TASK = Task(optimizer=grouped, data=samples(23), lr_scheduler=lambda o: Counting(o, 0.997))


class Opaque(ExponentialLR):
    """Its state has no JSON."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.secret = object()
        super().__init__(optimizer, 0.997)


LOGGED = RunConfig(failure=FailureConfig(spares=0), keep_log=True)


def rates(step: int) -> list[dict[str, float]]:
    """What a loop gives."""
    optimizer = grouped(TASK.module())
    scheduler = ExponentialLR(optimizer, 0.997)
    for _ in range(step):
        optimizer.step()
        scheduler.step()
    return [{"lr": group["lr"]} for group in optimizer.param_groups]


def counted(trainer: DistributedSGD) -> list[int]:
    return trainer.foreach_worker(lambda view: int(os.environ.get(COUNT, "0")))


def pids(trainer: DistributedSGD) -> list[int]:
    return trainer.foreach_worker(lambda view: view.pid)


def more(trainer: DistributedSGD, before: list[int]) -> int:
    """The most that any of those processes has counted since."""
    return max(now - then for now, then in zip(counted(trainer), before, strict=False))


@pytest.fixture(scope="module")
def saved(machine_of_module: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schedule") / "checkpoint"
    with DistributedSGD(TASK.creator(), num_workers=2, strategy="ps") as trainer:
        trainer.fit(steps=250, progress=False)
        trainer.save(path)
    return path


@pytest.mark.full
@pytest.mark.long
def test_a_checkpoint_goes_on_with_other_numbers_strategies_and_sizes(saved: Path) -> None:
    with DistributedSGD(
        TASK.creator(), num_workers=3, strategy="allreduce", run_config=LOGGED
    ) as trainer:
        before = counted(trainer)
        trainer.restore(saved)
        trainer.fit(steps=2, progress=False)
        assert more(trainer, before) <= 5
        assert [commit.hyperparameters for commit in trainer.log().commits] == [
            rates(250),
            rates(251),
        ]
        before = counted(trainer)
        trainer.set_strategy(LocalStrategy(sync_every=5))
        trainer.fit(steps=2, progress=False)
        trainer.resize(num_workers=2)
        trainer.fit(steps=1, progress=False)
        trainer.save(saved.with_name("local"))
        trainer.set_strategy("allreduce")
        trainer.step()
        assert more(trainer, before) <= 3 * 5 + 10
        assert trainer.log().commits[0].hyperparameters == rates(252 + 3 * 5)
        before = counted(trainer)
        trainer.restore(saved.with_name("local"))
        trainer.step()
        assert more(trainer, before) <= 10
        assert trainer.log().commits[0].hyperparameters == rates(252 + 3 * 5)


@pytest.mark.full
@pytest.mark.long
def test_a_coordinator_that_dies_has_a_successor_with_a_short_way(saved: Path) -> None:
    config: Any = AllreduceStrategy(replication=2)
    with DistributedSGD(
        TASK.creator(), num_workers=3, strategy=config, run_config=LOGGED
    ) as trainer:
        trainer.restore(saved)
        trainer.fit(steps=2, progress=False)
        before = dict(zip(pids(trainer), counted(trainer), strict=True))
        os.kill(pids(trainer)[0], signal.SIGKILL)
        trainer.fit(steps=3, progress=False)
        after = dict(zip(pids(trainer), counted(trainer), strict=True))
        assert (
            max(after[pid] - before[pid] for pid in before.keys() & after.keys())
            <= SCHEDULE_EVERY + 10
        )
        found = [commit.hyperparameters for part in trainer.log().parts for commit in part.commits]
        assert found == [rates(step) for step in range(250, 255)]


@pytest.mark.full
@pytest.mark.long
def test_a_schedule_that_cannot_be_carried_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = Task(optimizer=grouped, data=samples(23), lr_scheduler=Opaque)
    with DistributedSGD(task.creator(), num_workers=1, run_config=LOGGED) as trainer:
        trainer.fit(steps=2, progress=False)
        trainer.set_weights(trainer.weights())
        trainer.save(tmp_path / "checkpoint")
        assert not [line for line in caplog.messages if "from its beginning" in line]
        for _ in range(2):
            trainer.restore(tmp_path / "checkpoint")
            trainer.step()
            assert trainer.log().commits[0].hyperparameters == rates(2)
        assert (
            len([line for line in caplog.messages if "from its beginning (2 steps)" in line]) == 1
        )
