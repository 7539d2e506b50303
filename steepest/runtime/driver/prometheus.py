"""A logger to Prometheus, by way of Ray's metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from steepest.observe.delivery import Ending
from steepest.observe.gauges import Gauges, SetGauge
from steepest.observe.loggers import Logger, Point


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
        self._gauges = Gauges(self.key, self._make_gauge)

    def open(self, run: str | None, step: int) -> tuple[str, Mapping[str, int]]:
        """Continue with the gauges as they are: they have only the last values."""
        return self._run, {}

    def log(self, points: Sequence[Point]) -> None:
        """Set gauges to the points' last numbers."""
        last: dict[str, float] = {}
        for point in points:
            last |= point.values
        self._gauges.set(last)

    def finish(self, how: Ending) -> None:
        """Set the gauges of workers and servers to 0."""
        self._gauges.end()

    def _make_gauge(self, name: str) -> SetGauge:
        from ray.util.metrics import Gauge

        plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        gauge = Gauge(f"steepest_{plain}", description=name, tag_keys=("run",))
        return partial(gauge.set, tags={"run": self._run})
