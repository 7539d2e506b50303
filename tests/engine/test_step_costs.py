"""What a step of a small model costs: system calls of its processes, and calls of the library's functions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from steepest import DistributedSGD
from steepest.core.transport.stream import WireChannel
from steepest.testing import InProcessCluster
from steepest.testing.models import linear_model_creator
from tests.simulation.run import Simulation, run_config
from tests.simulation.simulated_runtime import SimulatedRuntime
from tests.socket_jobs import STEPS, STRATEGIES, WORKERS, running, steps
from tests.step_calls import calls_of

#: The most calls of the library's own functions in a step of two workers, all processes together; some 40 of them look
#: at the clock.
MOST_CALLS = {"ps": 1035, "allreduce": 1035}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_process_sends_and_receives_once_for_each_message_that_it_waits_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()

    def count(method: str) -> None:
        original = getattr(WireChannel, method)

        def counting(channel: WireChannel, *arguments: Any) -> Any:
            counted[method] += 1
            return original(channel, *arguments)

        monkeypatch.setattr(WireChannel, method, counting)

    with running(name) as (router, client):
        count("_send_bytes")
        count("_receive")
        steps(router, client, STEPS)
    # A worker's gradient with its report, and its weights: without a server of its own for each
    # worker. Of an allreduce the second worker alone talks to another process; its server, which
    # holds nothing, is sent COMMIT with the weights.
    each = 2 * WORKERS if name == "ps" else 2
    others = 6  # ASK, GRANT, and the results, all of which leave together at the end
    assert STEPS * each <= counted["_send_bytes"] <= STEPS * each + others
    assert counted["_receive"] <= counted["_send_bytes"] + others


@pytest.mark.few(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_calls_no_more_functions_than_it_did(name: str) -> None:
    cluster = InProcessCluster(
        linear_model_creator(), num_workers=WORKERS, strategy=STRATEGIES[name]
    )
    cluster.step(STEPS)
    # of a slow machine the coordinator's clock asks now and then whether somebody is late
    least = min((calls_of(cluster, STEPS) for _ in range(3)), key=lambda calls: calls.total())
    assert least.total() / STEPS <= MOST_CALLS[name], least.most_common(20)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_call_of_step_asks_ray_twice_who_is_dead_however_many_processes_there_are(
    workers: int,
) -> None:
    with Simulation(seed=1, cpus=(8,)).running() as simulation:
        config = run_config()
        with DistributedSGD(linear_model_creator(), workers, run_config=config) as trainer:
            trainer.step()
            waits: list[int] = []

            class Counting(SimulatedRuntime):
                def wait(self, calls: Any, *how: Any) -> Any:
                    waits.append(len(calls))
                    return super().wait(calls, *how)

            simulation.runtime.__class__ = Counting
            trainer.step()
            assert len(waits) == 2
            assert min(waits) >= workers
