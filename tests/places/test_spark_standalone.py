"""A standalone Spark cluster at spark://: master, workers and executors are processes; run by make test-full."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.network_namespaces import until
from tests.places.spark_runs import PROGRAM as COMMAND
from tests.places.spark_runs import (
    ROOT,
    SECONDS,
    directory,
    environment,
    found,
    left,
    needs_spark,
)

__all__ = ["directory"]
pytestmark = needs_spark
PROGRAM = str(ROOT / "tests" / "places" / "spark_standalone_program.py")
LOCAL = "127.0.0.1"
SETTINGS = f"""
spark.authenticate true
spark.authenticate.secret {secrets.token_hex(16)}
spark.network.crypto.enabled true
spark.ui.enabled false
spark.driver.memory 512m
spark.executor.memory 512m
"""


@pytest.fixture(autouse=True)
def _deadline() -> None:
    """Let a test take longer than others may: its program has a deadline of its own."""


class Standalone:
    """A master and two workers of two cores each, which pyspark alone brings along."""

    def __init__(self, folder: Path, ending: ExitStack) -> None:
        self.folder, self.ending = folder, ending
        settings = folder / "spark-defaults.conf"  # as the machines of a cluster have it
        settings.touch(mode=0o600)
        settings.write_text(SETTINGS)
        paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
        self.environment = environment(
            PYTHONPATH=paths,
            SPARK_CONF_DIR=str(folder),
            SPARK_LOCAL_IP=LOCAL,
            SPARK_DAEMON_MEMORY="256m",
            RAY_AUTH_MODE="token",
            HOME=str(folder),  # without a token
        )
        master = self.start("master.Master", "--host", LOCAL, "--port", "0", "--webui-port", "0")
        said = until(master.stdout, "Starting Spark master at spark://")
        self.address = said.split("Starting Spark master at ")[1].split()[0]
        self.workers = [
            self.start("worker.Worker", *("--cores", "2", "--memory", "2g"), "--webui-port", "0",
                       *("--host", LOCAL, "--work-dir", str(folder / f"worker{i}")), self.address)
            for i in range(2)
        ]  # fmt: skip

    def start(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """Starts a daemon of Spark's; it writes some lines for each executor, which a pipe holds."""
        command = str(Path(sys.executable).with_name("spark-class"))
        process = subprocess.Popen(
            [command, f"org.apache.spark.deploy.{name}", *arguments],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.ending.enter_context(process)
        self.ending.callback(process.terminate)
        return process


@pytest.fixture(scope="module")
def cluster() -> Iterator[Standalone]:
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder, ExitStack() as ending:
        yield Standalone(Path(folder), ending)


@pytest.mark.full  # test_spark_executors.py has executors, also of a standalone cluster, within one JVM
def test_three_workers_by_the_command_equal_one_process(
    cluster: Standalone, directory: str
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, COMMAND, "command", "launch", "spark", PROGRAM),
            *("--master", cluster.address, "--workers", "3", "--memory", "700m"),
            *("--directory", directory, f"--arguments={directory}"),
        ],
        env=cluster.environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = found(done.stdout)
    assert seen["cpus"] == [0, 1, 1, 1]
    assert seen["workers' nodes, executors, daemons"] == [3, 2, 2]
    assert seen["workers with the token"] == 3
    assert seen["steps"] == 10
    assert seen["difference from one process"] <= 1e-12
    assert seen["joined without a token"] == [False, False, True]
    assert seen["shown"] == []
    assert left(directory) == []
