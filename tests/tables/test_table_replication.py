"""Shards of tables that two servers hold: when one dies, no row, no slot and no update is lost."""

from __future__ import annotations

import random

import pytest
import torch

from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.optimizer_slices import assemble as joined
from steepest.core.engine.shared_state import SharedState
from steepest.runtime.survivors import assemble, catch_up, state_of
from steepest.testing import InProcessCluster
from tests.inside import log_of, replay_state
from tests.modes import EACH, make, settle, trained
from tests.random_examples import seeds
from tests.reference import Task
from tests.table_tasks import (
    DIM,
    OPTIMIZERS,
    PACKED,
    ROWS,
    counting,
    expected_counts,
    mostly_long,
    rows_of,
    same_rows,
    table_task,
    table_values,
)

COUNTING = counting(23)
ADAM = table_task(row_optimizer=OPTIMIZERS["Adam"].ours)
TWICE = {"replication": 2}


def rows_on(cluster: InProcessCluster, holders: dict[int, int]) -> dict[str, torch.Tensor]:
    """What servers know of rows; each chunk of the server that is given for it."""
    records = [
        (chunk, about, value)
        for chunk, server in holders.items()
        for about, value in cluster.servers[server].chunks[chunk].state()
    ]
    found = joined(cluster.job.description.layout, records)[0]
    return {name: value for name, value in found.items() if name.startswith("tables/")}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "task"),
    [
        pytest.param("sync", ADAM, marks=pytest.mark.long),
        ("allreduce", ADAM),
        pytest.param("async", ADAM, marks=pytest.mark.long),
        ("async", PACKED["int8"]),
    ],
    ids=["sync", "allreduce", "async", "async-int8"],
)
@seeds(1)
def test_copies_of_rows_are_the_same_bits(name: str, task: Task, seed: int) -> None:
    cluster = make(name, task, servers=3, settings=TWICE, shuffle=seed)
    trained(cluster, 6)
    settle(cluster)
    first, second = (
        rows_on(cluster, {chunk: holders[at] for chunk, holders in enumerate(cluster.job.holders)})
        for at in (0, 1)
    )
    assert same_rows(first, second)
    assert same_rows(first, rows_of(cluster))


def struck(name: str, task: Task, seed: int) -> tuple[InProcessCluster, SharedState, CommitLog]:
    """A job of which a server died at a random moment, what survivors have, and the commits until then."""
    chance = random.Random(seed)
    servers = chance.choice([2, 3])
    cluster = make(name, task, servers=servers, settings=TWICE, shuffle=seed)
    trained(cluster, 2)
    dead, rounds = chance.randrange(cluster.job.num_servers), chance.randrange(300)
    begun = cluster.network.rounds
    cluster.client.ask(30, True)
    cluster.network.run_until(
        lambda: cluster.network.rounds - begun >= rounds, "the moment of its death"
    )
    log, plan, job = log_of(cluster.coordinator), cluster.job.plan(), cluster.job
    survivors = [index for index in range(job.num_servers) if index != dead]
    heard = [list(cluster.servers[index].decisions.recent) for index in survivors]
    found = {}
    for index in survivors:
        catch_up(cluster.servers[index], heard)
        found[index] = state_of([cluster.servers[index]])
    state = assemble(len(job.holders), found)
    assert state is not None
    assert state.version >= cluster.client.position.version
    commits = tuple(log[: state.version])
    explained = CommitLog(
        commits, job.config, job.num_workers, 1, job.seed, job.hosts, 1, plan=plan,
        cuts=(job.shares, job.parts),
    )  # fmt: skip
    return cluster, state, explained


def surviving(cluster: InProcessCluster, state: SharedState) -> dict[str, torch.Tensor]:
    """What survivors know of rows; all that hold a chunk know the same."""
    assert state.holders is not None
    first, last = (
        rows_on(cluster, {chunk: servers[at] for chunk, servers in state.holders.items()})
        for at in (0, -1)
    )
    assert same_rows(first, last)
    return first


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "task"),
    [("sync", PACKED["bfloat16"]), ("allreduce", ADAM)],
    ids=["sync-bfloat16", "allreduce"],
)
@seeds(1)
def test_rows_and_slots_survive_a_server(name: str, task: Task, seed: int) -> None:
    cluster, state, log = struck(name, task, seed)
    again = replay_state(log, task.creator())
    expected = {name: value for name, value in again.items() if name.startswith("tables/")}
    assert same_rows(surviving(cluster, state), expected)


@pytest.mark.parametrize("name", mostly_long(EACH, "async", "ssp-2"))
@seeds(1)
def test_each_push_is_in_what_survives_a_server(name: str, seed: int) -> None:
    cluster, state, log = struck(name, COUNTING, seed)
    values = table_values(COUNTING, surviving(cluster, state))["rows.weight"]
    counts, _ = expected_counts(COUNTING, log)
    assert torch.allclose(values, counts[:, None].expand(ROWS, DIM), rtol=1e-12, atol=0)
