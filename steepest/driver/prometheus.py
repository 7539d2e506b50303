"""A logger to Prometheus, by way of Ray's metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from steepest.observe.loggers import Logger, Point


class Prometheus(Logger):
    """Keep Ray's metrics at the last values of a run, for Prometheus to collect.

    A number that loggers call "train/loss" is the gauge ``ray_steepest_train_loss`` with the tag
    "run". When the run ends, the gauges of workers and servers are 0.

    Args:
        run: the tag's value, such as the name of what is trained.
        settings: as of `Logger`.
    """

    def __init__(self, run: str = "steepest", **settings: Any) -> None:
        super().__init__(**settings)
        self.key = f"Prometheus {run}"
        self._run = run
        self._gauges: dict[str, Any] = {}

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Continue where the gauges are: they have the last values only."""
        return self._run, {}

    def log(self, points: Sequence[Point]) -> None:
        """Set gauges to the points' last numbers."""
        last: dict[str, float] = {}
        for point in points:
            last |= point.values
        for name, value in last.items():
            self._set(name, value)

    def finish(self) -> None:
        """Say that no process is left."""
        for name in ("job/workers", "job/servers"):
            self._set(name, 0.0)

    def _set(self, name: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
            self._gauges[name] = Gauge(f"steepest_{plain}", description=name, tag_keys=("run",))
        self._gauges[name].set(value, tags={"run": self._run})
