"""The gauges of a logger: one for each name of a number, up to a limit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

log = logging.getLogger(__name__)
_MOST_GAUGES = 200  # a backend keeps a series of each, for each process that has set it

#: Sets a gauge to a value.
SetGauge = Callable[[float], object]


class Gauges:
    """The gauges of a run, by names such as "train/loss"; a warning tells of the first name that gets none.

    Args:
        key: of the logger, for the warning.
        make: makes the gauge of a name; returns the function that sets it.
    """

    def __init__(self, key: str, make: Callable[[str], SetGauge]) -> None:
        self._key, self._make = key, make
        self._setters: dict[str, SetGauge] = {}
        self._has_warned = False

    def set(self, values: Mapping[str, float]) -> None:
        """Set gauges, which are made for new names as long as there are few."""
        for name, value in values.items():
            if name not in self._setters and len(self._setters) >= _MOST_GAUGES:
                self._warn(name)
                continue
            if name not in self._setters:
                self._setters[name] = self._make(name)
            self._setters[name](value)

    def end(self) -> None:
        """Set the gauges of workers and servers to 0: the run has ended."""
        self.set({"job/workers": 0.0, "job/servers": 0.0})

    def _warn(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: %r and whatever comes later gets no gauge, because there are %d: report numbers under names "
                "that stay, without steps or ids in them", self._key, name, _MOST_GAUGES,
            )  # fmt: skip
