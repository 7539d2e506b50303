"""Synchronous jobs with rows on servers, to the bit: replayed, after deaths and errors, clipped, with NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from steepest.core.engine.topology import HostMap
from steepest.core.messages.driver import Failure, Result
from steepest.core.messages.message import Kind, Message, worker_peer
from steepest.tables.job.row_messages import RowKind
from steepest.tables.modules.embedding import Embedding, EmbeddingBag
from steepest.testing import Fault, InProcessCluster
from tests.deaths import doomed
from tests.modes import PUSHED_TOGETHER, TOGETHER, make, trained
from tests.reference import Task, difference, same_bits, sgd
from tests.table_tasks import (
    OPTIMIZERS,
    PACKED,
    TASK,
    Clicks,
    all_weights,
    described,
    explained,
    in_one_process,
    mostly_long,
    rows_of,
    same_rows,
    table_task,
)

STEPS = 6
DEATHS = [(kind, n) for kind in (RowKind.PULL_ROWS, Kind.PUSH, Kind.REPORT) for n in (1, 4)]


def undisturbed(name: str = "sync", task: Task = TASK, **options: Any) -> InProcessCluster:
    cluster = make(name, task, **options)
    trained(cluster, STEPS)
    return cluster


def alike(cluster: InProcessCluster, expected: InProcessCluster) -> None:
    """Two jobs have the same weights and rows, to the bit."""
    assert same_bits(cluster.weights(), expected.weights())
    assert same_rows(rows_of(cluster), rows_of(expected))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", mostly_long([*PUSHED_TOGETHER, "backup"], "allreduce"))
def test_a_replay_makes_the_same_rows(name: str) -> None:
    explained(undisturbed(name, devices=2, accumulate=2, shuffle=1))


@pytest.mark.full
@pytest.mark.parametrize("dtype", mostly_long(PACKED, "int8"))
def test_rows_in_fewer_bytes_are_replayed_and_survive_a_death(dtype: str) -> None:
    task = PACKED[dtype]
    expected = undisturbed(task=task)
    explained(expected, task)
    cluster = doomed("sync", [(1, RowKind.PULL_ROWS, 4)], creator=task.creator())
    while (missing := STEPS - cluster.client.position.version) > 0:
        cluster.step(missing)
    assert cluster.lives[1] == 1
    alike(cluster, expected)


def test_a_replay_makes_the_same_rows_beside_aggregators() -> None:
    hosts = HostMap((0, 0, 1), (0, 1), gathers=True)
    explained(undisturbed(hosts=hosts))


@pytest.mark.few(2)
@pytest.mark.parametrize("death", mostly_long(DEATHS, DEATHS[1]), ids=str)
def test_after_a_death_the_rows_are_those_of_a_run_in_peace(death: tuple[Kind, int]) -> None:
    kind, n = death
    cluster = doomed("sync", [(1, kind, n)], creator=TASK.creator())
    results: list[Any] = []
    while len(results) < STEPS:
        results += [r for r in cluster.step(STEPS - len(results)) if isinstance(r, Result)]
    assert cluster.lives[1] == 1
    alike(cluster, undisturbed())
    explained(cluster)


def test_no_answer_to_the_dead_is_taken_for_one_to_a_successor() -> None:
    """A server may send it when it has come to the version that was asked for, on the new channel."""
    cluster = doomed("sync", [(1, Kind.REPORT, 1)], creator=TASK.creator())
    asked: list[tuple[int, int]] = []
    die = cluster.network.filter

    def note(message: Message) -> Sequence[Message]:
        if message.kind is RowKind.PULL_ROWS and message.source == worker_peer(1):
            asked.append((cluster.lives[1], message.body.sequence))
        return die(message)

    cluster.network.filter = note
    while len({life for life, _ in asked}) < 2:
        cluster.step(1)
    lives = [{sequence for of, sequence in asked if of == life} for life in (0, 1)]
    assert all(lives)
    assert not lives[0] & lives[1]


@pytest.mark.few(2)
@pytest.mark.long
@pytest.mark.parametrize("name", mostly_long(TOGETHER, "copies"))
def test_after_an_error_the_rows_are_those_of_a_run_in_peace(name: str) -> None:
    cluster = make(name, TASK, faults=[Fault.raises("worker", 1, step=2)])
    taken: list[Any] = []
    failed = 0
    while len(taken) < STEPS:
        outcomes = cluster.step(STEPS - len(taken))
        taken += [outcome for outcome in outcomes if isinstance(outcome, Result)]
        failed += sum(isinstance(outcome, Failure) for outcome in outcomes)
    assert failed == 1
    alike(cluster, undisturbed(name))
    explained(cluster)


@pytest.mark.parametrize("name", mostly_long(["sync", "allreduce", "copies"], "sync"))
def test_rows_are_clipped_with_the_dense_weights(name: str) -> None:
    clip, rows = 0.1, OPTIMIZERS["SGD"]
    task = table_task(sgd(), row_optimizer=rows.ours)
    cluster = make(name, task, settings={"clip_norm": clip})
    trained(cluster, STEPS)
    expected = in_one_process(task, rows, [(6, STEPS)], clip)
    assert min(commit.clip for commit in cluster.log().commits) < 1
    assert difference(all_weights(cluster, task), expected) < 1e-6
    explained(cluster, task)


class Spoiled(Clicks):
    """Gradients of users are NaN in one backward pass of one worker."""

    def __init__(self, calls: list[int], at: int) -> None:
        super().__init__(Embedding(described("users")), EmbeddingBag(described("items", 2)))
        self.calls, self.at = calls, at

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return (B, 2)."""
        found = self.users(users)
        if found.requires_grad:
            found.register_hook(self.spoil)
        return self.head(torch.tanh(torch.cat([found, self.items(items)], 1)))

    def spoil(self, gradient: Tensor) -> Tensor:
        self.calls[0] += 1
        return gradient * float("nan") if self.calls[0] == self.at else gradient


def spoiled(name: str, nonfinite: str) -> InProcessCluster:
    calls = [0]
    task = replace(TASK, module=lambda: Spoiled(calls, 5))
    return make(name, task, 2, settings={"nonfinite": nonfinite})


@pytest.mark.parametrize("name", mostly_long([*TOGETHER, "async"], "copies"))
def test_nan_in_a_gradient_of_rows_is_refused(name: str) -> None:
    cluster = spoiled(name, "refuse")
    outcomes = cluster.step(4)
    failure = outcomes[-1]
    assert isinstance(failure, Failure)
    assert failure.reason == "nonfinite"
    assert failure.culprits == [(1, "users")]
    before = rows_of(cluster)
    assert all(bool(value.isfinite().all()) for value in before.values())


@pytest.mark.parametrize("name", mostly_long(["sync", "allreduce"], "sync"))
def test_nan_in_a_gradient_of_rows_is_skipped(name: str) -> None:
    cluster = spoiled(name, "skip")
    trained(cluster, 2)
    before = rows_of(cluster)
    trained(cluster, 1)
    after = rows_of(cluster)
    assert [commit.skipped for commit in cluster.log().commits] == [False, False, True]
    for key in ("ids", "values", "slots", "sightings"):
        assert all(
            torch.equal(value, after[name]) for name, value in before.items() if name.endswith(key)
        )
    trained(cluster, 1)
    assert all(bool(value.isfinite().all()) for value in rows_of(cluster).values())
