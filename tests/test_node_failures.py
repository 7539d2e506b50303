"""Nodes that die, that nobody can reach for a while, that come late: network namespaces, each with a raylet of its own.

Their links end in one more namespace, at a bridge, or at a switch in user space that delays frames
and loses some.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked_workers import RAY
from tests.test_nodes import ip, until
from tests.test_ray_places import SECONDS, Place

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root and iproute2",
    ),
]
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


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.close()


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


SETS = """
    import subprocess
    import time
    from steepest import Callback, DeadlineConfig, FailureConfig, ParameterServerStrategy, RunConfig
    from steepest.testing import replay
    from tests.reference import same_bits

    class Disaster(Callback):
        times = []

        def on_step(self, sgd, result):
            self.times.append(time.monotonic())
            if result.step == 100:
                {disaster}

        def kill(self):
            pids = subprocess.run(["ip", "netns", "pids", NAMES[node]], capture_output=True, check=True)
            for pid in pids.stdout.split():
                os.kill(int(pid), 9)

        def cut(self):
            subprocess.run(["ip", "-n", SWITCH, "link", "set", f"port{{node}}", "nomaster"], check=True)

    if __name__ == "__main__":
        NAMES, ADDRESSES, SWITCH = {names}
        deadlines = DeadlineConfig(step=120.0, start=60.0)
        failure = FailureConfig(heartbeat=2.0, spares=0)
        run_config = RunConfig(keep_log=True, deadlines=deadlines, failure=failure)
        with DistributedSGD(linear_model_creator(), num_workers=4, strategy={strategy}, run_config=run_config) as sgd:
            hosts = sgd.foreach_worker(lambda view: view.host)
            node = next(i for i in (1, 2) if hosts.count(ADDRESSES[i]) == 2)
            dead = [f"worker {{i}}" for i, host in enumerate(hosts) if host == ADDRESSES[node]]
            places = sgd._live().places.items()
            dead += [str(p) for p, at in places if p.role == "server" and at.host == ADDRESSES[node]]
            assert len(dead) >= 3, dead
            disaster = Disaster()
            sgd.fit(steps=400, callbacks=[disaster], progress=False)
            first = sgd.stats().events[0]
            print(first, sgd.stats().events, flush=True)
            assert first.kind == "left" and all(name in first.line for name in dead), first
            kinds = {{event.kind for event in sgd.stats().events[1:]}}
            assert sgd.stats().step == 400 and kinds <= {{"resized", "returned"}}, kinds
            assert sgd.num_workers == (4 if "returned" in kinds else 2)
            if {copies}:  # else what came before the snapshot's successor is no part of the log
                assert same_bits(replay(sgd.log(), linear_model_creator()), sgd.weights())
        gap = max(b - a for a, b in zip(disaster.times, disaster.times[1:]))
        print(f"without a step: {{gap:.2f}} s; all is well", flush=True)
        os._exit(0)
"""


@pytest.mark.parametrize(
    ("disaster", "copies"),
    [
        ("kill", True),
        *(
            pytest.param(*row, marks=pytest.mark.full)
            for row in (("kill", False), ("cut", True), ("cut", False))
        ),
    ],
)
def test_two_workers_and_a_server_are_done_without_when_their_node_is_gone(
    nodes: Nodes, disaster: str, copies: bool
) -> None:
    """At once, although Ray still takes the node for alive, and has no room elsewhere."""
    nodes.first = nodes.others = 2
    nodes.add(3)
    names = (nodes.names, [nodes.address(index) for index in range(3)], nodes.switch)
    strategy = f"ParameterServerStrategy(num_servers=3, replication={2 if copies else 1})"
    program = nodes.place.script(
        SETS.format(disaster=f"self.{disaster}()", names=names, strategy=strategy, copies=copies)
    )
    output = nodes.place.run("ip", "netns", "exec", nodes.names[0], sys.executable, program)
    assert "all is well" in output


GROWING = """
    from itertools import pairwise
    from steepest import DeadlineConfig, RunConfig
    from tests.reference import Task, difference, samples, sgd as plain
    from tests.test_resizing import serially

    class Watch(Callback):
        results = []

        def on_step(self, trainer, result):
            self.results.append(result)
            if result.step == 20:
                print("training", flush=True)

    if __name__ == "__main__":
        task = Task(optimizer=plain(lr=0.01), data=samples(600), batch_size=1)
        run_config = RunConfig(deadlines=DeadlineConfig(start=60.0))
        with DistributedSGD(task.creator(), num_workers=(1, 3), run_config=run_config) as trainer:
            first = trainer.foreach_worker(lambda view: (view.host, view.pid))
            assert len(first) == 2
            watch = Watch()
            while trainer.num_workers == 2:
                trainer.fit(steps=100, callbacks=[watch], progress=False)
            trainer.fit(steps=300, callbacks=[watch], progress=False)
            after = trainer.foreach_worker(lambda view: (view.host, view.pid))
            weights = trainer.weights()
        assert after[:2] == first and len(dict(after)) == 3, (first, after)
        assert [result.step for result in watch.results] == list(range(1, len(watch.results) + 1))
        seen = {}
        for result in watch.results:
            seen[result.epoch] = seen.get(result.epoch, 0) + result.samples
        *whole, (last, _) = sorted(seen.items())
        assert whole == [(epoch, 600) for epoch in range(last)], seen
        alone = [result.samples for result in watch.results].index(3)
        runs = [(2, alone), (3, len(watch.results) - alone)]
        assert difference(weights, serially(task, runs)) < 1e-9, runs
        print("all is well")
"""


@pytest.mark.full
def test_a_node_joins_and_the_job_grows(nodes: Nodes) -> None:
    """With room for two of up to three it begins with two; each sample of an epoch is in exactly one step."""
    nodes.first = 1
    nodes.add(2)
    program = nodes.place.script(GROWING)
    with nodes.place.start(
        "ip", "netns", "exec", nodes.names[0], sys.executable, program
    ) as process:
        until(process.stdout, "training\n")
        nodes.add()
        output, _ = process.communicate(timeout=SECONDS)
    assert "all is well" in output, output


@pytest.fixture(scope="module")
def impatient() -> Iterator[Nodes]:
    """A cluster of which each test ends a node; Ray gives it up soon."""
    made = Nodes()
    try:
        made.impatient()
        made.add(1)
        yield made
    finally:
        made.close()


@pytest.mark.full
@pytest.mark.parametrize(
    ("disaster", "strategy", "replaced"),
    [
        pytest.param(
            "self.kill()", "ParameterServerStrategy(num_servers=1)", 1, marks=pytest.mark.full
        ),
        ("self.cut()", "ParameterServerStrategy(num_servers=1)", 1),
        (
            "self.kill()",
            "ParameterServerStrategy(replication=2)",
            2,
        ),  # and the server beside the worker
    ],
)
def test_a_node_dies_and_another_takes_its_place(
    impatient: Nodes, strategy: str, disaster: str, replaced: int
) -> None:
    """Without copies it is one that has no server. A link that was cut is whole again while others go on."""
    impatient.add(3 - impatient.left)
    impatient.ended += 1
    heals = "sgd._supervisor.replaced" if "cut" in disaster else False
    about = {"heals": heals, "moves": True, "replaced": replaced}
    run(impatient, strategy=strategy, disaster=disaster, **about)
