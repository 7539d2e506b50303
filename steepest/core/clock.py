"""A process' clock, on which no time passes while the process itself does not run."""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable

_PAUSE_SECONDS = 0.5  # between two beats
#: The most that passes on the clock between two beats. More is time in which the process was stopped (Ctrl-Z, a virtual
#: machine that is moved, a laptop that sleeps), or code in C kept Python's lock.
MOST_SECONDS = 2.0


class RunningClock:
    """Seconds that do not go back; time in which the process did not run is no part of them.

    So whoever was stopped and goes on takes its own absence for nobody else's silence: each deadline is as far away as
    it was. A thread beats while the process runs; without it, before `follow` and in a forked child, all time counts.
    Any thread may ask.

    Args:
        raw: seconds that do not go back, all of them.
    """

    def __init__(self, raw: Callable[[], float] = time.monotonic) -> None:
        self._raw = raw
        # of `raw`: up to when time counts without a further beat, and how much of it did not count
        self._state = (math.inf, 0.0)
        self._followed_by = 0  # pid of the process whose thread beats
        _clocks.add(self)

    def now(self) -> float:
        """Return the time, in seconds."""
        (last, absent), raw = self._state, self._raw()
        return (raw if raw < last else last) - absent

    def beat(self) -> float:
        """Note that the process runs; return for how many seconds it has not."""
        (last, absent), raw = self._state, self._raw()
        more = max(raw - last, 0.0)
        self._state = raw + MOST_SECONDS, absent + more
        return more

    def follow(self, start: Callable[[Callable[[], object], str], object]) -> None:
        """Have a thread beat from now on, which is started with its body and a name; once in a process."""
        if self._followed_by != (here := os.getpid()):
            self._followed_by = here
            self.beat()
            try:
                start(self._beat_on, "steepest clock")
            except RuntimeError:  # the interpreter ends
                self.stand_alone()
                raise

    def stand_alone(self) -> None:
        """Count all time from now on, as in a forked child, where no thread beats."""
        self._state = math.inf, self._state[1]

    def _beat_on(self) -> None:
        """Beat, as long as the process is there."""
        while True:
            time.sleep(_PAUSE_SECONDS)
            self.beat()


_clocks = weakref.WeakSet[RunningClock]()


def _stand_alone() -> None:
    for clock in _clocks:
        clock.stand_alone()


os.register_at_fork(after_in_child=_stand_alone)
