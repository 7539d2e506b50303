"""Programs that start or join a Ray of their own on this host, and the check that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MARK = "STEEPEST_TEST_MARK"
SECONDS = 120.0
#: Agents of a Ray whose raylet was killed ask for its control store for 60 s before they end.
AGENTS_SECONDS = 150.0
HEAD = """
import faulthandler, os, sys
import ray
from steepest import Callback, DistributedSGD
from steepest.errors import ResourcesError
from steepest.testing import InProcessCluster, linear_model_creator

faulthandler.dump_traceback_later(100)  # a program that hangs says where

def train(strategy="ps", **settings):
    with DistributedSGD(linear_model_creator(), num_workers=2, strategy=strategy, **settings) as sgd:
        sgd.fit(steps=5, progress=False)
        return sgd.weights()

def check(weights):
    again = InProcessCluster(linear_model_creator(), num_workers=2)
    again.step(5)
    assert all(bool((weights[name] == value).all()) for name, value in again.weights().items())

"""
FORK = "from tests.forked_workers import fork_workers; fork_workers()\n"


class Place:
    """Runs programs whose processes, and all that they start, carry a mark; Ray keeps its files to itself."""

    def __init__(self) -> None:
        self.directory = Path(
            tempfile.mkdtemp(prefix="sp-", dir="/tmp")
        )  # sockets want a short path
        self.mark = secrets.token_hex(8)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        self.environment |= {"HOME": str(self.directory), "RAY_TMPDIR": str(self.directory)}
        self.environment |= {MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Starts a program as leader of a process group of its own, as a shell does."""
        return subprocess.Popen(
            command, cwd=self.directory, env=self.environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, *command: str, status: Sequence[int] = (0,)) -> str:
        """Runs a program that must end with one of these statuses; returns what it printed."""
        with self.start(*command) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
                output, _ = process.communicate()
                pytest.fail(f"still running after {SECONDS:g} s:\n{output}")
        assert process.returncode in status, output
        return output

    def script(self, body: str, *, forked: bool = True) -> str:
        """Writes a Python program; returns its path. Workers of the clusters that it starts may be forks."""
        path = self.directory / "program.py"
        path.write_text(HEAD + (FORK if forked else "") + textwrap.dedent(body))
        return str(path)

    def python(self, body: str) -> str:
        """Runs a Python program that must end well."""
        return self.run(sys.executable, self.script(body))

    def left(self) -> dict[int, str]:
        """Command lines of the living processes that carry the mark."""
        found = {}
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (directory / "environ").read_bytes():
                        command = (
                            (directory / "cmdline")
                            .read_bytes()
                            .replace(b"\0", b" ")
                            .decode(errors="replace")
                        )
                        found[int(directory.name)] = command[:200]
        return found

    def left_after(self, seconds: float) -> dict[int, str]:
        """Those that do not end in time."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                descriptor = os.pidfd_open(next(iter(left)))
                select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))
                os.close(descriptor)
        return left

    def kill(self) -> None:
        """Kills all of them."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    try:
        yield place
        assert place.left_after(AGENTS_SECONDS) == {}
    finally:
        place.kill()
        shutil.rmtree(place.directory, ignore_errors=True)


def signalled(
    place: Place, program: str, number: signal.Signals, *, everybody: bool
) -> tuple[int, str]:
    """Runs a program until it prints "training", then signals it; its exit status and what it printed.

    Args:
        everybody: whether all of its process group get the signal.
    """
    with place.start(sys.executable, program) as process:
        try:
            assert process.stdout is not None
            printed = []
            for line in process.stdout:
                printed.append(line)
                if line == "training\n":
                    break
            assert process.poll() is None, "".join(printed)
            (os.killpg if everybody else os.kill)(process.pid, number)
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            place.kill()
            output, _ = process.communicate()
            pytest.fail("it did not end:\n" + "".join(printed) + output)
        finally:
            if process.poll() is None:
                place.kill()
    return process.returncode, "".join(printed) + output
