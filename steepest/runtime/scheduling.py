"""How the system's scheduler treats a thread that computes."""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """Let this thread take its turn when it is woken, instead of interrupting the one that woke it.

    Where processors are fewer than processes, a server that sends weights to a worker on its own
    processor would be interrupted for milliseconds by that worker's step, and the other workers
    would wait. On Linux this is the policy SCHED_BATCH, see sched(7). A thread with another policy
    than the usual one keeps it; elsewhere nothing happens.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
