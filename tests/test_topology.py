"""How much of a model each server holds, so that no host has to move more bytes than the others."""

from __future__ import annotations

import pytest

from steepest.engine.topology import HostMap
from tests.modes import make, trainable, trained
from tests.reference import Task, difference, sgd

TASK = Task(optimizer=sgd(momentum=0.9))


def bytes_out(places: HostMap) -> dict[int, float]:
    """What leaves each host in a step, in models: a host's gradients once, and weights to each other host."""
    working = set(places.workers)
    held = dict.fromkeys((*places.workers, *places.servers), 0.0)
    for host, share in zip(places.servers, places.shares, strict=True):
        held[host] += share
    gradients = {host: 1 - share if host in working else 0.0 for host, share in held.items()}
    return {host: gradients[host] + share * len(working - {host}) for host, share in held.items()}


@pytest.mark.parametrize("each", [1, 2])
@pytest.mark.parametrize("alone", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("working", [2, 3, 4])
def test_every_link_is_equally_busy(working: int, alone: int, each: int) -> None:
    """As long as there are no more hosts that serve alone than hosts with workers."""
    places = HostMap((*range(working),) * each, tuple(range(working + alone)), gathers=True)
    assert sum(places.shares) == pytest.approx(1)
    busy = bytes_out(places)
    n, k = working, min(alone, working)
    optimum = 2 * n * (n - 1) / (n * n + k * n - 2 * k)
    most = max(busy.values())
    assert most == pytest.approx(optimum if alone <= n else max(1, n / alone))
    if alone <= working:
        assert list(busy.values()) == pytest.approx([optimum] * len(busy))


def test_servers_of_a_host_divide_its_part() -> None:
    places = HostMap((0, 1, 2), (0, 1, 2, 3, 3), gathers=True)
    assert places.shares == (0.2, 0.2, 0.2, 0.2, 0.2)


@pytest.mark.parametrize(
    "places",
    [
        HostMap((0, 1), (0, 1)),
        HostMap((0, 0), (0, 1)),  # one host's workers: what lies elsewhere was meant to
        HostMap((0, 1), (0, 2)),
        HostMap.apart(3, 2),
    ],
)
def test_elsewhere_all_servers_have_equal_parts(places: HostMap) -> None:
    assert places.shares == (0.5, 0.5)


@pytest.mark.parametrize("name", ["sync", "copies", "async", "ssp-2"])
@pytest.mark.parametrize("alone", [1, 2])
def test_who_holds_what_changes_no_result(name: str, alone: int) -> None:
    """With as many hosts that serve alone as hosts with workers, servers beside workers hold nothing."""
    hosts = HostMap((0, 1), tuple(range(2 + alone)))
    cluster = make(name, TASK, 2, servers=2 + alone, hosts=hosts)
    even = make(name, TASK, 2, servers=2 + alone)
    trained(cluster, 8)
    trained(even, 8)
    assert difference(cluster.weights(), even.weights()) < 1e-12
    if name == "copies":
        assert cluster.job.owners == even.job.owners
    elif alone == 2:
        assert [bool(trainable(server)) for server in cluster.servers] == [False, False, True, True]
    else:
        sizes = [sum(each.chunk.nbytes for each in trainable(s)) for s in cluster.servers]
        assert sizes[2] > max(sizes[:2])


@pytest.mark.parametrize("workers", [2, 3])
def test_equals_serial_training(workers: int) -> None:
    cluster = make(
        "sync", TASK, workers, servers=5, hosts=HostMap(tuple(range(workers)), (0, 1, 2, 3, 4))
    )
    trained(cluster, 8)
    assert difference(cluster.weights(), TASK.train(workers, 8)) < 1e-12
