"""SIGUSR1 to the driver: what each process is doing is printed, and everything goes on."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import weakref
from pathlib import Path
from types import FrameType

from steepest.runtime.activity import Watched, report

_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_printing = threading.Lock()
_installed_in = 0  # the process; a forked child has its parent's handler too


def report_on_sigusr1(context: Watched) -> None:
    """Have SIGUSR1 print to stderr what the processes of a job are doing, as long as the job is there.

    A thread of its own does so; nothing else of this process changes. A user's own handler stays:
    one of `signal.signal`, and one in C, such as that of `faulthandler.register`. On other threads
    than the main one no handler is installed; neither is one where the system has no such signal.
    """
    global _installed_in
    _watched.add(context)
    if threading.current_thread() is threading.main_thread() and _is_free():
        _installed_in = os.getpid()
        signal.signal(signal.SIGUSR1, _begin)


def _is_free() -> bool:
    """Return whether SIGUSR1 exists, and would end this process."""
    if not hasattr(signal, "SIGUSR1") or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return True
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return not caught >> (signal.SIGUSR1 - 1) & 1


def _begin(number: int, frame: FrameType | None) -> None:
    """Print the reports on a thread, which is started without a lock: the main thread may hold any."""
    if os.getpid() == _installed_in:
        _thread.start_new_thread(_print, ())


def _print() -> None:
    """Print the reports of all jobs, unless that is being done."""
    if not _printing.acquire(blocking=False):
        return
    try:
        texts = [report(context) for context in list(_watched)] or ["no trainer is there"]
        sys.stderr.write("".join(f"steepest, on SIGUSR1:\n{text}\n" for text in texts))
        sys.stderr.flush()
    finally:
        _printing.release()
