"""What processes hold, read from /proc, and whether it grows. Linux only."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

MIB = 1 << 20
SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Holding:
    """What one process holds in one moment.

    Attributes:
        memory: resident, in MiB.
        threads, files, sockets: their numbers; a socket is a file too.
    """

    memory: float
    threads: int
    files: int
    sockets: int


@dataclass(frozen=True)
class Place:
    """What is left on the machine: files in /dev/shm, and Ray's processes for workers, busy or idle."""

    shared: int
    processes: int


@dataclass(frozen=True)
class Log:
    """What the driver logged in one bout: lines, and KiB of them."""

    lines: int
    text: float


Sample = Holding | Place | Log

#: By how much the median of a process' last third of samples may exceed that of its first. Memory
#: moves by itself: free lists of Python and of the C library fill, and Ray keeps what it knows of
#: the dead.
BOUNDS = {"memory": 16, "threads": 2, "files": 4, "sockets": 4, "shared": 2, "processes": 2}
BOUNDS |= {"lines": 6, "text": 3}
LEAST_SAMPLES = 6


def holding(pid: int) -> Holding | None:
    """What a process holds; None when it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = os.listdir(f"/proc/{pid}/fd")
        links = [link for number in descriptors if (link := _target(pid, number)) is not None]
        return Holding(
            pages * os.sysconf("SC_PAGE_SIZE") / MIB,
            len(os.listdir(f"/proc/{pid}/task")),
            len(links),
            sum(link.startswith("socket:") for link in links),
        )
    except (FileNotFoundError, ProcessLookupError):
        return None


def _target(pid: int, descriptor: str) -> str | None:
    """What a descriptor stands for; None for the one by which they were listed, and others that are closed by now."""
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")
    except (FileNotFoundError, ProcessLookupError):
        return None


def place(root: int) -> Place:
    """What is left on the machine, with the Ray processes that descend from one process."""
    parents: dict[int, int] = {}
    rays: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if (entry / "cmdline").read_bytes().startswith(b"ray::"):
                rays.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    files = sum(len(names) for _, _, names in os.walk(SHARED))
    return Place(files, sum(descends(pid, root, parents) for pid in rays))


def descends(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


@dataclass(frozen=True)
class Trend:
    """One number over a process' life: medians of the first and of the last third of its samples."""

    who: str
    what: str
    samples: int
    first: float
    last: float

    @property
    def grows(self) -> bool:
        return self.last - self.first > BOUNDS[self.what]


def trends(who: str, samples: Sequence[Sample]) -> list[Trend]:
    """Of everything in these samples; nothing where they are too few to tell."""
    if len(samples) < LEAST_SAMPLES:
        return []
    third = len(samples) // 3
    found = []
    for field in fields(samples[0]):
        values = [float(getattr(sample, field.name)) for sample in samples]
        first, last = statistics.median(values[:third]), statistics.median(values[-third:])
        found.append(Trend(who, field.name, len(values), first, last))
    return found


def trends_text(found: Sequence[Trend]) -> str:
    lines = [
        f"{'':34}{'':11}{'samples':>8}{'first third':>13}{'last third':>12}{'may grow by':>13}"
    ]
    for trend in found:
        bound = f"{BOUNDS[trend.what]}{' MiB' if trend.what == 'memory' else ''}"
        lines.append(
            f"{trend.who:34}{trend.what:11}{trend.samples:8}{trend.first:13.1f}{trend.last:12.1f}"
            f"{bound:>13}" + ("  GROWS" if trend.grows else "")
        )
    return "\n".join(lines)
