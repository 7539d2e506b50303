"""Which servers hold dense parameters, of those on hosts with workers and those elsewhere."""

from __future__ import annotations

import pytest

from steepest.core.engine.topology import HostMap
from tests.modes import make, trainable, trained
from tests.reference import Task, difference, sgd

TASK = Task(optimizer=sgd(momentum=0.9))


@pytest.mark.parametrize(
    ("places", "dense"),
    [
        (HostMap((0, 1), (0, 1)), (0, 1)),
        (HostMap((0, 1), (2, 3, 0, 1)), (2, 3)),
        (HostMap((0, 0), (0, 0, 1)), (0, 1)),
        (HostMap((0, 1), (0, 2)), (0, 1)),  # host 1 has workers, and no server
        (HostMap((0, 1), (2, 3)), (0, 1)),
        (HostMap.apart(3, 2), (0, 1)),
    ],
)
def test_those_beside_workers_where_each_has_one(places: HostMap, dense: tuple[int, ...]) -> None:
    assert places.beside_workers == dense


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["sync", "copies", "async", "ssp-2"])
@pytest.mark.parametrize("alone", [1, 2])
def test_who_holds_what_changes_no_result(name: str, alone: int) -> None:
    hosts = HostMap((0, 1), tuple(range(2 + alone)))
    cluster = make(name, TASK, 2, servers=2 + alone, hosts=hosts)
    even = make(name, TASK, 2, servers=2 + alone)
    trained(cluster, 8)
    trained(even, 8)
    assert difference(cluster.weights(), even.weights()) < 1e-12
    holds = [bool(trainable(server)) for server in cluster.servers]
    assert holds == ([True] * (2 + alone) if name == "copies" else [True, True] + [False] * alone)


@pytest.mark.parametrize("workers", [2, 3])
def test_equals_serial_training(workers: int) -> None:
    hosts = HostMap(tuple(range(workers)), (0, 1, 2, 3, 4))
    cluster = make("sync", TASK, workers, servers=5, hosts=hosts)
    trained(cluster, 8)
    assert difference(cluster.weights(), TASK.train(workers, 8)) < 1e-12
