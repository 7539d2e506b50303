"""Embedding tables under local SGD in rounds of a quorum, at each worker's own pace, and in fragments."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steepest.core.data.sampler import SamplePlan
from steepest.core.engine.commit_log import CommitLog, LoggedPush
from steepest.strategies.local import LocalStrategy
from steepest.tables.job.row_messages import RowsOfPush
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.row_optimizers import SGD
from steepest.testing import Fault, InProcessCluster, Moment
from tests.modes import settle, trained
from tests.reference import Task, samples, sgd
from tests.table_jobs import FIRST, IDS, Words
from tests.table_tasks import OPTIMIZERS, clicks, explained, table_task
from tests.table_tools import table
from tests.tables.rows_ahead import shards

LR = 0.01
ROUNDS: list[dict[str, Any]] = [
    {"quorum": 1},
    {"quorum": 2},
    {"pace": "speed"},
    {"pace": "speed", "quorum": 1},
    {"pace": "speed", "quorum": 2, "grace": 1.0},
]
FRAGMENTS: list[dict[str, Any]] = [{"fragments": 2}, {"fragments": 2, "num_servers": None}]
FRAGMENTS += [{"fragments": 2} | each for each in ROUNDS]


def strategy_of(settings: dict[str, Any]) -> LocalStrategy:
    return LocalStrategy(**{"sync_every": 6, "num_servers": 2} | settings)


class Batches:
    """Which samples each push of a log was computed from."""

    def __init__(
        self, log: CommitLog, strategy: LocalStrategy, batch_size: int, count: int
    ) -> None:
        workers = log.num_workers
        self._updates = strategy.updates_of_share
        self._shares = workers * strategy.updates // self._updates
        self._parts = workers * strategy.updates
        self._plan = SamplePlan(count, self._parts * batch_size, 0)

    def updates(self, push: LoggedPush) -> int:
        """How many updates the worker made, those without samples at the end of an epoch, too."""
        return len(push.shares) * self._updates

    def of(self, push: LoggedPush) -> list[Tensor]:
        """The samples of each update that had some."""
        found = []
        for share, update in itertools.product(push.shares, range(self._updates)):
            step, place = divmod(share, self._shares)
            found.append(self._plan.share(step, place * self._updates + update, self._parts))
        return [torch.from_numpy(each.copy()) for each in found if len(each)]


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [None, 1, 2])
@pytest.mark.parametrize("settings", ROUNDS)
def test_equals_the_same_by_hand(settings: dict[str, Any], shuffle: int | None) -> None:
    """Rows get the mean over a round's workers of the sums of their updates, each of the rows that the log tells."""
    ids, (_, y) = IDS.repeat(5)[:-2], samples(58)
    strategy = strategy_of(settings | {"sync_every": 3})
    task = Task(
        lambda: Words({"optimizer": SGD(lr=LR)}),
        sgd(LR),
        (ids, y[:, 0]),
        nn.functional.mse_loss,
        table_shards=1,  # so that each look-up is one request
    )
    cluster = InProcessCluster(
        task.creator(), num_workers=3, strategy=strategy, keep_log=True, shuffle=shuffle
    )
    trained(cluster, 7)
    settle(cluster)
    log, other = cluster.log(), 0
    batches = Batches(log, strategy, task.batch_size, len(ids))
    rows = torch.full((2, 1002, 3), FIRST, dtype=torch.float64)
    bias = torch.zeros(1, dtype=torch.float64)
    history = {log.start: (rows, bias)}
    for commit in log.commits:
        changes, shift = torch.zeros_like(rows), torch.zeros_like(bias)
        total, mean = 0, 0.0
        for push in commit.pushes:
            own = history[push.pulled][1]
            versions = [v for count, v in RowsOfPush.of(push).versions for _ in range(count)]
            other += sum(version != push.pulled for version in versions)
            count = 0
            for number, index in enumerate(batches.of(push)):
                # of the rows of words, and of the others
                first, second = versions[2 * number :][:2] or [push.pulled] * 2
                held = torch.stack([history[first][0][0], history[second][0][1]]).requires_grad_()
                own = own.clone().requires_grad_()
                found = held[0][ids[index]].sum(-1) + held[1][ids[index] + 1].sum(-1) + own
                task.loss(found, y[index, 0]).backward()
                assert held.grad is not None
                changes += held.grad * len(index)
                own = own.detach() - LR * own.grad
                count += len(index)
            shift += (history[push.pulled][1] - own) * count
            total, mean = total + count, mean + count / batches.updates(push)
        if total:
            rows, bias = rows - LR * changes / mean, bias - shift / total
        history[commit.version] = rows, bias
    assert other or settings not in ROUNDS[:2]  # rows of later versions than the weights
    assert torch.allclose(cluster.weights()["bias"], bias, rtol=0, atol=1e-12)
    for held in shards(cluster):
        state = held.rows.export()
        expected = rows[torch.from_numpy(state.tables).long(), torch.from_numpy(state.ids)]
        assert torch.allclose(torch.from_numpy(state.values), expected, rtol=0, atol=1e-12)


