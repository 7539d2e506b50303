"""What process 1 of a container has to do, where that is pytest: wait for the orphans, as an init does.

A process that has ended stays, as a zombie, until its parent has waited for it, and Ray takes it to be alive: the
workers of a raylet that was killed would wait for it for ever, and so would a namespace of processes for its last one.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def leave_it_to_an_init() -> None:
    """Where this is process 1: return in a fork of it; process 1 waits for all that end, and ends as the fork does."""
    if os.getpid() != 1 or (child := os.fork()) == 0:
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    ended = 0
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
