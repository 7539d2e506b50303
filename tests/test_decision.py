"""Which processes continue a job after deaths: every world of up to three workers and servers, and random ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepest.elastic.decision import Impossible, Target, Transition, World, decide
from steepest.messages.message import Peer, server_peer, worker_peer

FLAGS = (False, True)


def processes(workers: int, servers: int) -> list[Peer]:
    return [*map(worker_peer, range(workers)), *map(server_peer, range(servers))]


def subsets(peers: list[Peer]) -> Iterator[frozenset[Peer]]:
    return map(
        frozenset, chain.from_iterable(combinations(peers, n) for n in range(len(peers) + 1))
    )


def check(world: World, target: Target) -> None:
    """What is decided uses living processes alone, has a state to begin with, and waits for nobody in vain."""
    found = decide(world, target)
    dead_workers = {peer for peer in world.dead if peer.role == "worker"}
    dead_servers = world.dead - dead_workers
    if isinstance(found, Impossible):
        no_state = not (world.whole or world.snapshot)
        assert found.peer in world.dead
        assert no_state or world.worn_out, "a process can start in every place"
        if not no_state:  # without the worn-out places there is no job
            left = world.workers - len(dead_workers), world.servers - len(dead_servers)
            assert (
                not target.movable
                or (dead_workers and left[0] < max(target.least, 1))
                or (dead_servers and left[1] < 1)
            )
        return
    assert isinstance(found, Transition)
    assert (found.source == "processes") == world.whole
    assert not found.replaced & world.worn_out, "nobody takes a worn-out place"
    assert found.replaced in (frozenset(), world.dead)
    if found.replaced:
        assert (found.left, found.servers) == (frozenset(), world.servers)
        return
    assert target.movable
    assert found.left == dead_workers
    assert found.servers == world.servers - len(dead_servers)
    assert found.servers > 0 or not world.servers
    assert world.workers - len(found.left) >= (max(target.least, 1) if found.left else 0)
    assert world.worn_out or not target.waits
    assert world.worn_out or not world.dead <= world.ready, "who stands ready is taken"


@pytest.mark.parametrize(("workers", "servers"), list(product(range(1, 4), range(4))))
def test_every_world_of_up_to_three(workers: int, servers: int) -> None:
    peers = processes(workers, servers)
    for dead in subsets(peers):
        if not dead:
            continue
        for ready, worn_out in product(
            (frozenset(), dead), (frozenset(), dead, frozenset([min(dead)]))
        ):
            for whole, snapshot, waits, movable in product(FLAGS, repeat=4):
                for least in range(1, workers + 1):
                    world = World(
                        workers, servers, dead, ready - worn_out, worn_out, whole, snapshot
                    )
                    check(world, Target(least, waits, movable))


@given(st.data(), st.integers(1, 6), st.integers(0, 6))
def test_larger_worlds(data: st.DataObject, workers: int, servers: int) -> None:
    peers = st.sampled_from(processes(workers, servers))
    dead, some = data.draw(st.frozensets(peers, min_size=1)), st.frozensets(peers)
    worn_out = data.draw(some) & dead
    flag = st.booleans()
    world = World(
        workers,
        servers,
        dead,
        (data.draw(some) & dead) - worn_out,
        worn_out,
        data.draw(flag),
        data.draw(flag),
    )
    check(world, Target(data.draw(st.integers(1, workers)), data.draw(flag), data.draw(flag)))


def test_a_node_with_workers_and_a_server_is_done_without() -> None:
    dead = frozenset([worker_peer(2), worker_peer(3), server_peer(1)])
    found = decide(World(4, 2, dead), Target(least=2))
    assert found == Transition("processes", frozenset(), dead - {server_peer(1)}, 1)


def test_with_patience_successors_are_awaited() -> None:
    dead = frozenset([worker_peer(1)])
    assert decide(World(3, 1, dead), Target(2, waits=True)) == Transition(
        "processes", dead, frozenset(), 1
    )


def test_what_nobody_holds_comes_from_the_snapshot_or_is_lost() -> None:
    dead = frozenset([server_peer(0)])
    found = decide(World(3, 2, dead, whole=False, snapshot=True), Target(2))
    assert isinstance(found, Transition)
    assert found.source == "snapshot"
    lost = decide(World(3, 2, dead, whole=False), Target(2))
    assert isinstance(lost, Impossible)
    assert "no copy is left" in lost.why
