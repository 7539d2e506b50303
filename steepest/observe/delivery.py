"""The rows of a run on their way to a tracker: a thread of its own passes them on, so that training never waits."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from steepest.core.system import system

log = logging.getLogger(__name__)
#: How a run ended, as trackers distinguish it: by itself, by an error, or by a signal.
Ending = Literal["finished", "failed", "killed"]
_MOST_ROWS = 20_000  # that wait; about 1 kB each
_BATCH = 40  # rows passed on at once: fewer than 1,000 numbers, which is what MLflow takes
_LONGEST_PAUSE = 60.0  # seconds from one try to the next
_LAST_SECONDS = 30.0  # for what is left when the run ends
_LAST_SECONDS_OF_FAILING = 5.0  # likewise, where the tracker could not be reached before


def ending_of(error: BaseException | None) -> Ending:
    """Return how a run has ended, from the error with which its program or call ended; None for no error."""
    if isinstance(error, KeyboardInterrupt):
        return "killed"
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return "finished"
        return "killed" if isinstance(error.code, int) and error.code > 128 else "failed"
    return "finished" if error is None else "failed"


class Delivery:
    """A queue of rows, and the thread that passes them on.

    A tracker that raises is tried again, with the same rows, after pauses that double up to a minute. Where more
    than 20,000 rows wait the oldest are dropped. Warnings say when a tracker fails, with how many rows wait, when
    rows are dropped, and at the end how many have not arrived. All functions but `take` may raise; they are called
    on that thread alone.

    Args:
        name: of the tracker, for warnings.
        begin: opens the run; called until it has returned.
        take: is given each row in order, and whether it is of the program before.
        send: passes on all rows that were taken; called again after an error.
        end: ends the run.
        seconds: that a row waits for others before they are passed on together.
        after: another delivery of the same tracker, whose thread is to end before.
    """

    def __init__(
        self,
        name: str,
        begin: Callable[[], None],
        take: Callable[[Mapping[str, Any], bool], None],
        send: Callable[[], None],
        end: Callable[[Ending], None],
        seconds: float,
        after: Delivery | None = None,
    ) -> None:
        self._name, self._seconds, self._after = name, seconds, after
        self._begin, self._take, self._send, self._end = begin, take, send, end
        self._rows: deque[tuple[Mapping[str, Any], bool]] = deque()
        self._sending: list[Mapping[str, Any]] = []
        self._begun = False
        self._failures = 0  # since a try that succeeded
        self._dropped = 0
        self._ending: Ending | None = None
        self._lock = system().lock()
        # whether there is something to do, and whether it is to be done at once
        self._some, self._asked = system().event(), system().event()
        self._some.set()
        self._asked.set()
        self._thread = system().start(self._run, f"steepest {name}")

    # -- a sink of the history: none of its methods waits but `close` ------------------------------

    def take(self, row: Mapping[str, Any], *, old: bool = False) -> None:
        """Take a row, `old` if it is of the program before."""
        with self._lock:
            full = len(self._rows) >= _MOST_ROWS
            if full:
                self._rows.popleft()
                self._dropped += 1
            self._rows.append((row, old))
        if full and self._dropped == 1:
            log.warning(
                "%s: %d rows wait, of which the oldest are dropped from now on",
                self._name,
                _MOST_ROWS,
            )
        self._some.set()

    def flush(self) -> None:
        """Have the rows taken so far passed on at once."""
        self._asked.set()

    def behind(self) -> int | None:
        """Return the step until which all rows were passed on; None if all that were taken are."""
        with self._lock:
            first = self._sending[0] if self._sending else self._rows[0][0] if self._rows else None
        return None if first is None else max(int(first["step"]) - 1, 0)

    def close(self, how: Ending) -> None:
        """Pass on what there is, as far as that succeeds within half a minute, and end the run."""
        with self._lock:
            self._ending = how
            failing = self._failures > 0
        self._some.set()
        self._asked.set()
        self._thread.join(_LAST_SECONDS_OF_FAILING if failing else _LAST_SECONDS)
        if self._thread.is_alive():
            log.warning("%s: does not answer; %d rows may be missing", self._name, self._waiting())

    def _waiting(self) -> int:
        return len(self._rows) + len(self._sending)

    # -- the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Pass rows on until the run ends."""
        if self._after is not None:
            self._after._thread.join()
            self._after = None
        while True:
            self._some.wait()
            self._asked.wait(self._pause())
            self._asked.clear()
            ending = self._ending
            self._try()
            with self._lock:
                if self._ending is None and self._begun and not self._waiting():
                    self._some.clear()
            if ending is not None:
                self._finish(ending)
                return

    def _pause(self) -> float:
        """Return the seconds until rows that have come are passed on."""
        if not self._failures:
            return self._seconds
        return float(min(_LONGEST_PAUSE, max(self._seconds, 1.0) * 2 ** min(self._failures - 1, 9)))

    def _try(self) -> None:
        """Open the run, and pass on all rows; note it if that fails."""
        try:
            if not self._begun:
                self._begin()
                self._begun = True
            while self._next():
                self._send()
                with self._lock:
                    self._sending = []
        except Exception as error:  # noqa: BLE001 - a tracker's errors do not end training
            self._failures += 1
            if self._failures == 1:
                log.warning(
                    "%s: cannot log, tries again later, %d rows wait: %r",
                    self._name,
                    self._waiting(),
                    error,
                )
        else:
            if self._failures:
                log.warning("%s: logs again; %d rows were dropped", self._name, self._dropped)
            self._failures = 0

    def _next(self) -> bool:
        """Take the next rows; return whether there are some to pass on."""
        with self._lock:
            fresh = []
            while self._rows and len(self._sending) < _BATCH:
                fresh.append(self._rows.popleft())
                self._sending.append(fresh[-1][0])
        for row, old in fresh:
            self._take(row, old)
        return bool(self._sending)

    def _finish(self, ending: Ending) -> None:
        """End the run, and say what has not arrived."""
        if lost := self._waiting() + self._dropped:
            log.warning("%s: %d rows have not arrived", self._name, lost)
        if not self._begun:
            return
        try:
            self._end(ending)
        except Exception as error:  # noqa: BLE001 - see `_try`
            log.warning("%s: cannot end the run: %r", self._name, error)
