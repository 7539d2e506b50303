# ruff: noqa: F811 - a fixture is imported, and named as an argument
"""Jobs under TLS: between two namespaces with a node of Ray's each, and over TCP on one node."""

from __future__ import annotations

import os
import signal
import sys

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
from steepest.errors import ConfigurationError
from steepest.testing import InProcessCluster, linear_model_creator
from tests.reference import same_bits
from tests.test_nodes import ADDRESSES, nodes, pytestmark  # noqa: F401 - a fixture
from tests.test_ray_places import Place

two_nodes, pytestmark = pytestmark, []


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
        with pytest.raises(ConfigurationError, match="by Ray's channels.* RAY_USE_TLS"):
            sgd.set_strategy("simple")
        pid = next(p.pid for peer, p in sgd._live().places.items() if str(peer) == "worker 1")
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


@pytest.mark.cluster
@two_nodes[1]
def test_a_job_on_two_nodes_under_tls(nodes: tuple[Place, tuple[str, str]]) -> None:
    place, spaces = nodes
    program = place.script(
        f"""
        import signal
        import time
        import pytest
        from steepest import AllreduceStrategy, ResourceConfig, RunConfig
        from steepest.errors import PeerLostError
        from steepest.transport.tls import TlsSocket
        if __name__ == "__main__":
            def kill(view):
                os.kill(os.getpid(), signal.SIGKILL)

            one_each = RunConfig(resources=ResourceConfig(cpus_per_worker=2), tls=True)
            check(train(AllreduceStrategy(), run_config=one_each))
            with DistributedSGD(linear_model_creator(), num_workers=2, run_config=one_each) as sgd:
                hosts = {{place.host for place in sgd._live().places.values()}}
                assert hosts == set({ADDRESSES!r}), hosts
                sgd.fit(steps=5, progress=False)
                check(sgd.weights())
                kinds = {{
                    (channel._socket.family.name, isinstance(channel._socket, TlsSocket))
                    for channel in sgd._live().router.transport._channels
                }}
                assert kinds == {{("AF_UNIX", False), ("AF_INET", True)}}, kinds
                began = time.monotonic()
                with pytest.raises(PeerLostError, match=r"(?s)worker \\d on {ADDRESSES[1]} .* died"):
                    sgd.foreach_worker(lambda view: kill(view) if view.host == {ADDRESSES[1]!r} else None)
                assert time.monotonic() - began < 10
            print("all is well")
        """
    )
    output = place.run("ip", "netns", "exec", spaces[0], sys.executable, program)
    assert "all is well" in output
