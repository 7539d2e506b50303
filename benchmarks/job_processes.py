"""The processes of a job on this machine, by the names that `ps` shows them under. Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from benchmarks.soak_samples import descends

PREFIX = b"ray::steepest "
RAYLET = b"RAY_RAYLET_PID="
WAIT_SECONDS = 60.0
LOOK_SECONDS = 0.005


def processes(root: int | None = None) -> dict[str, int]:
    """The living processes of jobs whose raylet descends from a process, by default from this one.

    Returns:
        Process ids by name: "worker 0", "server 1", "spare".
    """
    return {name: pid for pid, name in all_processes(root).items()}


def all_processes(root: int | None = None) -> dict[int, str]:
    """The same by process id; those of several jobs may have one name."""
    parents: dict[int, int] = {}
    found: dict[int, tuple[str, int]] = {}  # by process: its name, and its raylet
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(stat[1])
            if command.startswith(PREFIX) and stat[0] not in "XZ":
                name = command[len(PREFIX) :].strip(b"\0 ").decode()
                found[int(entry.name)] = (name, _raylet(entry))
    root = os.getpid() if root is None else root
    return {pid: name for pid, (name, raylet) in found.items() if descends(raylet, root, parents)}


def _raylet(entry: Path) -> int:
    """The raylet that started a process; a worker may be a fork, which descends from no raylet."""
    for variable in (entry / "environ").read_bytes().split(b"\0"):
        if variable.startswith(RAYLET):
            return int(variable[len(RAYLET) :])
    return -1


def kill(*names: str, number: signal.Signals = signal.SIGKILL) -> dict[str, int]:
    """Sends a signal to processes of this process' jobs, to all of them at once; returns their ids.

    Raises:
        KeyError: there is no such process.
    """
    found = processes()
    victims = {name: found[name] for name in names}
    for pid in victims.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return victims


def successor(name: str, pid: int) -> int:
    """Waits until another process has a name; returns its id.

    Raises:
        TimeoutError: there was none within a minute.
    """
    end = time.monotonic() + WAIT_SECONDS
    while (found := processes().get(name, pid)) == pid:
        if time.monotonic() > end:
            raise TimeoutError(f"{name}: no successor within {WAIT_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    return found
