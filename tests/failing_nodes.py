"""A Ray cluster in network namespaces, whose nodes die, are cut off, and come late."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from tests.forked_workers import RAY
from tests.network_namespaces import ip, until
from tests.ray_hosts import Place

PORT = 6391
SWITCH = str(Path(__file__).with_name("lossy_switch.py"))


class Nodes:
    """A Ray cluster whose nodes have one CPU each, but for the first, where the driver runs.

    Attributes:
        first: CPUs of the first.
        others: CPUs of each other one.
        ended: how many of the others are of no use any more.
    """

    def __init__(self) -> None:
        self.place = Place()
        self.first = 0
        self.others = 1
        self.ended = 0
        self.names: list[str] = []
        self.slow: subprocess.Popen[str] | None = None
        self.started: list[subprocess.Popen[str]] = []
        self.switch = f"sp{self.place.mark[:6]}s"
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.switch, "link", "set", "bridge", "up")
        self.place.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.place.mark * 2}

    @staticmethod
    def address(index: int) -> str:
        return f"10.213.8.{index + 1}"

    def add(self, count: int = 1) -> None:
        """That many more join, together; all but the first node of all, which they ask."""
        while count:
            joining = [self._start(len(self.names)) for _ in range(count if self.names else 1)]
            for process in joining:
                until(process.stdout, "runtime started")
            self.place.environment["RAY_ADDRESS"] = f"{self.address(0)}:{PORT}"
            count -= len(joining)

    @property
    def left(self) -> int:
        """How many others than the first are of use."""
        return len(self.names) - 1 - self.ended

    def _start(self, index: int) -> subprocess.Popen[str]:
        name = f"sp{self.place.mark[:6]}{index}"
        self.names.append(name)
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            "spn",
            "netns",
            name,
            "type",
            "veth",
            "peer",
            "name",
            f"port{index}",
            "netns",
            self.switch,
        )
        ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "spn")
        ip("-n", name, "link", "set", "spn", "up")
        ip("-n", self.switch, "link", "set", f"port{index}", "master", "bridge", "up")
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
        own = [f"--address={self.address(0)}:{PORT}"] if index else head
        common = [
            "--block",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            f"--num-cpus={self.others if index else self.first}",
        ]
        # its files to itself: nodes that start together would give their sockets the same names
        common += [
            f"--node-ip-address={self.address(index)}",
            f"--temp-dir={self.place.directory}/{index}",
        ]
        process = self.place.start(
            "ip", "netns", "exec", name, sys.executable, *RAY, "start", *own, *common
        )
        self.started.append(process)
        return process

    def impatient(self) -> None:
        """Ray gives up nodes that are silent for some seconds, instead of half a minute; to be said before `add`."""
        about = {"initial_delay": 1000, "period": 500, "timeout": 2000}
        self.place.environment |= {
            f"RAY_health_check_{name}_ms": str(value) for name, value in about.items()
        }
        self.place.environment["RAY_health_check_failure_threshold"] = "3"

    def delay(self, milliseconds: int, loss: int) -> None:
        """From now on what a node sends to another comes late, and so many per cent of it never."""
        ports = [f"port{index}" for index in range(len(self.names))]
        for port in ports:
            ip("-n", self.switch, "link", "set", port, "nomaster")
        command = [
            "ip",
            "netns",
            "exec",
            self.switch,
            sys.executable,
            SWITCH,
            str(milliseconds),
            str(loss),
            *ports,
        ]
        pipe = subprocess.PIPE
        self.slow = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=self.place.environment, text=True
        )
        self.started.append(self.slow)
        until(self.slow.stdout, "forwarding")

    def lost(self) -> tuple[int, int]:
        """How many frames came to the switch since `delay`, and how many of them it lost; it ends,
        and links are at the bridge again."""
        assert self.slow is not None
        output, _ = self.slow.communicate(timeout=20)
        for index in range(len(self.names)):
            ip("-n", self.switch, "link", "set", f"port{index}", "master", "bridge")
        found = re.fullmatch(r"(\d+) came, (\d+) lost\n", output)
        assert found, output
        return int(found[1]), int(found[2])

    def pids(self, name: str) -> list[int]:
        inside = subprocess.run(
            ["ip", "netns", "pids", name], check=False, capture_output=True, timeout=20
        )
        return [int(pid) for pid in inside.stdout.split()]

    def close(self) -> None:
        self.place.kill()
        for name in [*self.names, self.switch]:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(
                ["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20
            )
        for process in self.started:
            if process.returncode is None:
                process.communicate(timeout=20)
        shutil.rmtree(self.place.directory, ignore_errors=True)


PROGRAM = """
    import subprocess
    import threading
    from steepest import Callback, DeadlineConfig, FailureConfig, ParameterServerStrategy, RunConfig

    class Disaster(Callback):
        step = 0  # of the last result
        healed = None  # after which step

        def on_step(self, sgd, result):
            self.step = result.step
            if result.step == 20:
                {disaster}
            if {heals} and self.healed is None:
                self.heal()

        def kill(self):
            pids = subprocess.run(["ip", "netns", "pids", NAMES[node]], capture_output=True, check=True)
            for pid in pids.stdout.split():
                os.kill(int(pid), 9)

        def cut(self, seconds=None):
            plug("nomaster")
            if seconds is not None:
                threading.Timer(seconds, self.heal).start()

        def heal(self):
            self.healed = self.step
            plug("master", "bridge")

    def plug(*where):
        subprocess.run(["ip", "-n", SWITCH, "link", "set", f"port{{node}}", *where], check=True)

    def lives(pid):
        try:
            with open(f"/proc/{{pid}}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] not in "XZ"
        except FileNotFoundError:
            return False

    if __name__ == "__main__":
        NAMES, ADDRESSES, SWITCH = {names}
        deadlines = DeadlineConfig(step=120.0, start=60.0)
        run_config = RunConfig(deadlines=deadlines, failure=FailureConfig(heartbeat={heartbeat}))
        with DistributedSGD(linear_model_creator(), num_workers=2, strategy={strategy}, run_config=run_config) as sgd:
            before = sgd.foreach_worker(lambda view: (view.host, view.pid))
            assert before[0][0] != before[1][0], before
            node = ADDRESSES.index(before[1][0])
            disaster = Disaster()
            sgd.fit(steps={steps}, callbacks=[disaster], progress=False)
            steps = {steps}
            while {replaced} and lives(before[1][1]):  # it may still have something to say
                sgd.fit(steps=100, progress=False)
                steps += 100
            after = sgd.foreach_worker(lambda view: (view.host, view.pid))
            print(before, after, "healed after", disaster.healed, sgd.stats(), flush=True)
            assert (sgd.stats().step, sgd.stats().replaced) == (steps, {replaced})
            weights = sgd.weights()
        assert (after[1][0] != before[1][0]) == {moves}
        assert after[0] == before[0] and (after[1] != before[1]) == bool({replaced})
        if "cut" in {disaster!r}:  # a cut that stops nobody is none
            assert disaster.healed is not None and disaster.healed < {steps}, disaster.healed
        again = InProcessCluster(linear_model_creator(), num_workers=2)
        again.step(steps)
        for name, value in again.weights().items():
            assert float((weights[name] - value).abs().max()) < 1e-12, name
        print("all is well")
"""


def run(nodes: Nodes, **about: object) -> None:
    """Trains with two workers, and compares with training by one process."""
    usual: dict[str, object] = {"strategy": "'ps'", "heals": False, "heartbeat": 2.0, "steps": 60}
    names = (nodes.names, [nodes.address(index) for index in range(len(nodes.names))], nodes.switch)
    program = nodes.place.script(PROGRAM.format(**{**usual, "names": names, **about}))
    output = nodes.place.run("ip", "netns", "exec", nodes.names[0], sys.executable, program)
    assert "all is well" in output
