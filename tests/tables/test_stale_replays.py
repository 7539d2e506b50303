"""Jobs whose rows were of other versions than their dense weights are replayed, to the bit."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steepest.core.engine.commit_log import LoggedPush
from steepest.core.messages.driver import Result
from steepest.errors import ConfigurationError
from steepest.tables.job.row_messages import RowsOfPush
from steepest.tables.modules.embedding import Embedding
from steepest.tables.rows.initial import Zeros
from steepest.tables.rows.row_optimizers import SGD
from steepest.tables.rows.table import Table
from steepest.testing import Fault, InProcessCluster, Moment, replay
from tests.modes import make, trained
from tests.pairs import long_grid
from tests.reference import Task, sgd
from tests.table_tasks import OPTIMIZERS, explained, mostly_long, rows_of, table_task

TASK = table_task(row_optimizer=OPTIMIZERS["Adam"].ours)
STEPS = 6


def stale(name: str, staleness: int | None, workers: int, **options: Any) -> InProcessCluster:
    settings = {} if staleness is None else {"table_staleness": staleness}
    return make(name, TASK, workers, settings=settings, **options)


def test_pushes_of_older_logs_are_read() -> None:
    old = (
        b"\x80\x02csteepest.core.engine.commit_log\nLoggedPush\nq\x00(K\x01K\x00K\x03K\x02K\x05)\x89tq\x01"
        b"\x81q\x02h\x00(K\x01K\x00K\x03K\x02K\x05]q\x03]q\x04(K\x02K\x01ea\x88tq\x05\x81q\x06\x86q\x07."
    )  # of two pushes, with fields of their own for rows
    pushes = (LoggedPush(1, 0, 3, 2, 5, (), False), LoggedPush(*[1, 0, 3, 2, 5, [[2, 1]], True]))
    assert pickle.loads(old) == pushes == pickle.loads(pickle.dumps(pushes))
    assert RowsOfPush.of(LoggedPush(1, 0, 3, 2, 5)) == RowsOfPush()
    assert [RowsOfPush.of(push) for push in pushes] == [((), False), ([[2, 1]], True)]


def other_versions(cluster: InProcessCluster) -> int:
    """How many pushes had rows of another version than that of their dense weights."""
    pushes = [push for commit in cluster.log().commits for push in commit.pushes]
    return sum(any(version != p.pulled for _, version in RowsOfPush.of(p).versions) for p in pushes)


def all_steps(cluster: InProcessCluster, steps: int = STEPS) -> None:
    """Train, whatever fails meanwhile."""
    taken = 0
    while taken < steps:
        taken += sum(isinstance(found, Result) for found in cluster.step(steps - taken))


@pytest.mark.full
@pytest.mark.few(1)
@long_grid(
    ("sync", 1, 3), ("sync", 3, 2),
    name=["sync", "allreduce"], staleness=[0, 1, 2, 3], workers=[1, 2, 3],
)  # fmt: skip
def test_a_hybrid_job_is_replayed(name: str, staleness: int, workers: int) -> None:
    cluster = stale(name, staleness, workers, devices=2, accumulate=2, shuffle=1)
    trained(cluster, STEPS)
    trained(cluster, 1)
    trained(cluster, 1)
    assert (other_versions(cluster) > 0) == (staleness > 0)
    explained(cluster, TASK)


@pytest.mark.long
@pytest.mark.few(1)
@long_grid(
    ("ssp-2", 3, 1),
    name=["async", "ssp-2", "async-drop"], workers=[1, 2, 3], shuffle=[1, 2, 3, 4, 5],
)  # fmt: skip
def test_an_asynchronous_job_is_replayed(name: str, workers: int, shuffle: int) -> None:
    cluster = stale(name, None, workers, shuffle=shuffle)
    trained(cluster, STEPS)
    explained(cluster, TASK)
    if workers == 3:
        log = cluster.log()
        assert any(staleness for commit in log.commits for staleness in commit.staleness)


@pytest.mark.full
def test_rows_of_later_versions_than_the_weights_are_replayed() -> None:
    """A slow worker's rows come after other workers' commits."""
    cluster = stale("async", None, 3, shuffle=2, servers=3)
    trained(cluster, STEPS)
    pushes = [push for commit in cluster.log().commits for push in commit.pushes]
    assert any(version > p.pulled for p in pushes for _, version in RowsOfPush.of(p).versions)
    explained(cluster, TASK)


@pytest.mark.few(1)
@long_grid(
    ("push", 2, 0), ("push", 2, 1),
    moment=["forward", "push", "report"], staleness=[1, 2, 3], worker=[0, 1],
)  # fmt: skip
def test_a_hybrid_job_is_replayed_after_a_death(
    moment: Moment, staleness: int, worker: int
) -> None:
    faults = [Fault.kill("worker", worker, step=3, at=moment)]
    cluster = stale("sync", staleness, 2, faults=faults, replaces=True)
    all_steps(cluster)
    assert not cluster.unmet
    assert cluster.lives[worker] == 1
    explained(cluster, TASK)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_long(["async", "ssp-2"]))
def test_an_asynchronous_job_is_replayed_after_a_death(name: str) -> None:
    faults = [Fault.kill("worker", 1, step=3, at="push")]
    cluster = stale(name, None, 3, faults=faults, replaces=True, shuffle=3)
    all_steps(cluster)
    assert cluster.lives[1] == 1
    explained(cluster, TASK)


@pytest.mark.parametrize("staleness", mostly_long([1, 2, 3], 2))
def test_a_hybrid_job_is_replayed_after_an_error(staleness: int) -> None:
    faults = [Fault.raises("worker", 1, step=3)]
    cluster = stale("sync", staleness, 2, faults=faults)
    all_steps(cluster)
    explained(cluster, TASK)


WORTH = 2.0 ** torch.arange(20, dtype=torch.float64)  # each sum of samples shows which they are


class Faulty(nn.Module):
    """One id, whose row falls by the mean of an update's samples; NaN in one backward pass.

    Args:
        calls: by process, its backward passes so far.
        at: the pass whose gradient is NaN, counted from 1 over both workers.
        rows: whether it is the row's gradient, rather than the dense one.
    """

    def __init__(self, calls: list[int], at: int, rows: bool) -> None:
        super().__init__()
        table = Table("t", 1, optimizer=SGD(lr=1.0), initial=Zeros(), dtype="float64")
        self.rows = Embedding(table)
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.calls, self.at, self.of_rows = calls, at, rows

    def forward(self, ids: Tensor, samples: Tensor) -> Tensor:
        """Return what is to be as small as can be."""
        found = self.rows(ids)[:, 0]
        bias = 1.0 * self.bias
        if found.requires_grad:
            (found if self.of_rows else bias).register_hook(self.spoil)
        return samples * (found + bias)

    def spoil(self, gradient: Tensor) -> Tensor:
        self.calls[0] += 1
        return gradient * float("nan") if self.calls[0] == self.at else gradient


def faulty(
    rows: bool, at: int, count: int = 20, staleness: int = 2
) -> tuple[InProcessCluster, Task]:
    """A job of two workers, of which the second has NaN in its step ``at``, counted from 0."""
    data = torch.zeros(count, dtype=torch.int64), WORTH[:count], torch.zeros(count)

    def task() -> Task:
        calls = [0]
        module = partial(Faulty, calls, 2 * at + 2, rows)
        loss = lambda output, target: output.mean()  # noqa: E731
        return Task(module, sgd(lr=1.0), data, loss, batch_size=1)

    settings = {"table_staleness": staleness, "nonfinite": "skip"}
    return make("sync", task(), 2, settings=settings), task()


def row_of(cluster: InProcessCluster) -> float:
    values = (value for name, value in rows_of(cluster).items() if name.endswith("/values"))
    return torch.cat(list(values)).item()


def fallen(cluster: InProcessCluster, *steps: int, workers: tuple[int, ...] = (0, 1)) -> float:
    """Return minus the sum over steps of the mean of these workers' samples."""
    plan = cluster.log().plan
    assert plan is not None
    shares = [[plan.share(step, worker, 2).item() for worker in workers] for step in steps]
    return -float(sum(WORTH[share].mean() for share in shares))


