"""Several runs laid over one another on one page."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steepest.observe.page.run_files import WatchedRun
from steepest.observe.page.run_view import Known, RunView

_HEAD = ("run", "strategy", "step", "loss", "samples", "samples/s", "training", "changes")


def overlay_of(views: Sequence[RunView], names: Sequence[str], version: str = "") -> dict[str, Any]:
    """Return the data of the page of several runs, as JSON has them.

    Args:
        views: the runs.
        names: what the user calls them, such as their directories.
        version: steepest's.
    """
    runs = [view.as_json() for view in views]
    labels = _apart([each["about"]["name"] for each in runs], names)
    metrics = dict.fromkeys(
        name for each in runs for name in each["curves"]["values"] if name.startswith("metrics/")
    )
    return {
        "name": " · ".join(labels),
        "about": f"{len(views)} runs, laid over one another",
        "made": round(time.time(), 1),
        "steepest": version,
        "advice": "",
        "head": list(_HEAD),
        "rows": [_row_of(label, each) for label, each in zip(labels, runs, strict=True)],
        "runs": [
            {"strategy": label, "colour": at, "curves": each["curves"], "evaluations": each["evaluations"]}
            for at, (label, each) in enumerate(zip(labels, runs, strict=True))
        ],
        "spent": [],
        "parts": [],
        "by": "loss",
        "metrics": list(metrics),
    }  # fmt: skip


def _apart(titles: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return a label for each run: its title, or the user's name for it if titles are not unique."""
    alike = len(set(titles)) < len(titles)
    labels = list(names) if alike else list(titles)
    return [f"{at + 1}: {label}" if labels.count(label) > 1 else label for at, label in enumerate(labels)]  # fmt: skip


def _row_of(label: str, told: Mapping[str, Any]) -> list[str]:
    """Return a row of the table of runs."""
    summary = told["about"]
    seconds, loss = summary["seconds"], summary["loss"]
    rate = f"{summary['samples'] / seconds:,.0f}" if seconds else "–"
    return [
        label,
        summary["strategy"] or "–",
        "–" if summary["step"] is None else f"{summary['step']:,}",
        "–" if loss is None else f"{loss:.4g}",
        f"{summary['samples']:,.0f}",
        rate,
        "–" if seconds is None else f"{seconds:,.1f} s",
        f"{len(told['events']):,}",
    ]


class WatchedRuns:
    """The files of several runs as one page shows them while they grow.

    Raises:
        ConfigurationError: see `read_run`.
    """

    def __init__(self, runs: Sequence[str | Path], version: str = "") -> None:
        self._names, self._version = [str(run) for run in runs], version
        self._runs = [WatchedRun(run) for run in runs]

    def as_json(self, known: Known) -> dict[str, Any]:
        """Return the data of the page, all of them."""
        return overlay_of([run.view for run in self._runs], self._names, self._version)

    def stacks(self) -> str:
        """Return a sentence: there is no job to ask."""
        return self._runs[0].stacks()

    def log(self, process: str) -> str:
        """Return a sentence: there is no process to ask."""
        return self._runs[0].log(process)
