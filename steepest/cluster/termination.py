"""SIGTERM to the driver: schedulers, Kubernetes and spot machines send it before they kill."""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from types import FrameType

from steepest.cluster.ray_private import is_drivers_sigterm_handler

#: The exit status of a program that SIGTERM has ended, as shells and schedulers know it.
EXIT_STATUS = 128 + signal.SIGTERM
#: For so long a repeated signal does not cut short what the first one began.
_ENDING_SECONDS = 30.0

_began = -math.inf  # when the process last began to end, of `time.monotonic`


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, with exit status 143.

    `SystemExit` is raised in the main thread, so that `with` blocks are left and `fit` writes its
    last checkpoint. Ray's own handler does the same with exit status 15, by which no scheduler
    knows the signal. Only that handler is replaced: a user's own stays, and so does that of Ray's
    workers. On other threads than the main one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if is_drivers_sigterm_handler(signal.getsignal(signal.SIGTERM)):
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """End the process, unless it began to end a moment ago.

    A notebook catches `SystemExit` and goes on: a later signal ends it like the first one.
    """
    global _began
    if (now := time.monotonic()) - _began >= _ENDING_SECONDS:
        _began = now
        sys.exit(EXIT_STATUS)
