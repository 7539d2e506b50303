"""Where a process runs, its last lines of output, and its use of processors."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steepest.runtime.job_runtime import CallError, runtime

_LINES = 12  # of a dead process
#: Of a process' output, that are kept, or read of its log file.
MOST_LINES = 200
_TAIL_BYTES = 1 << 18  # of a log file, in which its last lines are looked for
_STOPPED = "TtXZ"  # stopped, traced, dead, defunct
_STATES = {
    "R": "computes, or waits for a processor",
    "S": "sleeps",
    "D": "waits for a disk or a file system",
    "T": "is stopped by a signal",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
}
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Place:
    """Where a process runs."""

    node: str  # Ray's id
    host: str  # IP address
    pid: int
    logs: tuple[str, ...]  # paths, on its node, of the files that hold what it printed
    # when it began, see `began`: a later process may have the same pid. None if the kernel does not tell
    began: int | None = None


def kill(place: Place, actor: Any) -> None:
    """Kill a process, even if it is stopped or unreachable."""
    if place.node == runtime().node and place.began in (None, began(place.pid)):
        runtime().kill(place.pid)  # Ray's word reaches no stopped process
    runtime().end(actor)


def began(pid: int) -> int | None:
    """Return when a process of this node began, in ticks since the node did; None: it is gone, or there is no /proc."""
    try:
        return int(_fields(Path(f"/proc/{pid}/stat"))[19])
    except OSError:
        return None


def seconds_up(place: Place) -> float | None:
    """Return for how many seconds a process of this node has run; None if the kernel does not tell."""
    if place.began is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - place.began / _TICKS


def last_lines(paths: tuple[str, ...], count: int = MOST_LINES) -> list[str]:
    """Return the last lines of log files, without Ray's own marks; a missing file has none."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            begin = max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0)
            file.seek(begin)
            tail = file.read(_TAIL_BYTES).decode(errors="replace").splitlines()
            whole = tail[1:] if begin else tail  # the first one may lack its beginning
            kept = [line.rstrip() for line in whole if not line.startswith(":")]
            lines += [line for line in kept[-count:] if line]
    return lines[-count:]


def fetch_last_lines(place: Place, count: int = _LINES) -> list[str]:
    """Return the last lines of output of a process, or why they cannot be read."""
    try:
        return runtime().last_lines(place.node, place.pid, place.logs)[-count:]
    except CallError as error:
        return [f"(its log cannot be read: {str(error).splitlines()[0]})"]


def processor_use(pid: int) -> tuple[float, bool] | None:
    """Return the use of processors by a process of this node; None if it is stopped or gone. Any thread may call this.

    Returns:
        The seconds of processor time that it has used, and whether one of its threads computes or waits
        for a processor now. If many processes share one, a computing process may get little time.
    """
    try:
        state, *fields = _fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    if state in _STOPPED:
        return None
    seconds = (int(fields[10]) + int(fields[11])) / _TICKS
    return seconds, any(map(_is_runnable, Path(f"/proc/{pid}/task").glob("*/stat")))


def show_command(name: str) -> None:
    """Show this process in `top` under a name of up to 15 characters; nothing happens where there is no /proc."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def processor_wait() -> float:
    """Return the seconds for which this process' threads that live have waited for a processor; 0 if it is unknown."""
    waited = 0
    for stat in Path("/proc/self/task").glob("*/schedstat"):
        # the thread has ended, or the kernel does not count
        with contextlib.suppress(OSError, IndexError):
            waited += int(stat.read_text().split()[1])
    return waited * 1e-9


def processor_state(pid: int) -> str:
    """Return the kernel's state of a process of this node, in words; any thread may call this."""
    try:
        state = _fields(Path(f"/proc/{pid}/stat"))[0]
    except OSError:
        return "is gone" if Path("/proc/self/stat").exists() else ""
    return _STATES.get(state, f"is in state {state}")


def _is_runnable(stat: Path) -> bool:
    try:
        return _fields(stat)[0] == "R"
    except OSError:  # the thread has ended
        return False


def _fields(stat: Path) -> list[str]:
    """Return the fields after the name: the state first."""
    return stat.read_text().rpartition(")")[2].split()
