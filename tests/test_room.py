"""Room that a job reserves: taken in as nodes join, given back when its workers leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from steepest import DeadlineConfig, DistributedSGD, FailureConfig
from steepest.testing import linear_model_creator
from steepest.testing.simulation import Simulation, pause, run_config


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


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
