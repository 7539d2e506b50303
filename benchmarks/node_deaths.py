"""Nodes that are killed, cut off, drained, and that come back: the section ``nodes`` of `benchmarks.compound_deaths`.

Three network namespaces on a bridge, each with a raylet of its own and two CPUs, are the nodes of a Ray cluster with
Ray's default settings. The driver, in the first one, trains with four workers; after 60 steps something happens to
another node that has two of them, and a server where each node has one. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.compound_bodies import Case, EnoughError, Outcome, Scene, Watch, progress
from benchmarks.elasticity import constant
from benchmarks.namespaces import Namespace, star
from benchmarks.recovery_bodies import STEP_SECONDS, digits, paced_creator
from steepest import DistributedSGD, FailureConfig, ParameterServerStrategy, RunConfig
from steepest.errors import SteepestError

PORT = 6392
START_SECONDS = 90.0
TURN_SECONDS = 240.0
WORKERS = 4
CUT_SECONDS = 6.0  # longer than the heartbeat, shorter than Ray's patience with a silent node
WATCHED_SECONDS, BACK_SECONDS = 15.0, 75.0
RAY = str(Path(sys.executable).with_name("ray"))

STRATEGIES: dict[str, Any] = {
    "copies": ParameterServerStrategy(num_servers=3, replication=2),
    "ps": ParameterServerStrategy(num_servers=3),
    "defaults": "ps",
}
#: what happens, to which strategy, and for how long training is watched
ROWS = {
    f"a node {what}, {strategy}": (strategy, what, seconds)
    for strategy in STRATEGIES
    for what, seconds in (
        ("killed", WATCHED_SECONDS),
        ("cut", WATCHED_SECONDS),
        ("drained", BACK_SECONDS),
        ("killed, back", BACK_SECONDS),
        ("cut, back", BACK_SECONDS),
    )
    if strategy != "defaults" or what in ("killed", "cut")
}


@dataclass(frozen=True)
class Cluster:
    """What a program inside needs to know of the nodes.

    Attributes:
        nodes: names of the namespaces, and their addresses.
        hub: name of the namespace with the bridge.
        environment: of raylets and drivers.
        directory: of Ray's files.
    """

    nodes: tuple[tuple[str, str], ...]
    hub: str
    environment: dict[str, str]
    directory: str

    @property
    def address(self) -> str:
        return f"{self.nodes[0][1]}:{PORT}"

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Starts a raylet; it ends with its namespace."""
        name, address = self.nodes[index]
        own = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if index:
            own = [f"--address={self.address}"]
        files = tempfile.mkdtemp(prefix=f"{index}", dir=self.directory)
        with Path(self.directory, f"raylet {index}").open("ab") as log:
            return subprocess.Popen(
                [
                    *("ip", "netns", "exec", name, RAY, "start", *own, "--block"),
                    *("--disable-usage-stats", "--include-log-monitor=false", "--num-cpus=2"),
                    *(f"--node-ip-address={address}", f"--temp-dir={files}"),
                ],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, index: int) -> None:
        """Kills all processes of a node, and its raylet."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.nodes[index][0]], capture_output=True, check=True
        )
        for pid in pids.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def plug(self, index: int, *where: str) -> None:
        command = ["ip", "-n", self.hub, "link", "set", f"port{index}", *where]
        subprocess.run(command, check=True, capture_output=True)

    def drain(self, node: str) -> None:
        command = [RAY, "drain-node", "--address", self.address, "--node-id", node]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        subprocess.run(
            [*command, *reason, "--deadline-remaining-seconds", "60"],
            check=True,
            capture_output=True,
            env=self.environment,
        )


@contextlib.contextmanager
def cluster() -> Iterator[Cluster]:
    """Three nodes that have found each other; all of it ends with the block."""
    directory = tempfile.mkdtemp(prefix="sn-", dir="/tmp")  # sockets want a short path
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {"HOME": directory, "RAY_TMPDIR": directory, "OMP_NUM_THREADS": "1"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    )
    raylets: list[subprocess.Popen[bytes]] = []
    try:
        with star(3) as spaces:
            made = Cluster(
                tuple((space.name, space.address) for space in spaces),
                _hub(spaces),
                environment,
                directory,
            )
            for index in range(len(spaces)):
                raylets.append(made.start(index))
                _until_started(Path(directory, f"raylet {index}"), raylets[-1])
            yield made
    finally:
        for raylet in raylets:
            raylet.kill()
            raylet.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _hub(spaces: list[Namespace]) -> str:
    return f"{spaces[0].name[:-1]}hub"


def _until_started(log: Path, raylet: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while b"runtime started" not in log.read_bytes():
        if raylet.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"a raylet did not start:\n{log.read_text()}")
        time.sleep(0.1)


def turn(row: str, seed: int) -> Outcome:
    """One cluster, one job, one node that something happens to."""
    with cluster() as made:
        done = subprocess.run(
            [
                *("ip", "netns", "exec", made.nodes[0][0]),
                *(sys.executable, "-m", "benchmarks.node_deaths"),
            ],
            input=json.dumps([row, asdict(made)]),
            env={**made.environment, "RAY_ADDRESS": made.address},
            capture_output=True,
            text=True,
            check=False,
            timeout=TURN_SECONDS,
        )
    if done.returncode:
        raise RuntimeError(f"{row}: {done.stderr[-4000:]}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def turns() -> dict[str, Callable[[int], Outcome]]:
    return {row: functools.partial(turn, row) for row in ROWS}


# --- inside the first node ---


def strike(made: Cluster, what: str, node: int, ray_node: str) -> Callable[[Scene], None]:
    """The plan by which something happens to a node."""

    def plan(scene: Scene) -> None:
        if what.startswith("killed"):
            made.kill(node)
        elif what.startswith("cut"):
            made.plug(node, "nomaster")
        else:
            made.drain(ray_node)
        if what.endswith("back"):
            scene.wait(CUT_SECONDS)
            if what.startswith("killed"):
                made.start(node)
            else:
                made.plug(node, "master", "bridge")

    return plan


def inside(row: str, made: Cluster) -> Outcome:
    """The driver's part of a turn."""
    strategy, what, seconds = ROWS[row]
    try:
        with DistributedSGD(
            paced_creator(digits()[0], constant, STEP_SECONDS),
            num_workers=WORKERS,
            strategy=STRATEGIES[strategy],
            run_config=RunConfig(failure=FailureConfig(spares=0)),
        ) as trainer:
            hosts = trainer.foreach_worker(lambda view: view.host)
            addresses = [address for _, address in made.nodes]
            node = next(i for i in (1, 2) if hosts.count(addresses[i]) == 2)
            plan = strike(made, what, node, _ray_node(addresses[node]))
            watch = Watch(Case(plan, workers=WORKERS), 0, seconds)
            trainer.fit(steps=100_000, callbacks=[watch], progress=False)
    except EnoughError:
        pass
    except SteepestError as error:
        return Outcome(None, 0, type(error).__name__)
    if watch.failed is not None:
        return Outcome(None, 0, f"the plan failed: {watch.failed}")
    workers = "" if watch.workers == WORKERS else f" ({watch.workers} workers)"
    kinds = ", ".join(dict.fromkeys(watch.kinds)) + workers
    return Outcome(*progress(watch.heard, watch.began), kinds)


def _ray_node(address: str) -> str:
    import ray

    return next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == address)


def main() -> None:
    torch.set_num_threads(1)
    row, about = json.loads(sys.stdin.read())
    nodes = tuple((name, address) for name, address in about.pop("nodes"))
    print(json.dumps(asdict(inside(row, Cluster(nodes, **about)))), flush=True)
    os._exit(0)  # Ray would wait for the node that is gone


if __name__ == "__main__":
    main()
