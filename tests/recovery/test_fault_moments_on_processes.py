"""Real processes that are killed in the middle of an update: all of it happens, once, or none of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
)
from steepest.testing import Fault, InProcessCluster, Moment, with_faults
from tests.reference import Task, Weights, same_bits, samples

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("machine")]

SAMPLES, BATCH, WORKERS = 64, 2, 2
EPOCH = SAMPLES // (BATCH * WORKERS)  # steps
STEPS = 3 * EPOCH
DIES = EPOCH + 5  # in this step


class Counting(nn.Module):
    """A network, and for each sample a number that its gradient raises: the weights say who was trained how often."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.net(x), self.count[number].unsqueeze(1)], dim=1)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output[:, :2], target) - output[:, 2].mean()


@dataclass(frozen=True)
class Groups:
    """Counters are raised by one for each sample of an update, the network has momentum."""

    parts: int

    def __call__(self, module: Any) -> torch.optim.Optimizer:
        groups = [{"params": [module.count], "lr": float(self.parts), "momentum": 0.0}]
        return torch.optim.SGD(
            [*groups, {"params": module.net.parameters()}], lr=0.01, momentum=0.9
        )


def task(strategy: Any) -> Task:
    together = getattr(strategy, "mode", "sync") == "sync"
    x, y = samples(SAMPLES)
    return Task(
        Counting,
        Groups(BATCH * (WORKERS if together else 1)),
        (x, torch.arange(SAMPLES), y),
        loss,
        BATCH,
    )


@cache
def straight(strategy: Any, steps: int) -> Weights:
    """What a run in peace gives."""
    cluster = InProcessCluster(task(strategy).creator(), num_workers=WORKERS, strategy=strategy)
    cluster.step(steps)
    return cluster.weights()


def settle(trainer: DistributedSGD) -> None:
    """Takes some steps, before the fault, until all is ready for it: spare processes are up, a copy was taken."""
    trainer.step()
    cluster = trainer._live()
    for spare in trainer._supervisor.observation.reserve._spares:
        spare.placing.get()
    copies = cluster.run_config.failure.snapshot_every is not None
    while copies and trainer._supervisor.snapshots.taken is None:
        trainer.step()
    assert trainer.stats().step < DIES


def survives(strategy: Any, fault: Fault, about: str, lives: Path, **failure: Any) -> None:
    """Trains although that happens, and looks whether each sample was trained as often as it should have been."""
    creator = with_faults(task(strategy).creator(), [fault], lives)
    run_config = RunConfig(failure=FailureConfig(spares=1, **failure))
    with DistributedSGD(
        creator, num_workers=WORKERS, strategy=strategy, run_config=run_config
    ) as trainer:
        settle(trainer)
        trainer.fit(steps=STEPS - trainer.stats().step, progress=False)
        for _ in range(100):
            if trainer.stats().replaced:
                break
            trainer.fit(
                steps=EPOCH, progress=False
            )  # asynchronous ones do not wait for the successor
        stats, weights = trainer.stats(), trainer.weights()
        assert stats.replaced == 1
    file = lives / f"{fault.role}-{fault.index}-life-0"
    assert re.fullmatch(rf"{fault} at {fault.at}(: {about})?\n", file.read_text())
    assert stats.step % EPOCH == 0
    assert torch.equal(
        weights["count"], torch.full((SAMPLES,), stats.step // EPOCH, dtype=torch.float64)
    )
    if getattr(strategy, "mode", "sync") == "sync":
        assert same_bits(weights, straight(strategy, stats.step))


SOME = r"\[\d.*\]"
APPLIED = f"chunks {SOME} are updated, {SOME} are not"
SERVED = {
    "push": r"chunk \d+ has come from worker \d",
    "apply": APPLIED,
    "pull": r"chunk \d+ has left for (worker|aggregator) \d",
}
PULLED = r"chunk \d+ of version \d+ is here, others are not"


def served(mode: Any = "sync", **settings: Any) -> ParameterServerStrategy:
    return ParameterServerStrategy(mode=mode, num_servers=2, chunk_bytes=64, **settings)


@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.full)])
def test_a_worker_dies_with_some_of_its_new_weights(mode: str, tmp_path: Path) -> None:
    survives(served(mode), Fault.kill("worker", 1, step=DIES, at="pull"), PULLED, tmp_path)


@pytest.mark.parametrize(
    ("at", "server"),  # server 0 is beside the coordinator
    [
        ("apply", 0),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (("push", 1), ("apply", 1), ("pull", 0))
        ),
    ],
)
def test_a_server_dies_in_the_middle_of_an_update_and_a_copy_has_it(
    at: Moment, server: int, tmp_path: Path
) -> None:
    survives(
        served(replication=2), Fault.kill("server", server, step=DIES, at=at), SERVED[at], tmp_path
    )


@pytest.mark.full
@pytest.mark.parametrize(("at", "server"), [("apply", 0), ("pull", 1)])
def test_a_server_dies_in_the_middle_of_an_update_and_all_go_back_to_a_snapshot(
    at: Moment, server: int, tmp_path: Path
) -> None:
    survives(
        served(),
        Fault.kill("server", server, step=DIES, at=at),
        SERVED[at],
        tmp_path,
        snapshot_every=3,
    )


@pytest.mark.full
def test_a_server_of_an_asynchronous_run_dies_with_half_an_update_made(tmp_path: Path) -> None:
    fault = Fault.kill("server", 0, step=2 * DIES, at="apply")
    survives(served("async", replication=2), fault, APPLIED, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("at", ["backward", "pull"])
def test_a_member_of_an_allreduce_dies_in_its_step(at: Moment, tmp_path: Path) -> None:
    strategy = AllreduceStrategy(replication=2, chunk_bytes=64)
    survives(
        strategy,
        Fault.kill("worker", 1, step=DIES, at=at),
        PULLED if at == "pull" else "",
        tmp_path,
    )


def test_a_member_of_an_allreduce_dies_with_half_of_its_slice_updated(tmp_path: Path) -> None:
    strategy = AllreduceStrategy(replication=2, chunk_bytes=64)
    survives(strategy, Fault.kill("server", 1, step=DIES, at="apply"), APPLIED, tmp_path)
