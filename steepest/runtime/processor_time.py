"""How much a process computes, as the kernel of its node sees it: a busy process is no dead one."""

from __future__ import annotations

import os
from pathlib import Path

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


def processor_use(pid: int) -> tuple[float, bool] | None:
    """Return what a process of this node does with processors; None if it is stopped or gone. Any thread may ask.

    Returns:
        The seconds of processor time that it has used, and whether one of its threads computes or waits
        for a processor now. Where many processes share one, a computing process may be given little.
    """
    try:
        state, *fields = _fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    if state in _STOPPED:
        return None
    seconds = (int(fields[10]) + int(fields[11])) / _TICKS
    return seconds, any(map(_is_runnable, Path(f"/proc/{pid}/task").glob("*/stat")))


def processor_state(pid: int) -> str:
    """Return what the kernel says of a process of this node, in words; any thread may ask."""
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
