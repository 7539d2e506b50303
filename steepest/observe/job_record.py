"""What a run's history leaves out: what each worker spent its time on, its processes, its checkpoints."""

from __future__ import annotations

import functools
import importlib.metadata
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steepest.core.system import system

#: Of the rows' format; another one is refused by whoever reads them.
FORMAT = 1
PARTS = ("data", "compute", "wait")  # of a worker's step, in the order in which they are told
_LEAST_SECONDS, _SHARE = 1.0, 0.01  # a span's length: at least so long, and so much of the run
_STEPS, _SHARES = 64, 1024  # the last steps, that are told one by one, and workers' shares of these
_ROWS = 10_000  # that are kept in memory

#: A worker, and the seconds of its data, its computing and its wait in a step.
Spent = tuple[int, float, float, float]


class JobRecord:
    """Rows of a run beside those of its history, oldest first, for the page of a job.

    A row is a dict: "kind", "time" (seconds since the epoch), "step" (committed by then), and

    - "workers": "first", the first step of a span of steps of which `step` is the last; "spent": by worker
      [steps, seconds of data, of computing, of waiting], the seconds as means; in the newest row "last":
      [step, time, [[worker, data, compute, wait], ...]] of each of the last steps.
    - "job": "format", "steepest" (its version), "strategy", "samples" (of a step), "settings" by name, in words, and
      "processes": [name, node, host, pid] of each.
    - "checkpoint": "paused" and "written", the seconds for which training paused for it, and in which it was written.

    A span is at least a second of training long, and at least a hundredth of the run: a run of days has
    less than a thousand.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._number = 0  # of rows so far, those included that memory has no more
        self._written = 0
        self._lock = system().lock()
        self._about: Mapping[str, Any] | None = None
        self._span: dict[int, list[float]] = {}
        self._last: deque[tuple[int, float, Sequence[Spent]]] = deque()
        self._first = self._step = 0
        self._until = _LEAST_SECONDS  # seconds of training at which the span ends

    def stepped(self, step: int, seconds: float, spent: Sequence[Spent]) -> None:
        """Add what workers spent a step on; `seconds` of training have passed since the beginning."""
        with self._lock:
            if step <= self._step:
                self._cut(step)
            self._step = step
            if not spent:
                return
            self._first = self._first or step
            for worker, data, compute, wait in spent:
                sums = self._span.setdefault(worker, [0.0, 0.0, 0.0, 0.0])
                sums[0] += 1
                sums[1] += data
                sums[2] += compute
                sums[3] += wait
            self._last.append((step, system().time(), spent))
            most = max(1, min(_STEPS, _SHARES // len(spent)))
            while len(self._last) > most:
                self._last.popleft()
            if seconds >= self._until:
                self._end_span(seconds)

    def describe(self, step: int, description: Mapping[str, Any]) -> None:
        """Add a description of the job, if it has changed."""
        with self._lock:
            if description != self._about:
                self._about = dict(description)
                self._add("job", step, {"format": FORMAT, "steepest": _version(), **description})

    def kept(self, step: int, paused: float, written: float) -> None:
        """Add a checkpoint."""
        with self._lock:
            times = {"paused": round(paused, 4), "written": round(written, 4)}
            self._add("checkpoint", step, times)

    def resume(self, step: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        """Continue after a step, with the rows of the program before, if this one has none yet."""
        with self._lock:
            self._cut(step + 1)
            for row in rows:
                self._rows.append(dict(row))
                self._number += 1
                self._written = self._number

    def rows(self, since: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the rows after the first `since`, as far as they are in memory, and the number of all rows."""
        with self._lock:
            new = min(self._number - since, len(self._rows))
            return self._rows[len(self._rows) - new :], self._number

    def open_span(self) -> dict[str, Any] | None:
        """Return the row of the span that has not ended; None where it has no step."""
        with self._lock:
            span = self._open()
        return None if span is None else {"step": self._step, **span}

    def unwritten(self) -> tuple[list[dict[str, Any]], int]:
        """End the span; return the rows that are not in the file, and the number to give to `wrote`."""
        with self._lock:
            if self._span:
                self._end_span(self._until - _LEAST_SECONDS)
        return self.rows(self._written)

    def wrote(self, number: int) -> None:
        """Note that the rows that `unwritten` returned with this number are in the file."""
        self._written = max(self._written, number)

    def _open(self) -> dict[str, Any] | None:
        if not self._span:
            return None
        spent = {
            str(worker): [int(sums[0]), *(_short(each / sums[0]) for each in sums[1:])]
            for worker, sums in sorted(self._span.items())
        }
        last = [
            [step, round(now, 3), [[worker, *map(_short, parts)] for worker, *parts in shares]]
            for step, now, shares in self._last
        ]
        return {"first": self._first, "spent": spent, "last": last}

    def _end_span(self, seconds: float) -> None:
        """Make a row of the open span; the row before loses its steps one by one."""
        span = self._open()
        self._until = seconds + max(_LEAST_SECONDS, _SHARE * seconds)
        self._forget_span()
        if span is None:
            return
        for at in range(len(self._rows) - 1, -1, -1):
            if "last" in self._rows[at]:
                self._rows[at] = {k: v for k, v in self._rows[at].items() if k != "last"}
                break
        self._add("workers", self._step, span)

    def _forget_span(self) -> None:
        self._span.clear()
        self._first = 0

    def _add(self, kind: str, step: int, what: Mapping[str, Any]) -> None:
        self._rows.append({"kind": kind, "time": round(system().time(), 3), "step": step, **what})
        self._number += 1
        if len(self._rows) > 1.1 * _ROWS:
            del self._rows[:-_ROWS]

    def _cut(self, step: int) -> None:
        """Forget what the open span has; who reads the rows leaves out what was taken again."""
        self._forget_span()
        while self._last and self._last[-1][0] >= step:
            self._last.pop()
        self._step = step - 1


def typical(values: Iterable[float]) -> float:
    """Return the median; 0 if there are no values."""
    numbers = list(values)
    return statistics.median(numbers) if numbers else 0.0


@functools.cache
def _version() -> str:
    """Return the version of this package; "" where it is not installed."""
    try:
        return importlib.metadata.version("steepest")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _short(value: float) -> float:
    """Return a number with four digits."""
    return float(f"{value:.4g}")
