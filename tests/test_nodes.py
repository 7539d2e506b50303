"""Two nodes: network namespaces joined by a veth pair, each with a raylet of its own; TCP between them."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.forked_workers import RAY
from tests.test_ray_places import SECONDS, Place

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]
ADDRESSES = ("10.213.7.1", "10.213.7.2")
PORT = 6390


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def until(output: object, line: str) -> str:
    """Reads a program's output up to a line that holds some text."""
    seen, deadline = "", time.monotonic() + SECONDS
    while line not in seen:
        ready, _, _ = select.select([output], [], [], max(deadline - time.monotonic(), 0))
        part = os.read(output.fileno(), 4096).decode() if ready else ""  # type: ignore[attr-defined]
        assert part, f"no {line!r} in:\n{seen}"
        seen += part
    return seen


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Place, tuple[str, str]]]:
    """A Ray cluster of two nodes with two CPUs each; programs run in the first one's namespace."""
    with ray_nodes(ADDRESSES) as found:
        yield found


@contextlib.contextmanager
def namespaces(mark: str, addresses: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a veth pair whose ends have these addresses."""
    spaces = (f"sp{mark[:6]}a", f"sp{mark[:6]}b")
    try:
        for space in spaces:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        peer = ("peer", "name", "spb", "netns", spaces[1])
        ip("link", "add", "spa", "netns", spaces[0], "type", "veth", *peer)
        for space, device, address in zip(spaces, ("spa", "spb"), addresses, strict=True):
            # an IPv6 address can be used at once if nobody asks whether others have it
            given = (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)
            ip("-n", space, "addr", "add", *given, "dev", device)
            ip("-n", space, "link", "set", device, "up")
        yield spaces
    finally:
        for space in spaces:
            inside = subprocess.run(
                ["ip", "netns", "pids", space], check=False, capture_output=True, timeout=20
            )
            for (
                pid
            ) in inside.stdout.split():  # Ray's agents hide their mark, and outlive a killed raylet
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(
                ["ip", "netns", "delete", space], check=False, capture_output=True, timeout=20
            )


@contextlib.contextmanager
def ray_nodes(addresses: tuple[str, str]) -> Iterator[tuple[Place, tuple[str, str]]]:
    """A Ray cluster of two nodes with two CPUs each, at these addresses, in namespaces of their own."""
    place = Place()
    try:
        with namespaces(place.mark, addresses) as spaces:
            place.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": place.mark * 2}
            first = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
            common = ["--num-cpus=2", "--block", "--disable-usage-stats"]
            head = [
                f"--node-ip-address={addresses[0]}",
                "--head",
                f"--port={PORT}",
                "--include-dashboard=false",
                "--no-monitor",
            ]
            other = [f"--node-ip-address={addresses[1]}", f"--address={first}:{PORT}"]
            started = []
            for space, arguments in zip(spaces, (head, other), strict=True):
                process = place.start(
                    "ip", "netns", "exec", space, sys.executable, *RAY, "start", *arguments, *common
                )
                started.append(process)
                until(process.stdout, "runtime started")
            place.environment["RAY_ADDRESS"] = f"{first}:{PORT}"
            yield place, spaces
            place.kill()
            for process in started:
                process.communicate(timeout=20)
    finally:
        place.kill()
        shutil.rmtree(place.directory, ignore_errors=True)


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
            for strategy in ("ps", "simple"):
                check(train(strategy, run_config=one_each))
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
