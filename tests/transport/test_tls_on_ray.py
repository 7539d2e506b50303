"""Jobs under TLS over TCP on one node; tests/runtime/test_nodes.py has one on two."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import ray

from steepest import (
    AllreduceStrategy,
    DistributedSGD,
    FailureConfig,
    ParameterServer,
    ParameterServerStrategy,
    RunConfig,
)
from steepest.testing import InProcessCluster, linear_model_creator
from tests.living import places_of
from tests.reference import same_bits


@pytest.mark.few(1)
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "strategy",
    [ParameterServerStrategy(transport="tcp"), AllreduceStrategy(transport="tcp")],
    ids=lambda strategy: strategy.name,
)
def test_training_under_tls_gives_the_same_bits_also_after_a_death(strategy) -> None:
    run_config = RunConfig(tls=True, failure=FailureConfig(snapshot_every=1, spares=1))
    in_process = InProcessCluster(linear_model_creator(), num_workers=2)
    in_process.step(6)
    with DistributedSGD(
        linear_model_creator(), num_workers=2, strategy=strategy, run_config=run_config
    ) as sgd:
        sgd.fit(steps=6, progress=False)
        assert same_bits(sgd.weights(), in_process.weights())
        channels = sgd._live().router.transport._channels
        assert channels
        assert {channel._socket.version() for channel in channels} == {"TLSv1.3"}
        pid = next(p.pid for peer, p in places_of(sgd).items() if str(peer) == "worker 1")
        os.kill(pid, signal.SIGKILL)
        sgd.fit(steps=6, progress=False)
        assert sgd.stats().replaced == 1
        assert sgd.stats().step == 12


@ray.remote(max_calls=1)
def add(server: ParameterServer) -> set[str]:
    """The versions of TLS that its connections speak."""
    server.push(np.ones(1000))
    channels = server._connection()._router.transport._channels
    return {channel._socket.version() for channel in channels}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_handle_of_a_parameter_server_carries_the_certificate() -> None:
    with ParameterServer(np.zeros(1000), num_servers=2, transport="tcp", tls=True) as server:
        assert ray.get([add.remote(server) for _ in range(2)]) == [{"TLSv1.3"}] * 2
        assert server.pull().min() == 2.0
        assert "PRIVATE" not in repr(server._access)
