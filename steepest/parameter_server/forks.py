"""Whether this process was forked from one that was connected to Ray."""

from __future__ import annotations

import os
import sys

#: Whether it was: then it can call no actor.
_is_forked = False


def is_forked() -> bool:
    """Return whether this process was forked from one that was connected to Ray."""
    # It has servers' addresses then, and can connect to them, but Ray's threads are not in it.
    return _is_forked


def _note_fork() -> None:
    global _is_forked
    ray = sys.modules.get("ray")
    _is_forked = _is_forked or (ray is not None and ray.is_initialized())


os.register_at_fork(after_in_child=_note_fork)