class Sightings(nn.Module):
    """Of two layers; gradients of rows are -1 for each sighting, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = Embedding(
            table("rows", optimizer=SGD(lr=1.0), initial=Zeros(), dtype="float64")
        )
        self.first, self.second = (nn.Linear(1, 1, dtype=torch.float64) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Return what is to be as small as can be."""
        return -self.rows(ids).sum() - self.first.weight.sum() - self.second.weight.sum()


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", FRAGMENTS)
def test_with_each_fragment_rows_get_their_gradients_since_the_one_before(
    settings: dict[str, Any],
) -> None:
    strategy = strategy_of(settings)
    ids = clicks(40)[1]
    task = Task(Sightings, sgd(LR), (ids, torch.zeros(40)), lambda output, target: output, 1)
    cluster = InProcessCluster(
        task.creator(), num_workers=3, strategy=strategy, keep_log=True, shuffle=2
    )
    trained(cluster, 9)
    settle(cluster)
    log = cluster.log()
    batches = Batches(log, strategy, task.batch_size, len(ids))
    expected = torch.zeros(int(ids.max()) + 1, dtype=torch.float64)
    for commit in log.commits:
        seen = torch.zeros_like(expected)
        mean = 0.0
        for push in commit.pushes:
            for index in batches.of(push):
                seen += torch.bincount(ids[index].flatten(), minlength=len(seen))
                mean += len(index) / batches.updates(push)
        expected += seen / mean if mean else 0.0
    for held in shards(cluster):
        state = held.rows.export()
        found = torch.from_numpy(state.values)
        assert torch.allclose(found, expected[state.ids][:, None].expand_as(found), atol=1e-12)


class Deeper(nn.Module):
    """The model of clicks with a second layer, so that it has two fragments."""

    def __init__(self, clicks: nn.Module) -> None:
        super().__init__()
        self.clicks, self.last = clicks, nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return (B, 2)."""
        found: Tensor = self.last(self.clicks(users, items))
        return found


def deeper() -> Task:
    task = table_task(sgd(LR, momentum=0.5), clicks(60), row_optimizer=OPTIMIZERS["Adam"].ours)
    return Task(lambda: Deeper(task.module()), task.optimizer, task.data, batch_size=2)


@pytest.mark.few(1)
@pytest.mark.parametrize("shuffle", [None, 1])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("settings", [*ROUNDS, *FRAGMENTS])
def test_a_job_is_replayed(settings: dict[str, Any], workers: int, shuffle: int | None) -> None:
    task = deeper()
    if settings.get("quorum", 1) > workers:
        settings = settings | {"quorum": workers}
    cluster = InProcessCluster(
        task.creator(),
        num_workers=workers,
        strategy=strategy_of(settings),
        keep_log=True,
        shuffle=shuffle,
    )
    trained(cluster, 6)
    settle(cluster)
    explained(cluster, task)


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("moment", ["forward", "push", "report"])
@pytest.mark.parametrize("settings", [*ROUNDS, FRAGMENTS[0], *FRAGMENTS[2:]])
def test_a_job_is_replayed_after_a_death(settings: dict[str, Any], moment: Moment) -> None:
    task = deeper()
    cluster = InProcessCluster(
        task.creator(),
        num_workers=3,
        strategy=strategy_of(settings),
        keep_log=True,
        faults=[Fault.kill("worker", 1, step=2, at=moment)],
        replaces=True,
        shuffle=5,
    )
    cluster.step(7)
    assert not cluster.unmet
    settle(cluster)
    explained(cluster, task)
