"""Room that a job reserves: taken in as nodes join, given back when its workers leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from steepest import DeadlineConfig, DistributedSGD, FailureConfig, ParameterServerStrategy
from steepest.core.messages.message import worker_peer
from steepest.errors import ResourcesError
from steepest.runtime.job_runtime import using
from steepest.runtime.machine import runtime as machine
from steepest.runtime.room import Room, packed, reserve, worker_bundle
from steepest.testing import linear_model_creator
from tests.living import places_of
from tests.simulation.run import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_workers_of_one_machine_share_gpus_where_these_are_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle, here = worker_bundle(1, True, 1), machine.MachineRuntime()
    monkeypatch.setattr(machine, "_gpus", lambda: 2)
    with using(here):
        assert len(reserve(5, bundle, 1.0)) == 5
        assert [group.gpus for group in here._groups.values()] == [
            [[each]] for each in (0, 1, 0, 1, 0)
        ]
        monkeypatch.setattr(machine, "_gpus", lambda: 0)
        with pytest.raises(ResourcesError, match="with gpu=False"):
            reserve(1, bundle, 1.0)


def test_nodes_that_join_one_after_the_other_are_taken_in_alike() -> None:
    simulation = Simulation(1, cpus=(0, *[1] * 9))
    later = simulation.world.nodes[3:]
    for node in later:
        node.cpus = 0
    config = run_config(
        failure=FailureConfig(spares=0), deadlines=DeadlineConfig(start=30.0, driver=4000.0)
    )
    clock = simulation.scheduler
    with (
        simulation.running(),
        DistributedSGD(linear_model_creator(), (1, 9), run_config=config) as sgd,
    ):
        pause(10.0)
        waited = []
        for node in later:
            node.cpus, began, before = 1, clock.now, sgd.num_workers
            while sgd.num_workers == before:
                pause(0.5)
            waited.append(clock.now - began)
        assert sgd.num_workers == 9
    assert max(waited) < 10.0, waited


def held(simulation: Simulation) -> float:
    """The CPUs that are reserved, a moment later."""
    pause(5.0)
    return simulation.runtime.total()["CPU"] - simulation.runtime.free()["CPU"]


@pytest.mark.few(1)
@pytest.mark.parametrize("spares", [0, 2])
def test_workers_that_leave_give_back_their_room(spares: int) -> None:
    simulation = Simulation(2, cpus=(4, 4, 4))
    config = run_config(
        failure=FailureConfig(spares=spares), deadlines=DeadlineConfig(start=5.0, driver=4000.0)
    )
    with (
        simulation.running(),
        DistributedSGD(linear_model_creator(), 3, run_config=config) as sgd,
    ):
        sgd.fit(steps=5, progress=False)
        assert held(simulation) == 3
        for workers in (1, 9, 2, 6):
            sgd.resize(workers)
            assert held(simulation) == workers
        sgd.fit(steps=5, progress=False)
        with pytest.raises(ResourcesError, match="no room for more workers for 5 s"):
            sgd.resize(13)
        assert held(simulation) == 6
        assert sgd.step().step == 11
    assert held(simulation) == 0


def test_a_server_stays_where_it_is_and_so_does_the_room_that_it_is_in() -> None:
    simulation = Simulation(3, cpus=(0, 1, 1))
    strategy = ParameterServerStrategy(num_servers=2)
    with (
        simulation.running(),
        DistributedSGD(
            linear_model_creator(), 2, strategy=strategy, run_config=run_config()
        ) as sgd,
    ):
        sgd.fit(steps=5, progress=False)
        sgd.resize(1)  # with one worker there are no processes of servers
        assert held(simulation) == 1
        sgd.resize(2)
        assert sgd.fit(steps=5, progress=False).step == 10


def test_nodes_that_were_left_hold_nothing() -> None:
    """Two nodes are drained one after the other, and then they are gone."""
    simulation = Simulation(4, cpus=(0, *[4] * 4))
    going = simulation.runtime.notices
    with (
        simulation.running(),
        DistributedSGD(linear_model_creator(), 4, run_config=run_config()) as sgd,
    ):
        for _ in range(2):
            node = places_of(sgd)[worker_peer(0)].node
            going[node] = 0.0
            while node in {place.node for place in places_of(sgd).values()}:
                sgd.fit(steps=10, progress=False)
            assert held(simulation) == 4
            (there,) = (each for each in simulation.world.nodes if each.id == node)
            simulation.world.lose(there, silently=False)
            while there.known_alive:
                pause(1.0)
            going.clear()
            assert held(simulation) == 4
        assert sgd.num_workers == 4


def test_room_is_asked_for_as_a_whole() -> None:
    """Of two that want three of four CPUs one has them, and the other holds nothing until it has."""
    simulation, bundle = Simulation(5, cpus=(2, 2)), {"CPU": 1.0}
    with simulation.running():
        simulation.runtime.connect()
        assert packed(3, bundle) is not None
        assert packed(5, bundle) is None
        rooms = [Room(3, bundle), Room(3, bundle)]  # there seems to be room for both

        def look() -> list[bool]:
            pause(0.5)
            return [room.is_there for room in rooms]

        while True not in (found := look()):
            pass
        late = rooms[found.index(False)]
        for _ in range(20):
            assert look() == found
        assert held(simulation) == 3
        rooms[found.index(True)].release()
        while not late.is_there:
            pause(0.5)
        assert held(simulation) == 3
        first, *others = late.seats
        for seat in others:
            seat.give_back()
        assert held(simulation) == 1
        assert first.node


def test_workers_are_placed_on_few_nodes() -> None:
    bundle = {"CPU": 2.0}
    with Simulation(6, cpus=(3, 8, 5)).running() as simulation:
        simulation.runtime.connect()
        ids = [node.id for node in simulation.world.nodes]
        assert packed(4, bundle) == [ids[1]] * 4
        assert packed(6, bundle) == [ids[1]] * 4 + [ids[2]] * 2
        assert packed(3, bundle, without=[ids[1]]) == [ids[2], ids[2], ids[0]]
        assert packed(4, bundle, without=[ids[1]]) is None
