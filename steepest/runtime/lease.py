"""The driver's lease of its processes: a process that does not hear from the driver for long ends."""

from __future__ import annotations

import logging
import weakref
from threading import Event
from typing import Any

from steepest.core.system import system
from steepest.runtime.job_runtime import runtime

log = logging.getLogger(__name__)
#: A lease is renewed this many times in its length.
_RENEWALS = 10


class DriverLease:
    """The driver's end of the lease: a thread of its own renews it, also while the user's code runs.

    It is renewed between calls of the trainer, too, as long as the driver's process runs. Processes
    may be added from any thread.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._actors: list[weakref.ref[Any]] = []
        self._lock = system().lock()
        self._ended = system().event()

    def start(self) -> None:
        """Renew leases from now on."""
        system().start(self._run, "steepest lease")

    def add(self, actor: Any) -> None:
        """Renew the lease of a process from now on, as long as its handle is referenced."""
        with self._lock:
            self._actors.append(weakref.ref(actor))

    @property
    def actors(self) -> list[Any]:
        """The processes whose handles are referenced, dead ones among them; any thread may ask."""
        with self._lock:
            return [actor for one in self._actors if (actor := one()) is not None]

    def end(self) -> None:
        """Stop renewing leases; may be called twice."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self.seconds / _RENEWALS):
            self._renew()

    def _renew(self) -> None:
        with self._lock:
            self._actors = [one for one in self._actors if one() is not None]
        # if Ray has ended, a call would start it again
        for actor in self.actors if runtime().is_up else ():
            try:
                runtime().call(actor, "renew_lease")
            except Exception as error:  # noqa: BLE001 - Ray ends meanwhile, or ended; others go on
                log.debug("the lease of a process is not renewed: %s", error)


def wait_for_silence(word: Event, seconds: float) -> None:
    """Return when `word` was not set for `seconds`, or a tenth longer.

    The time is divided into several waits, all of which must pass in vain. A process that was stopped
    itself, or whose code held Python's lock, counts that time as one wait at most, so that it does not
    mistake its own absence for the driver's.
    """
    in_vain = 0
    while in_vain < _RENEWALS:
        if word.wait(seconds / _RENEWALS):
            word.clear()
            in_vain = 0
        else:
            in_vain += 1


class ProcessLease:
    """A process' end of the lease: a thread ends the process when the lease has run out."""

    def __init__(self, name: str, seconds: float) -> None:
        self._word = system().event()
        self._name, self._seconds = name, seconds
        system().start(self._watch, "steepest lease")

    def renew(self) -> None:
        """Renew the lease; called when the driver has sent word."""
        self._word.set()

    def _watch(self) -> None:
        wait_for_silence(self._word, self._seconds)
        log.error(
            "%s (pid %d) has heard nothing from the driver for %g s, its lease (DeadlineConfig "
            "driver), and ends: the driver is cut off, or was stopped",
            self._name,
            runtime().pid,
            self._seconds,
        )
        runtime().exit(1)
