"""What a host of a SageMaker job runs: a Ray node, and on the leader the program; nothing outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from steepest.errors import ConfigurationError, DeadlineError, PeerLostError

_RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
_NODES = (sys.executable, "-c", "from steepest.places.sagemaker_nodes import main; main()")
_STOP_SECONDS = 5.0  # that a Ray node has to end by itself
_SWEEP_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
_KEPT = 4096  # bytes of a program's errors
_PR_SET_CHILD_SUBREAPER = 36


class RayNode:
    """A Ray node of this host, as a child process, with its files in a directory, and Ray's token in its variables."""

    # arguments: of `ray start`, beside those that every node has.

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> None:
        self._environment = {k: v for k, v in environment.items() if k != "RAY_ADDRESS"}
        self._said = directory / "ray-start.txt"
        own = (f"--temp-dir={directory / 'ray'}", "--disable-usage-stats", "--block")
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*_RAY, "start", *arguments, *own],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def require_alive(self) -> None:
        """Raise PeerLostError, with the end of what it said, if the node has ended."""
        if (status := self._process.poll()) is not None:
            raise PeerLostError(
                f"the Ray node of this host ended with status {status}: {self._end()}"
            )

    def _end(self) -> str:
        """Return the end of what `ray start` said."""
        text = self._said.read_text(errors="replace").strip() if self._said.exists() else ""
        return text[-600:]

    def wait_until_open(self, address: str, port: int, deadline: float) -> None:
        """Return when a head node takes connections; PeerLostError: it ended; DeadlineError: by `time.monotonic`."""
        while True:
            self.require_alive()
            try:
                socket.create_connection((address, port), _CONNECT_SECONDS).close()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"Ray did not open {address}:{port} in time ({error}): {self._end()}"
                    ) from None
                time.sleep(_LOOK_SECONDS)
            else:
                return

    def stop(self) -> None:
        """End the node, by force if it takes long."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class NodeWatch:
    """A process that asks Ray which hosts have joined, and ends well when all have."""

    def __init__(self, hosts: Sequence[str], environment: Mapping[str, str], directory: Path):
        self._hosts = hosts
        self._said = directory / "nodes.txt"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [*_NODES, *hosts],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def all_there(self) -> bool:
        """Return whether all hosts have joined; PeerLostError: Ray did not answer; with what the process said."""
        status = self._process.poll()
        if status:
            raise PeerLostError(f"Ray does not say which hosts have joined: {self._text()[-600:]}")
        return status == 0

    def _text(self) -> str:
        return self._said.read_text(errors="replace").strip()

    def missing(self) -> list[str]:
        """Return the hosts that have not joined, as far as is known."""
        told = [line for line in self._text().splitlines() if line.startswith("missing: ")]
        return told[-1].removeprefix("missing: ").split() if told else list(self._hosts)

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Program:
    """The user's program, whose standard error passes through, and whose last lines are kept."""

    # It has a session of its own, so that it gets signals from this process alone.

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = Path(command[1] if command[0] == sys.executable else command[0]).name
        self._process = subprocess.Popen(
            command, env=dict(environment), stderr=subprocess.PIPE, start_new_session=True
        )
        self._tail = b""
        self._pump = threading.Thread(target=self._pass_on, name="steepest errors", daemon=True)
        self._pump.start()

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            while data := os.read(errors.fileno(), 1 << 16):
                self._tail = (self._tail + data)[-_KEPT:]
                with contextlib.suppress(OSError):  # nobody reads this process' errors any more
                    os.write(2, data)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Return its exit status, 128 + n after signal n; None if it runs on after `seconds`."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return 128 - status if status < 0 else status

    def kill(self) -> None:
        """End it at once, if it lives."""
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        """Return the end of what it wrote to standard error."""
        self._pump.join(2.0)
        return self._tail.decode("utf-8", "replace").strip()


def command_of(program: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a program: with this Python if its name ends with .py."""
    # ConfigurationError: no such file.
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise ConfigurationError(
                f"{program}: no such file in {Path.cwd()}; give a script that the image has, or "
                "that SageMaker has put into the folder of the code"
            )
        return [sys.executable, program, *arguments]
    found = shutil.which(program)
    if found is None:
        raise ConfigurationError(f"{program}: give a Python script or a command that can be run")
    return [found, *arguments]


def adopt_orphans() -> None:
    """Let descendants whose parents die become children of this process, as PID 1 has it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill all processes that descend from this one; return when they are gone."""
    deadline = time.monotonic() + _SWEEP_SECONDS
    while (left := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_LOOK_SECONDS / 10)


def _descendants(ancestor: int) -> list[int]:
    parents = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                # the name in parentheses may hold anything
                rest = (directory / "stat").read_text(errors="replace").rpartition(")")[2]
                parents[int(directory.name)] = int(rest.split()[1])
    found: list[int] = []
    ancestors = {ancestor}
    while ancestors:
        ancestors = {pid for pid, parent in parents.items() if parent in ancestors}
        found += ancestors
    return found
