"""Chunks that several servers hold: copies change nothing, and when a server dies nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.shared_state import SharedState
from steepest.errors import ConfigurationError
from steepest.runtime.survivors import assemble, catch_up, state_of
from steepest.testing import InProcessCluster, replay
from tests.inside import log_of
from tests.modes import MODES, as_replayed, check, make, salvaged_weights, settle, trained
from tests.random_examples import seeds
from tests.reference import Task, same_bits, samples, sgd

TASK = Task(optimizer=sgd(momentum=0.9), data=samples(23))
WAYS = [
    name for name in MODES if name not in ("copies", "replicated", "groups")
]  # where all hold everything anyway
TWICE = {"replication": 2}


def held(cluster: InProcessCluster, server: int) -> dict[int, torch.Tensor]:
    return {index: chunk.weights for index, chunk in cluster.servers[server].chunks.items()}


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("servers", [2, 3])
@seeds(1)
def test_copies_are_the_same_to_the_bit(name: str, servers: int, seed: int) -> None:
    cluster = make(name, TASK, servers=servers, settings=TWICE, shuffle=seed)
    trained(cluster, 4)
    trained(cluster, 3)
    settle(cluster)
    job = cluster.job
    assert {len(holders) for holders in job.holders} == {2}
    for chunk, (first, second) in enumerate(job.holders):
        assert torch.equal(held(cluster, first)[chunk], held(cluster, second)[chunk])
        states = [cluster.servers[holder].chunks[chunk].state() for holder in (first, second)]
        assert all(torch.equal(a[1], b[1]) for a, b in zip(*states, strict=True))
    check(cluster, TASK)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["sync", "allreduce", "sharded-groups"])
def test_copies_change_no_bit_of_a_synchronous_run(name: str) -> None:
    runs = [make(name, TASK, servers=3, settings={"replication": n}) for n in (1, 2, 3)]
    for run in runs:
        trained(run, 9)
    assert same_bits(runs[0].weights(), runs[1].weights())
    assert same_bits(runs[0].weights(), runs[2].weights())


def test_every_server_has_its_part_and_copies_lie_elsewhere() -> None:
    job = make("sync", TASK, servers=3, settings=TWICE).job
    firsts = {holders[0] for holders in job.holders}
    assert firsts == {0, 1, 2}
    assert all(first != second for first, second in job.holders)


@pytest.mark.parametrize(
    ("given", "what"),
    [({"replication": 0}, "replication"), ({"replication": 2, "num_servers": 1}, "num_servers")],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        ParameterServerStrategy(**given)


def test_there_are_as_many_servers_as_copies() -> None:
    assert (
        InProcessCluster(
            TASK.creator(), num_workers=2, strategy=ParameterServerStrategy(replication=2)
        ).job.replication
        == 2
    )
    assert (
        InProcessCluster(
            TASK.creator(), num_workers=1, strategy=ParameterServerStrategy(replication=2)
        ).job.replication
        == 1
    )
    assert (
        InProcessCluster(
            TASK.creator(), num_workers=2, strategy=AllreduceStrategy(replication=3)
        ).job.replication
        == 2
    )


def salvaged(cluster: InProcessCluster, survivors: list[int]) -> SharedState | None:
    """What a recovery finds on these servers."""
    heard = [list(cluster.servers[index].decisions.recent) for index in survivors]
    found = {}
    for index in survivors:
        catch_up(cluster.servers[index], heard)
        found[index] = state_of([cluster.servers[index]])
    return assemble(len(cluster.job.holders), found)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", WAYS)
@seeds(2)
def test_whenever_a_server_dies_survivors_know_every_update_that_was_told(
    name: str, seed: int
) -> None:
    """It may be the coordinator's; links are of all speeds, so that servers have heard of different commits."""
    rng = random.Random(seed)
    servers = rng.choice([2, 3])
    cluster = make(name, TASK, servers=servers, settings=TWICE, shuffle=seed)
    trained(cluster, 2)
    dead, rounds = rng.randrange(servers), rng.randrange(400)
    begun = cluster.network.rounds
    cluster.client.ask(30, True)
    cluster.network.run_until(
        lambda: cluster.network.rounds - begun >= rounds, "the moment of its death"
    )
    log = log_of(cluster.coordinator)
    while not cluster.client.outcomes.empty():
        cluster.client.outcomes.get()
    told = cluster.client.position.version
    found = salvaged(cluster, [index for index in range(cluster.job.num_servers) if index != dead])
    assert found is not None
    assert told <= found.version <= cluster.coordinator.version
    job = cluster.job
    commits = tuple(log[: found.version])
    explained = CommitLog(commits, job.config, job.num_workers, 1, job.seed, job.hosts, 1)
    replayed = replay(explained, TASK.creator())
    assert as_replayed(cluster, replayed, salvaged_weights(cluster, found))
    assert found.state["history"]["committed"] == found.version
    following, *free = found.state["ledger"]
    if not job.strategy.rule.needs_all:  # what is not free is committed
        taken = {push.share for commit in commits for push in commit.pushes}
        assert taken == set(range(following)) - set(free)


def test_when_both_copies_are_gone_it_is_said() -> None:
    cluster = make("sync", TASK, servers=3, settings=TWICE)
    trained(cluster, 2)
    assert salvaged(cluster, [0]) is None
