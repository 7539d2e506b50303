"""What tests of Spark run, in a process of its own; each line that begins with FOUND is a finding.

With "command" and arguments it is the `steepest` command.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from pyspark.sql import SparkSession
from ray.util.spark import cluster_init
from torch import nn

from steepest import (
    Callback,
    DistributedSGD,
    FailureConfig,
    ParameterServerStrategy,
    RunConfig,
    StepResult,
    TorchModel,
)
from steepest.cli.main import main
from steepest.data.spark import ParquetRows, from_dataframe
from steepest.places.spark import cluster

psutil: Any = importlib.import_module("psutil")  # which Ray brings along

ROWS = 96  # divides by the samples of a step of 1 or 2 workers
BATCH = 4
BEGAN = time.monotonic()
ROOT = Path(__file__).parents[2]


def found(name: str, value: Any) -> None:
    sys.stdout.write(f"FOUND {json.dumps([name, value])}\n")
    sys.stdout.flush()
    sys.stderr.write(f"{time.monotonic() - BEGAN:6.1f} s  {name}\n")


def wait_no_longer_than_needed() -> None:
    """Have Ray on Spark look whether its nodes have started; it would sleep for 23 s."""
    for name, value in {
        # asked once, after the sleep, whether the head node has started
        "is_port_in_use": lambda host, port: cluster_init._wait_service_up(host, port, 60),
        "_RAY_HEAD_STARTUP_TIMEOUT": 0,
        "_RAY_CLUSTER_STARTUP_PROGRESS_CHECKING_INTERVAL": 0.5,
    }.items():
        assert hasattr(cluster_init, name)
        setattr(cluster_init, name, value)


def new_session(master: str) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("steepest-tests")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.sql.shuffle.partitions": "2",
        "spark.executorEnv.PYTHONPATH": str(ROOT),
        # Ray starts one node of a machine after the other, and waits 10 s between them
        "spark.executorEnv.RAY_ON_SPARK_RAY_WORKER_NODE_STARTUP_INTERVAL": "1",
    }.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


class Visits(nn.Module):
    """With a learning rate of as many samples as an update has, a row's weight counts its commits."""

    def __init__(self) -> None:
        super().__init__()
        self.visits = nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.visits[features[:, 0].long()]


def counting(data: ParquetRows, workers: int) -> Callable[[int, int], TorchModel]:
    def create(worker_index: int, device_index: int) -> TorchModel:
        return TorchModel(
            Visits(),
            loss=lambda output, target: -output.mean(),
            data=data,
            batch_size=BATCH,
            optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=float(BATCH * workers)),
        )

    return create


# -- what is looked at ----------------------------------------------------------------------------------


def join_without_token(address: str) -> Callable[[int], tuple[bool, int, str]]:
    """A Spark task that starts a raylet as anybody could who reaches the cluster."""

    def join(_: int) -> tuple[bool, int, str]:
        with tempfile.TemporaryDirectory(dir="/tmp") as home:
            bare = {name: value for name, value in os.environ.items() if "RAY_AUTH" not in name}
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=1"]
            ended = subprocess.run(
                [*command, f"--address={address}", "--temp-dir", home, "--block"],
                env=bare | {"RAY_AUTH_MODE": "disabled", "HOME": home},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        return "RAY_AUTH_TOKEN" in os.environ, ended.returncode, ended.stdout + ended.stderr

    return join


def shown(token: str, folder: Path) -> list[str]:
    """The command lines and the files of Ray in which a text is seen."""
    seen = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        seen += [line] if token in line else []
    logs = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.name.startswith("raylet") for path in logs)
    return seen + [str(path) for path in logs if token.encode() in path.read_bytes()]


def executor_of(pid: int) -> int:
    """The Spark executor that has started, by Ray, this process."""
    for process in psutil.Process(pid).parents():
        if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
            return process.pid
    raise LookupError(f"process {pid} belongs to no executor")


def worker_pids() -> Iterator[int]:
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command and command[0].startswith("ray::steepest worker"):
            try:
                executor_of(process.pid)
            except (LookupError, psutil.Error):
                continue  # of another test's Ray
            yield process.pid


# -- what is run ------------------------------------------------------------------------------------------


