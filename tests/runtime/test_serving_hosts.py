"""Hosts that have no worker, and serve: where servers are placed, what they hold, and that they may be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    LocalStrategy,
    ParameterServerStrategy,
    ResourceConfig,
    SimpleStrategy,
)
from steepest.core.config.run import DeadlineConfig
from steepest.errors import ConfigurationError, ResourcesError, ShutdownError
from steepest.runtime.room import fitting
from tests.living import places_of
from tests.reference import Task, difference, samples, sgd
from tests.simulated_programs import quiet
from tests.simulation.run import Simulation, run_config

TASK = Task(optimizer=sgd(lr=0.01, momentum=0.9), data=samples(61), batch_size=1)
STRATEGIES = [
    ParameterServerStrategy(replication=2, chunk_bytes=32),
    ParameterServerStrategy(num_servers=2, chunk_bytes=32),
]


def serving(hosts: int) -> Any:
    config = run_config(deadlines=DeadlineConfig(start=5.0, step=60.0))
    return replace(config, resources=ResourceConfig(keep_memory=False, serving_hosts=hosts))


def nodes(trainer: DistributedSGD, role: str) -> list[str]:
    places = places_of(trainer)
    return [place.node for peer, place in places.items() if peer.role == role]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.few(6)
@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("hosts", [1, 2, 3])
@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServerStrategy(chunk_bytes=32),
        ParameterServerStrategy(chunk_bytes=32, replication=2),
        ParameterServerStrategy(chunk_bytes=32, transport="tcp"),
    ],
    ids=["ps", "copies", "tcp"],
)
def test_a_server_runs_on_each_host(strategy: Any, workers: int, hosts: int) -> None:
    simulation = Simulation(1, cpus=(1,) * (workers + hosts))
    with (
        simulation.running(),
        DistributedSGD(
            TASK.creator(), workers, strategy=strategy, run_config=serving(hosts)
        ) as sgd,
    ):
        working, served = nodes(sgd, "worker"), nodes(sgd, "server")
        assert sgd.num_servers == workers + hosts
        assert len(set(served)) == workers + hosts
        assert set(served[hosts:]) == set(working)
        owners = Counter(sgd._live().job.owners)
        if strategy.replication == 1 and strategy.transport == "wire":
            assert owners.keys() == {*range(hosts, hosts + workers)}
        sgd.fit(steps=8, progress=False)
        assert difference(sgd.weights(), TASK.train(workers, 8)) < 1e-12


def test_fewer_servers_are_on_hosts_without_workers() -> None:
    simulation = Simulation(2, cpus=(2, 1, 1))
    strategy = ParameterServerStrategy(num_servers=2)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=serving(2)) as sgd,
    ):
        assert not set(nodes(sgd, "worker")) & set(nodes(sgd, "server"))
        sgd.resize(num_servers=3)
        sgd.fit(steps=8, progress=False)
        assert set(nodes(sgd, "server")) == {node.id for node in simulation.world.nodes}
        assert difference(sgd.weights(), TASK.train(2, 8)) < 1e-12


@pytest.mark.few(1)
@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("lost", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=["copies", "one each"])
def test_servers_of_lost_hosts_go_elsewhere(strategy: Any, lost: int, *, silently: bool) -> None:
    simulation = Simulation(3, cpus=(2, 1, 1))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=serving(2)) as sgd,
    ):
        sgd.fit(steps=5, progress=False)
        began, servers = simulation.scheduler.now, sgd.num_servers
        gone = simulation.world.nodes[3 - lost :]
        for node in gone:
            simulation.world.lose(node, silently=silently)
        sgd.fit(steps=7, progress=False)
        assert simulation.scheduler.now - began < 20.0
        assert sgd.num_servers == servers == (strategy.num_servers or 3)
        assert not set(nodes(sgd, "server")) & {node.id for node in gone}
        assert difference(sgd.weights(), TASK.train(2, 12)) < 1e-12


def test_a_server_that_died_is_replaced_on_its_host() -> None:
    simulation = Simulation(4, cpus=(2, 1))
    strategy = ParameterServerStrategy(num_servers=1)
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=serving(1)) as sgd,
    ):
        sgd.fit(steps=5, progress=False)
        before = places_of(sgd)
        (server,) = [peer for peer in before if peer.role == "server"]
        process = next(p for p in simulation.world.processes if p.pid == before[server].pid)
        simulation.world.kill(process, "for want of memory")
        sgd.fit(steps=5, progress=False)
        after = places_of(sgd)[server]
        assert after.pid != before[server].pid
        assert after.node == before[server].node == simulation.world.nodes[1].id
        assert difference(sgd.weights(), TASK.train(2, 10)) < 1e-12


def test_further_workers_leave_the_hosts_out() -> None:
    simulation = Simulation(5, cpus=(2, 2, 1))
    with (
        simulation.running(),
        DistributedSGD(TASK.creator(), (1, 8), run_config=serving(1)) as sgd,
    ):
        assert sgd.num_workers == 1
        (alone,) = sgd._live().placement.serving_nodes
        assert fitting({"CPU": 1.0}) == 3
        assert fitting({"CPU": 1.0}, {alone}) == 2
        sgd.resize(3)
        assert alone in nodes(sgd, "server")
        assert alone not in nodes(sgd, "worker")
        with pytest.raises(ResourcesError, match="no room for more workers"):
            sgd.resize(4)
        sgd.fit(steps=5, progress=False)
        assert sgd.num_workers == 3


def test_there_must_be_such_hosts() -> None:
    with Simulation(6, cpus=(2, 1)).running():
        wanted = "did not place serving_hosts=2 within 5 s: asked 1 CPU on each, where no worker is"
        with pytest.raises(ResourcesError, match=wanted):
            DistributedSGD(TASK.creator(), 2, run_config=serving(2))


def test_it_is_said_at_once_where_no_host_can_join() -> None:
    simulation = Simulation(7, cpus=(2,))
    simulation.runtime.may_grow = False
    with simulation.running():
        wanted = (
            "serving_hosts=1: this simulation has 0 nodes without workers, and no node will join it"
        )
        with pytest.raises(ResourcesError, match=wanted):
            DistributedSGD(TASK.creator(), 2, run_config=serving(1))


@pytest.mark.parametrize("strategy", [AllreduceStrategy(), LocalStrategy(), SimpleStrategy()])
def test_nobody_serves_in_some_strategies(strategy: Any) -> None:
    with Simulation(8, cpus=(2, 1)).running():
        wanted = f'serving_hosts=1 with strategy="{strategy.name}", which has no server processes'
        with pytest.raises(ConfigurationError, match=wanted):
            DistributedSGD(TASK.creator(), 2, strategy=strategy, run_config=serving(1))


@pytest.mark.parametrize("hosts", [-1, 1.5, True])
def test_the_number_is_checked(hosts: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"serving_hosts={hosts}: give an integer of at"):
        ResourceConfig(serving_hosts=hosts)


def test_a_trainer_says_where_its_processes_run() -> None:
    with (
        Simulation(1, cpus=(1, 1)).running(),
        DistributedSGD(TASK.creator(), 2, run_config=run_config()) as sgd,
    ):
        found = sgd.processes()
        assert [process.name for process in found] == [
            "server 0",
            "server 1",
            "worker 0",
            "worker 1",
        ]
        assert len({(process.node, process.pid) for process in found}) == 4
        for role in ("server", "worker"):
            assert len({process.host for process in found if process.role == role}) == 2
    with pytest.raises(ShutdownError):
        sgd.processes()
