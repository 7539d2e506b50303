"""What the page of a job shows: the rows of a run, thinned."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from steepest.observe.page.thinning import Curves, plain
from steepest.observe.page.workers import WorkerTimes

#: Of the data of a page; its script shows no other.
PAGE_FORMAT = 1
_CURVES = 40  # of metrics and learning rates; further ones are left out
_MARKS = 2000  # of evaluations, checkpoints and events each; of more the newest
_LAST = ("step", "time", "epoch", "loss", "workers", "servers", "seconds")  # of the last step
_PARTS = ("cause", "seen", "decision", "processes", "seconds", "repeated")  # of a change's record
_SECONDS = re.compile(r"([a-z ]+?) (\d+\.\d+)")
_REPEATED = re.compile(r"(\d+) steps, (\d+) samples")


class Known(NamedTuple):
    """The parts of a run that a page has already: the numbers that it was told last."""

    since: int = 0  # of buckets of the curves, the last one excepted
    revision: int | None = None  # of the curves
    changes: int | None = None


class RunView:
    """A run as its page shows it. Rows are added in their order; what is told has a bounded size.

    Args:
        name: of the run, such as its directory's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.curves = Curves()
        self.notes: list[str] = []  # sentences for the reader
        self._known: dict[str, None] = {}  # names of curves
        self._workers = WorkerTimes()
        self._marks: dict[str, list[dict[str, Any]]] = {
            "evaluations": [],
            "checkpoints": [],
            "events": [],
        }
        self._changes = 0  # of what is told whole
        self._about: dict[str, Any] = {}
        self._processes: list[dict[str, Any]] = []
        self._began: float | None = None
        self._first: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._before = math.nan  # seconds of training until the last step
        self._samples: float = 0
        self._bytes: list[float] = [0, 0]

    def forget_history(self) -> None:
        """Forget the rows of the history, to be added again; those of the record stay."""
        self.curves.clear()
        self._marks["evaluations"], self._marks["events"] = [], []
        self._changes += 1
        self._first, self._last, self._before = {}, {}, math.nan
        self._samples, self._bytes = 0, [0, 0]

    def follow(self, other: RunView) -> None:
        """Take the place of another view of the run: pages that know the other are told everything."""
        self.curves.revision += other.curves.revision + 1
        self._changes += other._changes + 1

    # -- rows ----------------------------------------------------------------------------------

    def add_all(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows of a history, or of its record."""
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of a history, or of its record; one of another kind is ignored."""
        kind = row["kind"]
        if kind == "step":
            self._add_step(row)
        elif kind == "report":
            self.curves.add_to_last(row["time"], dict(self._known_only(_metrics(row))))
        elif kind == "evaluation":
            values = {key: plain(row.get(key)) for key in ("step", "time", "loss")}
            metrics = {name: plain(value) for name, value in (row.get("metrics") or {}).items()}
            self._mark("evaluations", values | {"metrics": metrics})
        elif kind == "event":
            self._mark("events", event_of(row))
        elif kind == "checkpoint":
            kept = {key: plain(row.get(key)) for key in ("step", "time", "paused", "written")}
            self._mark("checkpoints", kept)
        elif kind == "workers":
            self._workers.add(row)
            self._changes += 1
        elif kind == "job":
            self._about = {name: row.get(name) or "" for name in ("strategy", "steepest")}
            self._about = {name: str(value) for name, value in self._about.items()}
            self._about["samples"] = plain(row.get("samples"))
            settings = row.get("settings") or {}
            self._about["settings"] = {str(name): str(value) for name, value in settings.items()}
            self._processes = [
                {"name": str(name), "node": str(node), "host": str(host), "pid": plain(pid)}
                for name, node, host, pid in row.get("processes", ())
            ]
        if self._began is None:
            self._began = row["time"]

    def _mark(self, kind: str, what: dict[str, Any]) -> None:
        marks = self._marks[kind]
        self._changes += 1
        marks.append(what)
        if len(marks) > 1.1 * _MARKS:
            del marks[:-_MARKS]

    def _add_step(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        if step <= self.curves.step:  # only rows that a damaged file has twice
            return
        seconds = _number(row.get("seconds"))
        passed = seconds - self._before
        self._before = seconds
        samples = plain(row.get("samples")) or 0
        sums = {
            "pushed": plain(row.get("bytes_pushed")) or 0,
            "pulled": plain(row.get("bytes_pulled")) or 0,
        }
        values, last = (
            dict(self._known_only(_values(row))),
            {key: plain(row.get(key)) for key in _LAST},
        )
        if passed < 0 or step == 1:  # the first step of a program
            passed = seconds
        if passed >= 0:
            sums |= {"samples": samples, "seconds": passed}
        self._samples += samples
        self._bytes = [self._bytes[0] + sums["pushed"], self._bytes[1] + sums["pulled"]]
        self.curves.add(step, row["time"], values, sums)
        self._first = self._first or {"step": step}
        self._last = last

    def _known_only(self, values: Iterator[tuple[str, float]]) -> Iterator[tuple[str, float]]:
        """Yield the values that have a curve."""
        for name, value in values:
            if name not in self._known:
                if len(self._known) >= _CURVES:
                    note = f"only the first {_CURVES} curves are shown"
                    self.notes += [] if note in self.notes else [note]
                    continue
                self._known[name] = None
            yield name, value

    # -- the page ------------------------------------------------------------------------------

    def as_json(
        self,
        known: Known | None = None,
        span: Mapping[str, Any] | None = None,
        now: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the data of the page, as JSON has them.

        Args:
            known: what the page has already, which is left out.
            span: that of the workers which has not ended, if any.
            now: what is known of a live job beyond its rows: "processes" and the like.
        """
        known = known or Known()
        begin = known.since if known.revision == self.curves.revision else 0
        anew = known.changes != self._changes
        last, workers = self._last, self._workers.as_json(span, whole=anew)
        marks: dict[str, Any] = dict(self._marks) if anew else {}
        summary = {
            "name": self.name,
            "made": round(time.time(), 1),
            "began": self._began,
            "strategy": self._about.get("strategy", ""),
            "batch": self._about.get("samples"),
            "steepest": self._about.get("steepest", ""),
            "settings": self._about.get("settings", {}),
            "samples": self._samples,
            "pushed": self._bytes[0],
            "pulled": self._bytes[1],
            "from": self._first.get("step"),
            "notes": self.notes,
        }
        summary |= {key: last.get(key) for key in _LAST}
        return {
            "format": PAGE_FORMAT,
            "live": False,
            "about": summary,
            "curves": self.curves.as_json(begin),
            "changes": self._changes,
            **marks,
            "workers": workers,
            "processes": self._processes,
            **(now or {}),
        }


def event_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a page shows of an event: its record in parts, with seconds by part and steps repeated.

    Example:

        >>> found = event_of({"event": "left", "step": 8, "time": 1.0, "line": "worker 1 died", "record": (
        ...     "change 1 at step 8 | cause: worker 1 died | seconds: seeing 0.35, in all 1.55 | "
        ...     "repeated: 2 steps, 8 samples")})
        >>> found["cause"], found["spent"], found["steps"]
        ('worker 1 died', {'seeing': 0.35, 'in all': 1.55}, 2)
    """
    event: dict[str, Any] = {key: plain(row.get(key)) for key in ("step", "time")}
    event |= {"line": str(row.get("line") or ""), "kind": str(row.get("event") or "")}
    for part in str(row.get("record") or "").split(" | ")[1:]:
        name, _, words = part.partition(": ")
        if name in _PARTS:
            event[name] = words
    seconds = _SECONDS.findall(event.pop("seconds", None) or "")
    event["spent"] = {name.strip(): float(passed) for name, passed in seconds}
    repeated = _REPEATED.fullmatch(event.pop("repeated", None) or "")
    event["steps"] = int(repeated[1]) if repeated else None
    return event


def _values(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a step by the names of their curves."""
    yield "loss", _number(row.get("loss"))
    yield "gradient norm", _number(row.get("gradient_norm"))
    yield from _metrics(row)
    rates = row.get("learning_rate") or []
    for group, rate in enumerate(rates):
        yield f"learning rate/{group}" if len(rates) > 1 else "learning rate", _number(rate)
    if staleness := row.get("staleness"):
        yield "staleness", sum(staleness) / len(staleness)
    for name, value in (row.get("timings") or {}).items():
        yield f"seconds/{name}", _number(value)
    for name in ("workers", "servers"):
        yield f"processes/{name}", _number(row.get(name))


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield a row's metrics by the names of their curves."""
    for name, value in (row.get("metrics") or {}).items():
        yield f"metrics/{name}", _number(value)


def _number(value: Any) -> float:
    if type(value) is float:  # as almost all are
        return value
    return float(value) if isinstance(value, (int, float)) else math.nan
