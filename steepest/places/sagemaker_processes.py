"""What a host of a SageMaker job runs: a Ray node, and on the leader the program; nothing outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from steepest.errors import ConfigurationError, DeadlineError, PeerLostError

_RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
_SWEEP_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_KEPT = 4096  # bytes of a program's errors
_PR_SET_CHILD_SUBREAPER = 36


def start_ray(
    arguments: Sequence[str], environment: Mapping[str, str], directory: Path, deadline: float
) -> None:
    """Start a Ray node, whose files go into a directory, and return when it has joined.

    The node's processes are descendants of this one, see `adopt_orphans`.

    Raises:
        PeerLostError: it did not start; with the end of the output of `ray start`.
        DeadlineError: it did not start in time.
    """
    said = directory / "ray-start.txt"
    own = (f"--temp-dir={directory / 'ray'}", "--disable-usage-stats")
    try:
        with said.open("wb") as file:
            status = subprocess.run(
                [*_RAY, "start", *arguments, *own],
                env={name: value for name, value in environment.items() if name != "RAY_ADDRESS"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                check=False,
                timeout=max(0.0, deadline - time.monotonic()),
            ).returncode
    except subprocess.TimeoutExpired:
        raise DeadlineError(f"Ray did not start in time: {_end_of(said)}") from None
    if status:
        raise PeerLostError(f"Ray did not start, with status {status}: {_end_of(said)}")


def _end_of(said: Path) -> str:
    return said.read_text(errors="replace").strip()[-600:]


def ray_lives() -> bool:
    """Return whether this host's Ray node, started by `start_ray`, lives."""
    return "raylet" in _descendants(os.getpid()).values()


class SageMakerProgram:
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
    path = shutil.which(program)
    if path is None:
        raise ConfigurationError(f"{program}: give a Python script or a command that can be run")
    return [path, *arguments]


def adopt_orphans() -> None:
    """Let descendants whose parents die become children of this process, as of PID 1."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill all processes that descend from this one; return when they are gone."""
    deadline = time.monotonic() + _SWEEP_SECONDS
    while (left := _descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


def _descendants(ancestor: int) -> dict[int, str]:
    """Return the names of living descendants, by PID."""
    parents, names = {}, {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with contextlib.suppress(OSError):
                # the name in parentheses may hold anything
                name, _, rest = (directory / "stat").read_text(errors="replace").rpartition(")")
                state, parent, *_ = rest.split()
                if state not in "ZX":
                    pid = int(directory.name)
                    parents[pid], names[pid] = int(parent), name.partition("(")[2]
    descendants: dict[int, str] = {}
    ancestors = {ancestor}
    while ancestors:
        ancestors = {pid for pid, parent in parents.items() if parent in ancestors}
        descendants |= {pid: names[pid] for pid in ancestors}
    return descendants
