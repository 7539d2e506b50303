"""What becomes of a job's processes: every world of up to three workers and servers, and random ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steepest.core.messages.message import Peer, server_peer, worker_peer
from steepest.runtime.recovery.decision import Impossible, Target, Transition, World, decide

FLAGS = (False, True)
NOBODY: frozenset[Peer] = frozenset()


def processes(workers: int, servers: int) -> list[Peer]:
    return [*map(worker_peer, range(workers)), *map(server_peer, range(servers))]


def subsets(peers: list[Peer]) -> Iterator[frozenset[Peer]]:
    return map(
        frozenset, chain.from_iterable(combinations(peers, n) for n in range(len(peers) + 1))
    )


def workers_of(peers: object) -> frozenset[Peer]:
    return frozenset(peer for peer in peers if peer.role == "worker")  # type: ignore[attr-defined]


def check(world: World, target: Target) -> None:
    """What is decided uses living processes alone, has a state to begin with, and waits for nobody in vain."""
    dead_workers = workers_of(world.dead)
    dead_servers = world.dead - dead_workers
    if dead_servers:
        world = replace(world, stuck=True)
    found = decide(world, target)
    in_vain = world.worn_out | world.late
    needed = dead_servers if len(dead_servers) == world.servers else NOBODY
    least = target.least if in_vain or not world.stuck else max(2, target.least)

    def suffice(left: frozenset[Peer], gone: frozenset[Peer]) -> bool:
        """Whether a job can go on without some workers and servers."""
        few = left and world.workers - len(left) < least
        return target.movable and not few and not (gone and len(gone) == world.servers)

    enough = suffice(dead_workers, dead_servers - needed) and not needed & in_vain
    at_last = suffice(dead_workers & in_vain, dead_servers & in_vain)
    if isinstance(found, Impossible):
        no_state = not (world.whole or world.snapshot)
        assert found.peer in world.dead or (no_state and not world.dead)
        assert no_state or (in_vain and not at_last), "a process can start in every place"
        assert no_state or found.peer in in_vain
        return
    if not world.dead:
        check_living(world, target, found)
        return
    if found is None:
        assert not world.stuck, "nobody takes a step"
        assert not world.dead & world.ready, "who stands ready joins"
        assert not enough or not (world.overdue or in_vain), "the others have waited enough"
        assert enough or world.dead - in_vain, "nobody comes"
        return
    assert (found.source == "processes") == world.whole
    assert not found.replaced & world.worn_out, "nobody takes a worn-out place"
    assert found.replaced <= world.dead
    assert found.workers == world.workers - len(found.missing) >= 1
    if not world.stuck and found.replaced:
        assert (found.replaced, found.missing) == (world.dead & world.ready, NOBODY)
        return
    assert found.servers == world.servers - len(dead_servers - found.replaced)
    if not enough or found.replaced - needed:
        assert found.replaced == world.dead - in_vain, "all that come are awaited"
        assert found.missing == dead_workers & in_vain
        assert not in_vain or at_last
        return
    assert found.replaced == needed, "some server serves"
    assert found.missing == dead_workers
    if found.replaced == world.dead:
        return
    if world.stuck:
        assert in_vain or not target.waits
        assert in_vain or not world.dead <= world.ready, "who stands ready is taken"
    else:
        assert in_vain or world.overdue


def check_living(world: World, target: Target, found: Transition | None) -> None:
    """Processes leave nodes, or their number changes, only when others stand ready or it can do without."""
    if world.leaving:
        if found is None:
            assert world.leaving - world.ready
            return
        assert found.servers == world.servers
        assert (found.source == "processes") == world.whole
        assert found.replaced | found.missing == world.leaving
        assert found.replaced <= world.ready
        assert found.workers == world.workers - len(found.missing)
        assert not found.missing or (world.full and found.workers >= target.least)
        return
    workers = min(world.workers + world.joining, target.workers)
    opened = world.servers + world.opening >= target.servers
    same = (workers, target.servers) == (world.workers, world.servers) and not target.switched
    assert (found is None) == (same or not opened)
    if found is not None:
        source = found.source
        assert (source == "processes") == world.whole
        assert found == Transition(source, NOBODY, NOBODY, workers, target.servers)
        after = replace(world, workers=found.workers, servers=found.servers, joining=0, opening=0)
        assert decide(after, replace(target, switched=False)) is None, "once is enough"


@pytest.mark.few(1)
@pytest.mark.parametrize(("workers", "servers"), list(product(range(1, 4), range(4))))
def test_every_world_with_deaths_of_up_to_three(workers: int, servers: int) -> None:
    for dead in subsets(processes(workers, servers)):
        if not dead:
            continue
        some = frozenset([min(dead)])
        others = dead - some
        for ready, worn_out, late in product(
            (NOBODY, some, dead), (NOBODY, some, dead), (NOBODY, others)
        ):
            for stuck, overdue, whole, snapshot, waits, movable in product(FLAGS, repeat=6):
                for least in range(1, workers + 1):
                    world = World(
                        workers,
                        servers,
                        dead,
                        ready=ready - worn_out - late,
                        worn_out=worn_out,
                        late=late,
                        stuck=stuck,
                        overdue=overdue,
                        whole=whole,
                        snapshot=snapshot,
                    )
                    check(world, Target(least, workers, servers, waits, movable))


@pytest.mark.few(1)
@pytest.mark.parametrize(("workers", "servers"), list(product(range(1, 4), range(4))))
def test_every_world_without_deaths_of_up_to_three(workers: int, servers: int) -> None:
    for leaving in subsets(processes(workers, servers)):
        for ready in (NOBODY, frozenset(list(leaving)[:1]), leaving):
            for full, joining, opening, wanted, serving, switched in product(
                FLAGS, range(3), range(3), range(1, 4), range(4), FLAGS
            ):
                world = World(
                    workers,
                    servers,
                    leaving=leaving,
                    ready=ready,
                    full=full,
                    joining=joining,
                    opening=opening,
                )
                check(world, Target(min(2, wanted), wanted, serving, switched=switched))


@given(st.data(), st.integers(1, 6), st.integers(0, 6))
def test_larger_worlds(data: st.DataObject, workers: int, servers: int) -> None:
    peers = st.sampled_from(processes(workers, servers))
    some, flag = st.frozensets(peers), st.booleans()
    dead = data.draw(some)
    leaving, worn_out = data.draw(some) - dead, data.draw(some) & dead
    late = data.draw(some) & dead
    few = st.integers(0, 3)
    world = World(
        workers,
        servers,
        dead,
        leaving,
        (data.draw(some) & (dead | leaving)) - worn_out - late,
        worn_out,
        late,
        *(data.draw(flag) for _ in range(3)),
        joining=data.draw(few),
        opening=data.draw(few),
        whole=data.draw(flag),
        snapshot=data.draw(flag),
    )
    most = data.draw(st.integers(1, 6))
    target = Target(
        data.draw(st.integers(1, most)),
        most,
        data.draw(st.integers(0, 6)),
        *(data.draw(flag) for _ in range(3)),
    )
    check(world, target)


@given(st.data(), st.integers(1, 6), st.integers(0, 4))
def test_what_is_wanted_is_reached(data: st.DataObject, workers: int, servers: int) -> None:
    """Whoever dies, when all that is lacking starts, some transitions later nothing is left to do."""
    peers = processes(workers, servers)
    dead = data.draw(st.frozensets(st.sampled_from(peers)))
    stuck = data.draw(st.booleans()) or any(peer.role == "server" for peer in dead)
    target = Target(min(2, workers), workers, servers, waits=data.draw(st.booleans()))
    world = World(workers, servers, dead, stuck=stuck, snapshot=True)
    for _ in range(4):
        found = decide(world, target)
        assert not isinstance(found, Impossible)
        if found is None and not world.dead:
            break
        if found is None:  # successors come up
            world = replace(world, ready=world.dead)
            continue
        lacking = target.workers - found.workers, target.servers - found.servers
        world = World(found.workers, found.servers, joining=lacking[0], opening=lacking[1])
    assert (world.workers, world.servers, world.dead) == (workers, servers, NOBODY)


def test_a_node_with_workers_and_a_server_is_done_without() -> None:
    dead = frozenset([worker_peer(2), worker_peer(3), server_peer(1)])
    found = decide(World(4, 2, dead, stuck=True), Target(2, 4, 2))
    assert found == Transition("processes", NOBODY, dead - {server_peer(1)}, 2, 1)


def test_without_any_server_only_servers_are_awaited() -> None:
    dead = frozenset([worker_peer(2), server_peer(0)])
    found = decide(World(3, 1, dead, stuck=True), Target(1, 3, 1))
    alone = frozenset([server_peer(0)])
    assert found == Transition("processes", alone, dead - alone, 2, 1)


def test_one_worker_goes_on_alone_only_when_nobody_comes() -> None:
    dead = frozenset([worker_peer(0)])
    world, target = World(2, 1, dead, stuck=True), Target(1, 2, 1)
    assert decide(world, target) == Transition("processes", dead, NOBODY, 2, 1)
    late = replace(world, late=dead)
    assert decide(late, target) == Transition("processes", NOBODY, dead, 1, 1)
    lost = decide(late, replace(target, least=2))
    assert isinstance(lost, Impossible)
    assert lost.why == "no successor has come up, and at least 2 workers are needed"


def test_who_comes_goes_on_without_those_who_do_not() -> None:
    dead = frozenset([worker_peer(0), worker_peer(1), worker_peer(2)])
    world = World(3, 1, dead, stuck=True, late={worker_peer(2)})
    found = decide(world, Target(1, 3, 1))
    assert found == Transition("processes", dead - world.late, frozenset(world.late), 2, 1)


def test_with_patience_successors_are_awaited() -> None:
    dead = frozenset([worker_peer(1)])
    found = decide(World(3, 1, dead, stuck=True), Target(2, 3, 1, waits=True))
    assert found == Transition("processes", dead, NOBODY, 3, 1)


def test_who_stands_ready_joins_before_the_others() -> None:
    dead = frozenset([worker_peer(1), worker_peer(2)])
    found = decide(World(3, 1, dead, ready={worker_peer(2)}), Target(2, 3, 1))
    assert found == Transition("processes", frozenset([worker_peer(2)]), NOBODY, 3, 1)


def test_what_nobody_holds_comes_from_the_snapshot_or_is_lost() -> None:
    dead = frozenset([server_peer(0)])
    world = World(3, 2, dead, stuck=True, whole=False)
    found = decide(replace(world, snapshot=True), Target(2, 3, 2))
    assert isinstance(found, Transition)
    assert found.source == "snapshot"
    lost = decide(world, Target(2, 3, 2))
    assert isinstance(lost, Impossible)
    assert "no copy is left" in lost.why
