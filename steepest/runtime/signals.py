"""Signals to the driver: SIGTERM ends it as Ctrl-C does, SIGUSR1 prints what each process is doing.

SIGUSR2 announces that the machine will go, where all processes are on it.
"""

from __future__ import annotations

import _thread
import logging
import math
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from steepest.core.system import system
from steepest.runtime.activity import Watched, report
from steepest.runtime.job_runtime import runtime

#: The exit status of a program that SIGTERM has ended, as shells and schedulers know it.
EXIT_STATUS = 128 + signal.SIGTERM
log = logging.getLogger(__name__)
#: For so long a repeated signal does not cut short what the first one began.
_ENDING_SECONDS = 30.0
_GONE_SECONDS = 10.0  # without a control store, after which the process is ended
_LOOK_SECONDS = 0.5
_began = -math.inf  # when the process last began to end, of `time.monotonic`
_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_printing = threading.Lock()
_installed_in = 0  # the process; a forked child has its parent's handler too


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, with exit status 143.

    `SystemExit` is raised in the main thread, so that `with` blocks are left and `fit` writes its
    last checkpoint. Only the runtime's own handler is replaced, or none: a user's own stays. On other
    threads than the main one this does nothing.
    """
    if system().current() is not threading.main_thread():
        return
    if runtime().leaves_sigterm(signal.getsignal(signal.SIGTERM), EXIT_STATUS):
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """End the process, unless it began to end a moment ago.

    A notebook catches `SystemExit` and goes on: a later signal ends it like the first one.
    """
    global _began
    if (now := time.monotonic()) - _began >= _ENDING_SECONDS:
        _began = now
        threading.Thread(target=_end_without_runtime, name="steepest end", daemon=True).start()
        sys.exit(EXIT_STATUS)


def _end_without_runtime() -> None:
    """End this process if it waits for a runtime that is gone.

    Ray's control store (GCS) is gone if Ray's processes got the signal too. Calls of Ray then wait for it, also
    those that end a trainer, until Ray ends this process after a minute, with status 1.
    """
    gone_since = math.inf
    while runtime().is_up and time.monotonic() - _began < 2 * _ENDING_SECONDS:
        now = time.monotonic()
        gone_since = math.inf if runtime().answers(_LOOK_SECONDS) else min(gone_since, now)
        if now - gone_since >= _GONE_SECONDS:
            log.warning("Ray is gone: the program ends without waiting for its answers")
            os._exit(EXIT_STATUS)
        time.sleep(_LOOK_SECONDS)


def report_on_sigusr1(context: Watched) -> None:
    """Let SIGUSR1 print to stderr what the processes of a job are doing, as long as the job exists.

    A thread of its own does so; nothing else of this process changes. A user's own handler stays:
    one of `signal.signal`, and one in C, such as that of `faulthandler.register`. On other threads
    than the main one no handler is installed; neither is one where the system has no such signal.
    """
    global _installed_in
    _watched.add(context)
    if system().current() is threading.main_thread() and _is_free("SIGUSR1"):
        _installed_in = os.getpid()
        signal.signal(signal.SIGUSR1, _begin_report)


class _OnNotice:
    """A handler that calls a function in the process that has made it, not in forks of that."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function, self._process = function, os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._function()


def on_sigusr2(function: Callable[[], None]) -> None:
    """Call a function at each SIGUSR2, and no longer what an earlier call of this gave.

    A user's own handler stays; on other threads than the main one nothing happens.
    """
    if system().current() is not threading.main_thread():
        return
    if _is_free("SIGUSR2") or isinstance(signal.getsignal(signal.SIGUSR2), _OnNotice):
        signal.signal(signal.SIGUSR2, _OnNotice(function))


def _is_free(name: str) -> bool:
    """Return whether a signal exists, and would end this process."""
    number = getattr(signal, name, None)
    if number is None or signal.getsignal(number) is not signal.SIG_DFL:
        return False
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return True
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return not caught >> (number - 1) & 1


def _begin_report(number: int, frame: FrameType | None) -> None:
    """Print the reports on a thread, which is started without a lock: the main thread may hold any."""
    if os.getpid() == _installed_in:
        _thread.start_new_thread(_print, ())


def _print() -> None:
    """Print the reports of all jobs, unless another thread does so now."""
    if not _printing.acquire(blocking=False):
        return
    try:
        texts = [report(context) for context in list(_watched)] or ["no trainer is there"]
        sys.stderr.write("".join(f"steepest, on SIGUSR1:\n{text}\n" for text in texts))
        sys.stderr.flush()
    finally:
        _printing.release()
