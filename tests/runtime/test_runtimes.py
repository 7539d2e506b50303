"""Actors keep the contract of the core's `Runtime`: of Ray, and of a simulation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from steepest.core import Runtime
from steepest.core.system import system
from steepest.runtime.actor_runtime import ActorRuntime
from steepest.runtime.job_runtime import runtime as job_runtime
from tests.core.models import Body
from tests.core.runtime_contract import RuntimeContract
from tests.simulation.run import Simulation


@pytest.mark.ray
class TestActorsOfRay(RuntimeContract):
    exited = "(?i)exit"
    killed = "killed by `ray.kill`"
    unmade = "missing 1 required positional argument"

    @pytest.fixture
    def runtime(self, ray_cluster: None) -> Iterator[Runtime]:
        made = ActorRuntime()
        yield made
        made.close()


class SimulatedBody(Body):
    """Ends, and waits, as threads of a simulation do."""

    def end(self, code: int) -> None:
        job_runtime().exit(code)

    def wait(self) -> None:
        system().event().wait()


class TestActorsOfASimulation(RuntimeContract):
    body = SimulatedBody
    exited = "exits with code 3$"
    killed = "killed by `ray.kill`"
    unmade = "missing 1 required positional argument"

    @pytest.fixture
    def runtime(self) -> Iterator[Runtime]:
        with Simulation(1).running():
            made = ActorRuntime()
            yield made
            made.close()
