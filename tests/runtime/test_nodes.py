"""Two nodes: network namespaces joined by a veth pair, each with a raylet of its own; TCP between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.network_namespaces import (
    NEEDS_NAMESPACES,
    ray_nodes,
)
from tests.ray_hosts import Place

pytestmark = NEEDS_NAMESPACES

ADDRESSES = ("10.213.7.1", "10.213.7.2")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Place, tuple[str, str]]]:
    """A Ray cluster of two nodes with two CPUs each; programs run in the first one's namespace."""
    with ray_nodes(ADDRESSES) as found:
        yield found


def test_workers_on_two_nodes_equal_one_process(nodes: tuple[Place, tuple[str, str]]) -> None:
    place, spaces = nodes
    program = place.script(
        f"""
        import signal
        import pytest
        from steepest.errors import PeerLostError
        if __name__ == "__main__":
            def kill(view):
                print("last words", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

            from steepest import AllreduceStrategy, ParameterServerStrategy, ResourceConfig, RunConfig
            one_each = RunConfig(resources=ResourceConfig(cpus_per_worker=2))
            check(train("simple", run_config=one_each))
            for strategy in (ParameterServerStrategy(num_servers=2), AllreduceStrategy(chunk_bytes=16)):
                with DistributedSGD(linear_model_creator(), num_workers=4, strategy=strategy) as sgd:  # two on each
                    sgd.fit(steps=5, progress=False)
                    hosts = sgd._live().job.hosts
                    assert len(hosts.aggregators) == 2 and all(len(of) == 2 for of in hosts.aggregators.values()), hosts
                    again = InProcessCluster(linear_model_creator(), num_workers=4, hosts=hosts, strategy=strategy)
                    again.step(5)
                    weights = sgd.weights()
                    assert all(bool((weights[name] == value).all()) for name, value in again.weights().items())
            apart = RunConfig(resources=ResourceConfig(serving_hosts=1))
            strategy = ParameterServerStrategy(chunk_bytes=16)
            with DistributedSGD(linear_model_creator(), num_workers=2, strategy=strategy, run_config=apart) as sgd:
                places = sgd._live().places
                hosts = [place.host for peer, place in places.items() if peer.role == "server"]
                working = {{place.host for peer, place in places.items() if peer.role == "worker"}}
                assert len(working) == 1 and sorted(hosts) == sorted({ADDRESSES!r}), places
                assert hosts[1] in working, places
                sgd.fit(steps=5, progress=False)
                check(sgd.weights())
            with DistributedSGD(linear_model_creator(), num_workers=2, run_config=one_each) as sgd:
                assert sgd.num_servers == 2  # one for each node
                hosts = {{place.host for place in sgd._live().places.values()}}
                assert hosts == set({ADDRESSES!r}), hosts
                sgd.fit(steps=5, progress=False)
                check(sgd.weights())
                with pytest.raises(PeerLostError, match=r"(?s)worker \\d on {ADDRESSES[1]} .* died.*last words"):
                    sgd.foreach_worker(lambda view: kill(view) if view.host == {ADDRESSES[1]!r} else None)
            print("all is well")
        """
    )
    output = place.run("ip", "netns", "exec", spaces[0], sys.executable, program)
    assert "all is well" in output


def test_a_job_on_two_nodes_under_tls(nodes: tuple[Place, tuple[str, str]]) -> None:
    place, spaces = nodes
    program = place.script(
        f"""
        import signal
        import time
        import pytest
        from steepest import AllreduceStrategy, ResourceConfig, RunConfig
        from steepest.errors import PeerLostError
        from steepest.runtime.tls.connections import TlsSocket
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
