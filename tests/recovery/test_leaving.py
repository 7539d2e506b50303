"""Nodes that will go: callbacks hear of it before anything has moved."""

from __future__ import annotations

import re
from typing import Any

import pytest

from steepest import Callback, DistributedSGD, Event
from steepest.core.messages.message import worker_peer
from steepest.testing import linear_model_creator
from tests.living import places_of
from tests.simulation.run import Simulation, run_config


class Notice(Callback):
    """Gives notice to the node of the last worker at a step, and notes what it hears."""

    def __init__(self, simulation: Simulation, seconds: float) -> None:
        self.simulation, self.seconds = simulation, seconds
        self.heard: list[Event] = []
        self.hosts: list[str] = []

    def on_step(self, sgd: Any, result: Any) -> None:
        if result.step == 5:
            place = places_of(sgd)[worker_peer(sgd.num_workers - 1)]
            self.hosts.append(place.host)
            (node,) = (each for each in self.simulation.world.nodes if each.id == place.node)
            self.simulation.give_notice(node, self.seconds or None)

    def on_event(self, sgd: Any, event: Event) -> None:
        self.heard.append(event)


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("seconds", "when"), [(25.0, r"in \d\d s"), (0.0, "at a time that is not known")]
)
def test_callbacks_hear_of_a_notice_before_anything_has_moved(seconds: float, when: str) -> None:
    """A node that goes is announced once, then left; what callbacks hear is what `stats` has."""
    simulation = Simulation(3, cpus=(2, 2, 2))
    notice = Notice(simulation, seconds)
    with simulation.running():
        config = run_config()
        with DistributedSGD(linear_model_creator(), 4, run_config=config) as sgd:
            while "moved" not in {event.kind for event in notice.heard}:
                sgd.fit(steps=20, callbacks=[notice], progress=False)
            sgd.fit(steps=20, callbacks=[notice], progress=False)
            assert list(sgd.stats().events) == notice.heard
            assert sgd.num_workers == 4
            hosts = {place.host for place in places_of(sgd).values()}
    (gone,) = notice.hosts
    assert [event.kind for event in notice.heard] == ["draining", "moved"]
    line = notice.heard[0].line
    assert re.fullmatch(
        rf"{re.escape(gone)} will go {when}: .*worker 3 (is|are) to move away .*", line
    ), line
    assert gone not in hosts


@pytest.mark.few(1)
def test_a_node_that_is_alone_is_announced_and_training_goes_on() -> None:
    """Where no other node can be had, nothing moves, and no room is looked for."""
    simulation = Simulation(3, cpus=(4,))
    simulation.runtime.may_grow = False
    notice = Notice(simulation, 0.0)
    with (
        simulation.running(),
        DistributedSGD(linear_model_creator(), 2, run_config=run_config()) as sgd,
    ):
        while not notice.heard:
            sgd.fit(steps=20, callbacks=[notice], progress=False)
        sgd.fit(steps=20, callbacks=[notice], progress=False)
        assert [event.kind for event in sgd.stats().events] == ["draining"]
    assert notice.heard[0].line.endswith("no other node to move to")
