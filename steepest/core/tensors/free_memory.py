"""The memory that a process may still take, and a warning before it takes more."""

from __future__ import annotations

import logging
import re
from pathlib import Path

_MACHINE = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")

log = logging.getLogger("steepest")


def free_bytes(machine: Path = _MACHINE, group: Path = _GROUP) -> int | None:
    """Return how many bytes this process may take before the system kills a process; None if that is unknown.

    Args:
        machine: Linux' file of the machine's memory.
        group: the folder of the control group (version 2) that limits the process, if there is one, as in a container.
    """
    line = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(machine), re.MULTILINE)
    free = [int(line[1]) << 10] if line else []
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        files = re.search(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
        # pages of files that nobody uses count as used, and are given up first
        free.append(int(limit) - int(used) + (int(files[1]) if files else 0))
    return max(min(free), 0) if free else None


def warn_if_short(needed: int, what: str, advice: str, free: int | None) -> bool:
    """Log a warning if more bytes are needed than are free; return whether it did."""
    if free is None or needed <= free:
        return False
    log.warning(
        "%s takes %.1f GB, and %.1f GB are free here: the system may end this process or another one; %s",
        what, needed / 1e9, free / 1e9, advice,
    )  # fmt: skip
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
