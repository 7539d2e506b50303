"""Nodes that die, or that nobody can reach: network namespaces on a bridge, each with a raylet of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_nodes import ip, until
from tests.test_ray_places import Place

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2"
    ),
]
PORT = 6391


class Nodes:
    """A Ray cluster whose nodes have one CPU each, but for the first, where the driver runs."""

    def __init__(self) -> None:
        self.place = Place()
        self.names: list[str] = []
        self.started: list[subprocess.Popen[str]] = []
        self.switch = f"sp{self.place.mark[:6]}s"
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        self.place.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.place.mark * 2}

    @staticmethod
    def address(index: int) -> str:
        return f"10.213.8.{index + 1}"

    def add(self) -> None:
        index = len(self.names)
        name = f"sp{self.place.mark[:6]}{index}"
        self.names.append(name)
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", "spn", "netns", name, "type", "veth", "peer", "name", f"port{index}", "netns", self.switch)
        ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "spn")
        ip("-n", name, "link", "set", "spn", "up")
        ip("-n", self.switch, "link", "set", f"port{index}", "master", "bridge", "up")
        ray = str(Path(sys.executable).with_name("ray"))
        own = ["--head", f"--port={PORT}", "--include-dashboard=false"] if index == 0 else []
        own = own or [f"--address={self.address(0)}:{PORT}"]
        common = [
            f"--num-cpus={min(index, 1)}",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={self.address(index)}",
        ]
        process = self.place.start("ip", "netns", "exec", name, ray, "start", *own, *common)
        self.started.append(process)
        until(process.stdout, "runtime started")
        self.place.environment["RAY_ADDRESS"] = f"{self.address(0)}:{PORT}"

    def delay(self, milliseconds: int, loss: int) -> None:
        """What every node sends comes late, and some of it never."""
        for name in self.names:
            shape = ["delay", f"{milliseconds}ms", "loss", f"{loss}%", "limit", "10000"]
            command = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "spn", "root", "netem", *shape]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
            if "kind is unknown" in done.stderr:
                pytest.skip("this kernel has no netem, which delays and loses packets")
            assert done.returncode == 0, done.stderr

    def pids(self, name: str) -> list[int]:
        inside = subprocess.run(["ip", "netns", "pids", name], check=False, capture_output=True, timeout=20)
        return [int(pid) for pid in inside.stdout.split()]

    def close(self) -> None:
        self.place.kill()
        for name in [*self.names, self.switch]:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)
        for process in self.started:
            process.communicate(timeout=20)
        shutil.rmtree(self.place.directory, ignore_errors=True)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.close()


PROGRAM = """
    import logging
    import subprocess
    from steepest import Callback, ParameterServerStrategy, RunSettings

    logging.basicConfig(level=logging.WARNING)
    STEPS = {steps}

    class Disaster(Callback):
        done = False

        def on_step(self, trainer, result):
            if result.step >= 20 and not self.done:
                self.done = True
                place = NAMES[hosts[1]]
                {disaster}

    def kill(place):
        for pid in subprocess.run(["ip", "netns", "pids", place], capture_output=True, check=True).stdout.split():
            os.kill(int(pid), 9)

    def cut(place):
        subprocess.run(["ip", "-n", place, "link", "set", "spn", "down"], check=True)

    if __name__ == "__main__":
        NAMES = {names}
        settings = RunSettings(step_timeout=120.0, start_timeout=60.0, heartbeat=2.0)
        with DistributedSGD(linear_model_creator(), num_workers=2, strategy={strategy}, settings=settings) as sgd:
            hosts = sgd.foreach_worker(lambda view: view.host)
            assert len(set(hosts)) == 2, hosts
            sgd.fit(steps=STEPS, callbacks=[Disaster()], progress=False)
            after = sgd.foreach_worker(lambda view: view.host)
            print("hosts", hosts, after, "replaced", sgd.stats().replaced, flush=True)
            assert sgd.stats().step == STEPS
            weights = sgd.weights()
        assert after[0] == hosts[0] and (after[1] != hosts[1]) == {moves}, (hosts, after)
        again = InProcessCluster(linear_model_creator(), num_workers=2)
        again.step(STEPS)
        for name, value in again.weights().items():
            assert float((weights[name] - value).abs().max()) < 1e-12, name
        print("all is well")
"""


def run(nodes: Nodes, **about: object) -> None:
    names = {nodes.address(index): name for index, name in enumerate(nodes.names)}
    program = nodes.place.script(PROGRAM.format(names=names, **about))
    assert "all is well" in nodes.place.run("ip", "netns", "exec", nodes.names[0], sys.executable, program)


@pytest.mark.parametrize(
    ("disaster", "strategy"),
    [
        ("kill(place)", "ParameterServerStrategy(num_servers=1)"),
        ("cut(place)", "ParameterServerStrategy(num_servers=1)"),
        ("kill(place)", "ParameterServerStrategy(replication=2)"),
    ],
)
def test_a_node_dies_and_another_takes_its_place(nodes: Nodes, strategy: str, disaster: str) -> None:
    """Without copies it is one that has no server."""
    for _ in range(4):
        nodes.add()
    run(nodes, strategy=strategy, disaster=disaster, moves=True, steps=60)


def test_slow_and_lossy_links_change_nothing(nodes: Nodes) -> None:
    for _ in range(3):
        nodes.add()
    nodes.delay(50, 5)
    run(nodes, strategy="'ps'", disaster="pass", moves=False, steps=10)
