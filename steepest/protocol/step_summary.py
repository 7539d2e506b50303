"""What the driver is told of a step: sums and means over the pushes that it took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from steepest.messages.gradients import Report


class OpenStep:
    """The step that is being taken: its updates so far, in a job whose steps are several updates."""

    def __init__(self) -> None:
        self._reports: list[tuple[Report, int]] = []
        self._norms: list[float | None] = []

    def add(self, report: Report, staleness: int) -> None:
        """Add a push that is committed."""
        self._reports.append((report, staleness))

    def add_norm(self, norm: float | None) -> None:
        """Add the norm of an update's gradient, None where it is not known."""
        self._norms.append(norm)

    def clear(self) -> None:
        """Begin another step."""
        self._reports.clear()
        self._norms.clear()

    def end(self, stats: bool) -> dict[str, Any]:
        """Return the summary of the step (see `summarize`), and begin another one."""
        summary = summarize(self._reports, self._norms, stats)
        self.clear()
        return summary


def summarize(
    reports: Sequence[tuple[Report, int]], norms: Iterable[float | None], stats: bool
) -> dict[str, Any]:
    """Return the fields of a `Result` about its pushes: means by sample weight, times by push.

    Args:
        reports: with the staleness of each push.
        norms: of each update's gradient, None where it is not known.
        stats: whether to return loss, metrics and timings, if reports have them.
    """
    pushes = [report for report, _ in reports]
    summary: dict[str, Any] = {
        "staleness": [late for _, late in reports],
        "samples": sum(report.samples for report in pushes),
        "bytes_pushed": sum(report.bytes_pushed for report in pushes),
        "bytes_pulled": sum(report.bytes_pulled for report in pushes),
    }
    if known := [norm for norm in norms if norm is not None]:
        summary["gradient_norm"] = sum(known) / len(known)
    told = [report for report in pushes if report.loss is not None]
    if not stats or not told:
        return summary

    def mean(values: list[tuple[float, float]]) -> float:
        total = sum(weight for _, weight in values)
        return sum(v * weight for v, weight in values) / total if total else math.nan

    summary["loss"] = mean([(r.loss, r.total) for r in told if r.loss is not None and r.total])
    metrics = [(r.metrics, r.total) for r in told]  # a report may leave them out
    names = sorted({name for values, _ in metrics for name in values})
    summary["metrics"] = {
        name: mean([(values[name], weight) for values, weight in metrics if name in values])
        for name in names
    }
    timings = [r.timings for r in told]
    parts = sorted({name for values in timings for name in values})
    summary["timings"] = {
        name: sum(values.get(name, 0.0) for values in timings) / len(timings) for name in parts
    }
    return summary