def write_a_frame(session: SparkSession, folder: Path) -> ParquetRows:
    """Write a frame's rows to files, and read them here."""
    frame = session.range(ROWS).selectExpr("id", "array(id, -id) as pair", "id * 2 as y")
    shuffled = frame.repartition(5).orderBy("pair").repartition(3)
    settings: dict[str, Any] = {"features": ["id", "pair"], "target": "y"}
    data = from_dataframe(shuffled, directory=folder / "rows", rows_per_block=10, **settings)
    again = ParquetRows(folder / "rows", **settings)
    found("blocks", [data.blocks, again.blocks])
    (x, y) = next(data.open([torch.arange(ROWS).numpy()]))
    expected = sorted([i, i, -i, 2 * i] for i in range(ROWS))
    found("rows", sorted([*a, b] for a, b in zip(x.tolist(), y.tolist(), strict=True)) == expected)
    return data


def visits(sgd: DistributedSGD) -> list[float]:
    """The numbers of commits that a row has."""
    counted: list[float] = sgd.weights()["visits"].round().unique().tolist()
    return counted


def train_on_rows(data: ParquetRows) -> None:
    """An epoch with one worker, then one with two."""
    for workers in (1, 2):
        with DistributedSGD(counting(data, workers), num_workers=workers) as sgd:
            sgd.fit(epochs=1, progress=False)
            found(f"visits with {workers}", visits(sgd))


SURVIVING: dict[str, Any] = {
    "num_workers": (1, 2),
    "strategy": ParameterServerStrategy(replication=2),
    "run_config": RunConfig(failure=FailureConfig(max_failures=8)),
    "global_batch_size": 8,
}


class Kill(Callback):
    """Kills, once, a Spark executor in which a worker computes."""

    done = 0

    def on_step(self, sgd: Any, result: StepResult) -> None:
        if result.step >= 3 and not self.done:
            self.done += 1
            os.kill(executor_of(next(worker_pids())), signal.SIGKILL)


def survive_an_executor(data: ParquetRows) -> None:
    """An epoch, in which an executor is killed in which a worker computes."""
    kill = Kill()
    with DistributedSGD(counting(data, 2), **SURVIVING) as sgd:
        sgd.fit(epochs=1, progress=False, callbacks=[kill])
        found("killed", kill.done)
        found("visits after a death", visits(sgd))


def resume(data: ParquetRows, place: Path) -> None:
    """An epoch, of which another trainer makes the rest."""
    with DistributedSGD(counting(data, 2), **SURVIVING) as sgd:
        sgd.fit(steps=5, progress=False)
        sgd.save(place)
    with DistributedSGD(counting(data, 2), **SURVIVING) as sgd:
        sgd.restore(place)
        sgd.fit(steps=ROWS // 8 - 5, progress=False)
        found("visits after a resume", visits(sgd))


def on_executors(directory: str, *, all_of_it: bool = False) -> None:
    """What needs executors, on three of them, of which two have Ray nodes."""
    session = new_session("local-cluster[3,1,1024]")
    token = os.environ["RAY_AUTH_TOKEN"] = os.environ.pop("TESTS_TOKEN")  # after Spark has begun
    folder = Path(tempfile.mkdtemp(dir=directory))
    settings: dict[str, Any] = {"memory_per_worker": 700 << 20, "directory": directory}
    try:
        with cluster(session, workers=2, **settings):
            (root,) = Path(directory).glob("s-*")
            cpus = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
            found("cpus", sorted(cpus))
            data = write_a_frame(session, folder)
            if all_of_it:
                train_on_rows(data)
                resume(data, folder / "checkpoints")
            survive_an_executor(data)
            found("shown", shown(token, root))
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
    except SystemExit as terminated:
        found("ended with", terminated.code)
    roots = [path.name for path in Path(directory).glob("s-*")]
    found("after", [ray.is_initialized(), os.environ.get("RAY_ADDRESS"), roots])
    found("still computes", session.range(10).count())
    session.stop()


def interrupted(directory: str) -> None:
    """Gets Ctrl-C while Ray starts; the session goes on after it, and Ray starts again."""
    session = new_session("local[1]")
    settings: dict[str, Any] = {"memory_per_worker": 500 << 20, "directory": directory}
    try:
        with cluster(session, workers=1, **settings):
            found("started", True)
    except KeyboardInterrupt:
        found("left", [path.name for path in Path(directory).glob("s-*")])
        found("still computes", session.range(10).count())
    with cluster(session, workers=1, **settings):
        found("cpus", sorted(n["Resources"].get("CPU", 0) for n in ray.nodes() if n["Alive"]))
    session.stop()


if __name__ == "__main__":
    wait_no_longer_than_needed()
    if sys.argv[1] == "command":
        sys.exit(main(sys.argv[2:]))
    run = {
        "on_executors": on_executors,
        "all_on_executors": partial(on_executors, all_of_it=True),
        "interrupted": interrupted,
    }
    run[sys.argv[1]](sys.argv[2])
