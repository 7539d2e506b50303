"""Rows that count how often their ids were in what was committed: each push counts once, whatever happens."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steepest.engine.commit_log import CommitLog
from steepest.messages.driver import Result
from steepest.messages.message import Kind, Message
from steepest.models.embedding import Embedding
from steepest.tables.initial import Zeros
from steepest.tables.row_optimizers import SGD
from steepest.testing import Fault, InProcessCluster
from tests.drawn import seeds
from tests.modes import EACH, check_counts, make, trained
from tests.reference import Task, sgd
from tests.table_tasks import DIM, ROWS, clicks, described, rows_of, table_values
from tests.test_worker_replacement import doomed

STEPS = 6


class Sightings(nn.Module):
    """Its gradients are -1 for each sighting: with a learning rate of 1, a row counts the sightings of its id."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Embedding(described("rows", optimizer=SGD(lr=1.0), initial=Zeros()))
        self.updates = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        """Return what is to be as small as can be."""
        return -self.rows(ids).sum() - self.updates.sum()


def counting() -> Task:
    data = clicks(23)[1], torch.zeros(23)
    return Task(Sightings, sgd(lr=1.0), data, lambda output, target: output, batch_size=1)


TASK = counting()


def expected_counts(log: CommitLog) -> tuple[Tensor, int]:
    """How often each id was in the samples that were committed, times learning rates; how many pushes had samples."""
    counts, pushes = torch.zeros(ROWS, dtype=torch.float64), 0
    assert log.plan is not None
    shares, parts = log.cuts
    for commit in log.commits:
        for push in commit.pushes:
            found = log.plan.share(push.share // shares, push.share % shares, parts)
            ids = TASK.data[0][torch.from_numpy(found)].flatten()
            counts += commit.rate * torch.bincount(ids, minlength=ROWS).double()
            pushes += len(found) > 0
    return counts, pushes


def counted(cluster: InProcessCluster, *, exactly: bool = True) -> None:
    """Rows and dense weights hold what was committed, each push once."""
    log = cluster.log()
    check_counts(cluster, log)
    rows = rows_of(cluster)
    values = table_values(TASK, rows)["rows.weight"]
    expected, pushes = expected_counts(log)
    if exactly:
        assert torch.equal(values, expected[:, None].expand(ROWS, DIM))
        seen = np.zeros(ROWS)
        for shard in range(TASK.table_shards):
            ids = rows[f"tables/{shard}/ids"].numpy()
            seen[ids] = rows[f"tables/{shard}/sightings"].numpy()
            (updates,) = rows[f"tables/{shard}/updates"].tolist()
            assert updates == len(log.commits)
        assert seen.tolist() == expected.tolist()
        assert set(cluster.weights()["updates"].tolist()) == {float(pushes)}
    else:
        assert torch.allclose(values, expected[:, None].expand(ROWS, DIM), rtol=1e-12, atol=0)


def takes_all(cluster: InProcessCluster, steps: int = STEPS) -> None:
    """The job takes so many steps, whatever fails meanwhile."""
    taken = 0
    while taken < steps:
        taken += sum(isinstance(found, Result) for found in cluster.step(steps - taken))


@pytest.mark.parametrize("name", EACH)
@seeds(1)
def test_each_push_counts_once(name: str, seed: int) -> None:
    cluster = make(name, TASK, servers=1 + seed % 3, shuffle=seed)
    trained(cluster, STEPS)
    counted(cluster, exactly=name != "async-rate")


def repeated(cluster: InProcessCluster) -> None:
    """Everything that is said of pushes and rows is said twice."""
    before = cluster.network.filter

    def twice(message: Message) -> list[Message]:
        kinds = (Kind.PUSH, Kind.REPORT, Kind.PULL_ROWS, Kind.ROWS, Kind.COMMIT, Kind.PUSH_STAGED)
        found = list(before(message))
        return found * 2 if message.kind in kinds else found

    cluster.network.filter = twice


@pytest.mark.parametrize("name", ["async", "async-drop", "ssp-2"])
@seeds(1)
def test_repetitions_count_once(name: str, seed: int) -> None:
    cluster = make(name, TASK, shuffle=seed)
    repeated(cluster)
    trained(cluster, STEPS)
    counted(cluster)


@pytest.mark.parametrize("name", EACH)
@seeds(1)
def test_pushes_of_the_dead_count_once_or_not_at_all(name: str, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [Kind.PULL_ROWS, Kind.PUSH, Kind.REPORT]
    deaths = [(rng.randrange(3), rng.choice(kinds), rng.randint(1, 9)) for _ in range(3)]
    cluster = doomed(name, deaths, shuffle=seed, creator=TASK.creator())
    trained(cluster, STEPS)
    trained(cluster, STEPS)
    counted(cluster, exactly=name != "async-rate")


@pytest.mark.parametrize("name", ["async", "async-drop", "ssp-0", "ssp-2"])
def test_pushes_of_steps_that_raised_count_once_or_not_at_all(name: str) -> None:
    for fault in (Fault.raises("worker", 1, step=2), Fault.kill("worker", 1, step=2, at="push")):
        cluster = make(name, TASK, faults=[fault], replaces=True)
        takes_all(cluster)
        counted(cluster)