def skipped(cluster: InProcessCluster) -> list[int]:
    """The steps whose updates were left out."""
    return [commit.version - 1 for commit in cluster.log().commits if commit.skipped]


def test_a_step_that_is_left_out_takes_no_other_steps_rows_along() -> None:
    cluster, task = faulty(rows=False, at=3)
    trained(cluster, 7)
    assert skipped(cluster) == [3]
    assert row_of(cluster) == fallen(cluster, 0, 1, 2, 4, 5, 6)
    assert cluster.weights()["bias"].item() == fallen(cluster, 0, 1, 2, 4, 5, 6)
    explained(cluster, task)


def test_delayed_rows_with_nan_are_pushed_once() -> None:
    """The step that brings them is left out; the other worker's rows of their step count."""
    cluster, task = faulty(rows=True, at=3)
    trained(cluster, 7)
    assert skipped(cluster) == [4]
    whole = fallen(cluster, 0, 1, 2, 5, 6)
    assert row_of(cluster) == whole + fallen(cluster, 3, workers=(0,))
    explained(cluster, task)


def test_a_last_step_that_is_left_out_keeps_the_rows_of_the_one_before() -> None:
    cluster, task = faulty(rows=False, at=3)
    trained(cluster, 4)
    assert skipped(cluster) == [3]
    assert row_of(cluster) == fallen(cluster, 0, 1)
    trained(cluster, 1)
    assert row_of(cluster) == fallen(cluster, 0, 1, 2, 4)
    explained(cluster, task)


@pytest.mark.parametrize("staleness", [2, 3])
def test_a_worker_without_samples_pushes_its_rows_of_the_step_before(staleness: int) -> None:
    """The last step of the epoch has one sample for two workers."""
    cluster, task = faulty(rows=False, at=100, count=5, staleness=staleness)
    trained(cluster, 3)
    # both workers push rows, so that those of the single sample count half
    assert row_of(cluster) == fallen(cluster, 0, 1) + fallen(cluster, 2, workers=(0,)) / 2
    trained(cluster, 3)
    explained(cluster, task)


def test_a_log_of_another_model_is_refused() -> None:
    """The versions of its rows are of other look-ups."""
    cluster = stale("sync", 1, 1, accumulate=2)
    trained(cluster, 3)
    log = cluster.log()
    first = log.commits[-1].pushes[0]
    (count, version), *_ = RowsOfPush.of(first).versions
    shorter = first._replace(more=RowsOfPush([(count - 1, version)]))
    commits = (*log.commits[:-1], replace(log.commits[-1], pushes=(shorter,)))
    with pytest.raises(ConfigurationError, match="other rows than in the run"):
        replay(replace(log, commits=commits), TASK.creator())
