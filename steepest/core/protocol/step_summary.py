"""The result of a training step: sums and means over its pushes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from msgspec import ValidationError, convert, to_builtins
from msgspec.structs import replace

from steepest.core.messages.gradients import Report
from steepest.core.messages.means import Measured, mean_metrics
from steepest.errors import ProtocolError


class OpenStep:
    """The pushes and versions of the training step that is not whole yet."""

    def __init__(self) -> None:
        self._reports: list[tuple[int, Report, int]] = []  # the worker first, staleness last
        self._norms: list[float | None] = []

    def add(self, worker: int, report: Report, staleness: int) -> None:
        """Add the report of a worker's committed push, and its staleness in versions."""
        self._reports.append((worker, report, staleness))

    def add_norm(self, norm: float | None) -> None:
        """Add the norm of a version's gradient; None where it is not known."""
        self._norms.append(norm)

    def clear(self) -> None:
        """Forget the pushes, and begin another step."""
        self._reports.clear()
        self._norms.clear()

    def end(self, stats: bool) -> dict[str, Any]:
        """Return the summary of the step, see `summarize`, and begin another one."""
        summary = summarize(self._reports, self._norms, stats)
        self.clear()
        return summary

    def state(self) -> dict[str, Any]:
        """Return as "open" what another coordinator needs to go on with the step; nothing before its first push."""
        if not self._reports:
            return {}
        reports = [
            [worker, to_builtins(replace(report, more=None, audit=None)), staleness]
            for worker, report, staleness in self._reports
        ]
        return {"open": {"reports": reports, "norms": list(self._norms)}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with the step of a `state`, or begin one where it has none.

        Raises:
            ProtocolError: it is no such state.
        """
        self.clear()
        if (begun := state.get("open")) is None:
            return
        try:
            found = convert(begun, _StepState)
        except ValidationError as error:
            raise ProtocolError(f"a step that has begun: {error}") from None
        self._reports, self._norms = found["reports"], found["norms"]


class _StepState(TypedDict):
    reports: list[tuple[int, Report, int]]
    norms: list[float | None]


def summarize(
    reports: Sequence[tuple[int, Report, int]], norms: Iterable[float | None], stats: bool
) -> dict[str, Any]:
    """Return the fields of a `Result`.

    Args:
        reports: of each push, with its worker and its staleness in versions.
        norms: of each version's gradient; None if unknown.
        stats: whether to add loss and metrics, means over samples, and mean timings in seconds.
    """
    pushes = [report for _, report, _ in reports]
    summary: dict[str, Any] = {
        "staleness": [staleness for _, _, staleness in reports],
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
    notes, spent = [], []
    for worker, report, _ in reports:
        if report.notes:
            notes += [(worker, *note) for note in report.notes]
        if stats and (took := report.timings) and report.samples:
            seconds = took.get("data", 0.0), took.get("compute", 0.0), took.get("wait", 0.0)
            spent.append((worker, *seconds))
    if notes:
        summary["notes"] = notes
    if spent:
        summary["spent"] = spent
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
