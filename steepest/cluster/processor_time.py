"""How much a process computes, as the kernel of its node sees it: a busy process is no dead one."""

from __future__ import annotations

import os
from pathlib import Path

_STOPPED = "TtXZ"  # stopped, traced, dead, defunct
_TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> float | None:
    """Return the processor time that a process of this node has used; None if it can use no more.

    That is so when it is stopped, defunct or gone. May be called on any thread.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in _STOPPED else (int(fields[10]) + int(fields[11])) / _TICKS
