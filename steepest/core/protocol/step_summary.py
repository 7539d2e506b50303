"""The result of a training step: sums and means over its pushes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from steepest.core.messages.gradients import Report
from steepest.core.messages.means import Measured, mean_metrics


class OpenStep:
    """The pushes and versions of the training step that is not whole yet."""

    def __init__(self) -> None:
        self._reports: list[tuple[Report, int]] = []
        self._spent: list[tuple[int, float, float, float]] = []  # see `Result.spent`
        self._norms: list[float | None] = []
        self._notes: list[tuple[int, int, float, dict[str, float]]] = []  # see `Result.notes`

    def add(self, worker: int, report: Report, staleness: int) -> None:
        """Add the report of a worker's committed push, and its staleness in versions."""
        self._reports.append((report, staleness))
        if report.notes:
            self._notes += [(worker, *note) for note in report.notes]
        if (spent := report.timings) and report.samples:
            data, compute, wait = spent.get("data"), spent.get("compute"), spent.get("wait")
            self._spent.append((worker, data or 0.0, compute or 0.0, wait or 0.0))

    def add_norm(self, norm: float | None) -> None:
        """Add the norm of a version's gradient; None where it is not known."""
        self._norms.append(norm)

    def clear(self) -> None:
        """Forget the pushes, and begin another step."""
        self._reports.clear()
        self._spent.clear()
        self._norms.clear()
        self._notes.clear()

    def end(self, stats: bool) -> dict[str, Any]:
        """Return the summary of the step, see `summarize`, and begin another one."""
        summary = summarize(self._reports, self._norms, stats)
        if stats and self._spent:
            summary["spent"] = list(self._spent)
        if self._notes:
            summary["notes"] = list(self._notes)
        self.clear()
        return summary


def summarize(
    reports: Sequence[tuple[Report, int]], norms: Iterable[float | None], stats: bool
) -> dict[str, Any]:
    """Return the fields of a `Result`.

    Args:
        reports: of each push, with its staleness in versions.
        norms: of each version's gradient; None if unknown.
        stats: whether to add loss and metrics, means over samples, and mean timings in seconds.
    """
    pushes = [report for report, _ in reports]
    summary: dict[str, Any] = {
        "staleness": [staleness for _, staleness in reports],
        "samples": sum([report.samples for report in pushes]),
        "bytes_pushed": sum([report.bytes_pushed for report in pushes]),
        "bytes_pulled": sum([report.bytes_pulled for report in pushes]),
    }
    if known := [norm for norm in norms if norm is not None]:
        summary["gradient_norm"] = sum(known) / len(known)
    places = [report.digest for report in pushes if report.digest is not None]
    if known_epochs := [place.epoch for place in places if place.epoch is not None]:
        summary["epoch"] = known_epochs[0]
    if hypers := [report.hyper for report in pushes if report.hyper is not None]:
        summary["hyper"] = hypers[0]
    with_loss = [report for report in pushes if report.loss is not None]
    if not stats or not with_loss:
        return summary

    def mean(values: list[tuple[float, float]]) -> float:
        total = sum([weight for _, weight in values])
        return sum([v * weight for v, weight in values]) / total if total else math.nan

    summary["loss"] = mean([(r.loss, r.total) for r in with_loss if r.loss is not None and r.total])
    # a report may leave them out
    measured = [Measured(r.metrics, r.total, r.weights) for r in with_loss]
    summary["metrics"], _ = mean_metrics(measured)
    timings = [r.timings for r in with_loss]
    parts = sorted({name for values in timings for name in values})
    summary["timings"] = {
        name: sum([values.get(name, 0.0) for values in timings]) / len(timings) for name in parts
    }
    return summary
