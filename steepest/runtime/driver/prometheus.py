"""A logger to Prometheus, by way of Ray's metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from steepest.observe.delivery import Ending
from steepest.observe.loggers import Logger, Point

log = logging.getLogger(__name__)
_MOST_GAUGES = 200  # Prometheus keeps a series of each, for each process that has set it


class Prometheus(Logger):
    """Keep Ray's metrics at the last values of a run, for Prometheus to collect.

    A number that loggers call "train/loss" is the gauge ``ray_steepest_train_loss`` with the tag
    "run". When the run ends, the gauges of workers and servers are 0. Only the first 200 names get a
    gauge; a warning says so.

    Args:
        run: the tag's value, such as the name of the model.
        settings: see `Logger`.
    """

    def __init__(self, run: str = "steepest", **settings: Any) -> None:
        super().__init__(**settings)
        self.key = f"Prometheus {run}"
        self._run = run
        self._gauges: dict[str, Any] = {}
        self._full = False

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Continue with the gauges as they are: they have only the last values."""
        return self._run, {}

    def log(self, points: Sequence[Point]) -> None:
        """Set gauges to the points' last numbers."""
        last: dict[str, float] = {}
        for point in points:
            last |= point.values
        for name, value in last.items():
            self._set(name, value)

    def finish(self, how: Ending) -> None:
        """Set the gauges of workers and servers to 0."""
        for name in ("job/workers", "job/servers"):
            self._set(name, 0.0)

    def _set(self, name: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            if len(self._gauges) >= _MOST_GAUGES:
                if not self._full:
                    self._full = True
                    log.warning(
                        "%s: %r and whatever comes later gets no gauge, because there are %d: report "
                        "numbers under names that stay, without steps or ids in them",
                        self.key,
                        name,
                        _MOST_GAUGES,
                    )
                return
            plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            self._gauges[name] = Gauge(f"steepest_{plain}", description=name, tag_keys=("run",))
        self._gauges[name].set(value, tags={"run": self._run})
