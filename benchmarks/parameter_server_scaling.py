"""What ``python -m benchmarks.parameter_server --scaling`` reports: steepest alone, workers by servers.

CPU time and memory are read from /proc, of this process and all below it: Ray's daemons and actors.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.overhead import deadline
from benchmarks.parameter_server_rivals import VECTOR_BYTES, expect, kill, ray_started
from benchmarks.rivals import DEADLINE

SCALING = (1, 2, 4, 8)


@ray.remote(num_cpus=0)
class Pusher:
    """A worker that pushes ones, and pulls into memory of its own."""

    def __init__(self, server: Any) -> None:
        torch.set_num_threads(1)
        self._server = server
        self._update = np.ones(VECTOR_BYTES // 4, dtype=np.float32)
        self._out = np.zeros_like(self._update)

    def bytes_sent(self) -> int:
        return int(self._server._connection()._router.transport.bytes_sent)

    def push_pull(self, rounds: int) -> float:
        for _ in range(rounds):
            self._server.push_pull(self._update, out=self._out)
        return float(self._out[-1])


@dataclass(frozen=True)
class Usage:
    """What the processes of this job have used so far, of time and memory, by process id."""

    cpu: dict[int, float]
    peak: dict[int, int]

    @classmethod
    def now(cls) -> Usage:
        pids = family(os.getpid())
        cpu = {pid: seconds for pid in pids if (seconds := cpu_seconds(pid)) is not None}
        return cls(cpu, {pid: size for pid in pids if (size := peak_bytes(pid)) is not None})

    def cpu_since(self, before: Usage) -> float:
        return sum(seconds - before.cpu.get(pid, 0.0) for pid, seconds in self.cpu.items())


def stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat that follow the name, which may hold anything; None when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def family(root: int) -> set[int]:
    """A process and all that descend from it: Ray, started by this process, is below it."""
    known = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    parent = {pid: int(fields[1]) for pid in known if (fields := stat(pid)) is not None}
    found, new = {root}, {root}
    while new:
        new = {pid for pid, above in parent.items() if above in new} - found
        found |= new
    return found


def cpu_seconds(pid: int) -> float | None:
    fields = stat(pid)
    return (
        None if fields is None else (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    )


def peak_bytes(pid: int) -> int | None:
    """VmHWM since the last `forget_peaks`; None when the process has ended, or is a zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return None


def forget_peaks() -> None:
    """Begin the peaks of all processes of this job anew, at what they hold now."""
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def actors() -> dict[int, str]:
    """The titles of Ray's processes that are not idle: ``ray::Class``, or ``ray::Class.method`` at work."""
    found = {}
    for pid in family(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            if title.startswith("ray::") and "IDLE" not in title:
                found[pid] = title
    return found


def bytes_pulled(server: Any) -> int:
    """Bytes of payload that have left the servers so far, as they count them."""
    counters = ray.get(
        [actor.counters.remote() for actor in server._access.servers.handles], timeout=DEADLINE
    )
    return sum(counter["bytes_sent"] for counter in counters)


def bytes_pushed(pushers: list[Any]) -> int:
    """Bytes of payload that have left the workers so far, as they count them."""
    return sum(ray.get([pusher.bytes_sent.remote() for pusher in pushers], timeout=DEADLINE))


def report_scaling(rounds: int) -> None:
    """Measure each configuration with fresh servers and workers; one line for each: more workers, then more servers."""
    from steepest import ParameterServer

    print(
        "steepest alone: all workers push_pull 100 MB of float32 at once; CPU time of all "
        "processes, Ray's too;"
    )
    print(
        "a MB is one of the update, pushed and pulled; peaks are of the largest actor of each kind "
        "(VmHWM)"
    )
    heads = (
        ("workers", 8),
        ("servers", 8),
        ("s/round", 10),
        ("CPU ms/MB", 11),
        ("worker MB", 11),
        ("server MB", 11),
    )
    print(
        "".join(f"{head:>{width}}" for head, width in heads) + f"{'MB moved/push':>15}", flush=True
    )
    with ray_started(1):  # no actor here reserves a CPU
        cross = [(workers, 2) for workers in SCALING] + [
            (2, servers) for servers in SCALING if servers != 2
        ]
        for workers, servers in cross:
            with deadline(f"{workers} workers, {servers} servers"):
                print(scaling_line(ParameterServer, workers, servers, rounds), flush=True)


def scaling_line(make: Callable[..., Any], workers: int, servers: int, rounds: int) -> str:
    others = actors()  # Ray's agents look like actors
    server = make(np.zeros(VECTOR_BYTES // 4, dtype=np.float32), num_servers=servers)
    pushers = []
    try:
        pushers = [Pusher.remote(server) for _ in range(workers)]

        def push(count: int) -> list[float]:
            return ray.get([pusher.push_pull.remote(count) for pusher in pushers], timeout=DEADLINE)

        push(1)
        forget_peaks()
        moved = bytes_pulled(server) + bytes_pushed(pushers)
        before, begin = Usage.now(), time.perf_counter()
        last = push(rounds)
        seconds, after = time.perf_counter() - begin, Usage.now()
        moved = bytes_pulled(server) + bytes_pushed(pushers) - moved
        kinds = {
            pid: "worker" if "Pusher" in title else "server"
            for pid, title in actors().items() - others.items()
        }
        expect("steepest", max(last), workers * (rounds + 1))
    finally:
        kill(*pushers)
        server.shutdown()
    pushes = workers * rounds
    cpu = 1000 * after.cpu_since(before) / (pushes * VECTOR_BYTES / 1e6)
    peaks = [
        max((after.peak.get(pid, 0) for pid, its in kinds.items() if its == kind), default=0)
        for kind in ("worker", "server")
    ]
    cells = f"{workers:8}{servers:8}{seconds / rounds:10.3f}{cpu:11.3f}"
    cells += "".join(f"{peak / 1e6:11.0f}" for peak in peaks)
    return cells + f"{moved / pushes / 1e6:15.1f}"
