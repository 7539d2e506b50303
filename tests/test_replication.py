"""Chunks that several servers hold: copies change nothing, and when a server dies nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steepest import AllreduceStrategy, ParameterServerStrategy
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster
from tests.modes import MODES, check, make, settle, trained
from tests.reference import Task, same_bits, samples, sgd

TASK = Task(optimizer=sgd(momentum=0.9), data=samples(23))
WAYS = [name for name in MODES if name != "replicated"]  # where all hold everything anyway
TWICE = {"replication": 2}


def held(cluster: InProcessCluster, server: int) -> dict[int, torch.Tensor]:
    return {index: chunk.weights for index, chunk in cluster.servers[server]._chunks.items()}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("servers", [2, 3])
@pytest.mark.parametrize("shuffle", [None, 1, 2])
def test_copies_are_the_same_to_the_bit(name: str, servers: int, shuffle: int | None) -> None:
    cluster = make(name, TASK, servers=servers, settings=TWICE, shuffle=shuffle)
    trained(cluster, 5)
    trained(cluster, 5)
    settle(cluster)
    job = cluster.job
    assert {len(holders) for holders in job.holders} == {2}
    for chunk, (first, second) in enumerate(job.holders):
        assert torch.equal(held(cluster, first)[chunk], held(cluster, second)[chunk])
        states = [cluster.servers[holder]._chunks[chunk].state() for holder in (first, second)]
        assert all(torch.equal(a[1], b[1]) for a, b in zip(*states, strict=True))
    check(cluster, TASK)


@pytest.mark.parametrize("name", ["sync", "allreduce"])
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
    ("given", "what"), [({"replication": 0}, "replication"), ({"replication": 2, "num_servers": 1}, "num_servers")]
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        ParameterServerStrategy(**given)


def test_there_are_as_many_servers_as_copies() -> None:
    assert (
        InProcessCluster(TASK.creator(), num_workers=2, strategy=ParameterServerStrategy(replication=2)).job.replication
        == 2
    )
    assert (
        InProcessCluster(TASK.creator(), num_workers=1, strategy=ParameterServerStrategy(replication=2)).job.replication
        == 1
    )
    assert (
        InProcessCluster(TASK.creator(), num_workers=2, strategy=AllreduceStrategy(replication=3)).job.replication == 2
    )
