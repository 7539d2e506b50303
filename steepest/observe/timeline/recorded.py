"""Spans of all processes of a job, on one clock, as events of Chrome's trace format."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.core.engine.spans import ROLES, SpanKind

#: A span as `steepest.core.engine.spans.SPAN` packs it.
RECORD = np.dtype(
    [
        ("began", "<f8"),
        ("ended", "<f8"),
        ("number", "<i8"),
        ("version", "<i8"),
        ("chunk", "<i4"),
        ("other", "<i4"),
        ("index", "<u2"),
        ("role", "u1"),
        ("kind", "u1"),
    ]
)
_LEAST_WAIT = 1e-6  # seconds; servers do not wait for less
_OF_SERVERS = (SpanKind.STAGE, SpanKind.REDUCE, SpanKind.APPLY)


@dataclass(frozen=True)
class ClockReading:
    """How far a clock was ahead of the driver's, in seconds: half of a round trip's uncertainty is the error."""

    at: float  # by the driver's clock
    ahead: float
    error: float

    @classmethod
    def of_trip(cls, sent: float, told: float, heard: float) -> ClockReading:
        """Return the reading of a round trip: asked at `sent`, the clock showed `told`, and was heard at `heard`."""
        middle = (sent + heard) / 2
        return cls(middle, told - middle, (heard - sent) / 2)


@dataclass
class NodeClock:
    """A node's clock against the driver's; without readings it is the same clock."""

    readings: list[ClockReading] = field(default_factory=list)

    @property
    def error(self) -> float:
        """The greatest error of the readings, in seconds."""
        return max((each.error for each in self.readings), default=0.0)

    @property
    def ahead(self) -> float:
        """The seconds by which the clock was ahead at the first reading."""
        return self.readings[0].ahead if self.readings else 0.0

    def to_driver(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return times of this clock by the driver's, between two readings by a straight line."""
        if not self.readings:
            return times
        ordered = sorted(self.readings, key=lambda each: each.at)
        own = [each.at + each.ahead for each in ordered]
        return times - np.interp(times, own, [each.ahead for each in ordered])


@dataclass
class ProcessSpans:
    """The spans of one process: `blocks` that were fetched, and the number `lost` because they were not in time."""

    name: str  # of its first role, such as "worker 0"
    node: str
    host: str
    pid: int
    blocks: list[bytes] = field(default_factory=list)
    count: int = 0  # of the spans that it has recorded
    lost: int = 0


@dataclass(frozen=True)
class DriverSpan:
    """What the driver did."""

    name: str
    began: float
    ended: float
    lane: str  # "calls" or "steps"
    step: int | None = None


@dataclass(frozen=True)
class JobShape:
    """How shares and versions count steps, and what a version needs."""

    strategy: str
    needs_all: bool  # whether all members contribute to each version
    shares: int  # of a step
    versions: int  # of a step

    def step_of(self, kind: int, number: int, version: int) -> int | None:
        """Return the step, from 1, of a span; None where it is of none."""
        if kind in (SpanKind.REDUCE, SpanKind.APPLY):  # the version that is made
            return (version - 1) // self.versions + 1
        if kind == SpanKind.CALL:
            return None
        if number >= 0 and kind in (SpanKind.COMPUTE, SpanKind.LOAD, SpanKind.WAIT):
            return number // self.shares + 1
        return version // self.versions + 1 if version >= 0 else None


@dataclass
class RecordedJob:
    """What was recorded of a job."""

    shape: JobShape
    began: float  # seconds of the driver's clock
    processes: list[ProcessSpans]
    clocks: dict[str, NodeClock]  # by node
    driver: list[DriverSpan]
    host: str = ""  # of the driver
    pid: int = 0

    def about(self) -> dict[str, Any]:
        """Return the trace's metadata."""
        return {
            "strategy": self.shape.strategy,
            "needs_all": self.shape.needs_all,
            "lost_spans": sum(each.lost for each in self.processes),
            "clocks": [
                {
                    "node": node,
                    "ahead_ms": round(1e3 * clock.ahead, 6),
                    "error_ms": round(1e3 * clock.error, 6),
                    "readings": len(clock.readings),
                }
                for node, clock in sorted(self.clocks.items())
            ],
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events: names of processes and threads, then spans, then what travelled from process to process."""
        yield from self._driver_events()
        travelling = []
        for number, process in enumerate(self.processes, 2):
            spans = self._aligned(process)
            travelling.append((number, spans))
            yield from _names(number, f"{process.name} on {process.host} (pid {process.pid})")
            yield from self._process_events(number, spans)
        yield from self._travelling(travelling)

    def _aligned(self, process: ProcessSpans) -> npt.NDArray[Any]:
        """Return a process' spans by the driver's clock, sorted by their beginning; the longer of two first."""
        spans = np.frombuffer(b"".join(process.blocks), RECORD).copy()
        clock = self.clocks.get(process.node, NodeClock())
        for edge in ("began", "ended"):
            spans[edge] = clock.to_driver(spans[edge])
        spans["began"] = np.maximum(spans["began"], self.began)
        spans["ended"] = np.maximum(spans["ended"], spans["began"])
        order = np.lexsort((-spans["ended"], spans["began"]))
        ordered: npt.NDArray[Any] = spans[order]
        return ordered

    def _driver_events(self) -> Iterator[dict[str, Any]]:
        yield from _names(1, f"driver on {self.host} (pid {self.pid})")
        for lane, name in enumerate(("calls", "steps"), 1):
            yield from _names(1, name, lane)
            for span in self.driver:
                if span.lane == name:
                    args = {} if span.step is None else {"step": span.step}
                    yield self._span(1, lane, span.name, "driver", span.began, span.ended, args)

    def _process_events(self, number: int, spans: npt.NDArray[Any]) -> Iterator[dict[str, Any]]:
        for role, index in sorted({(int(s["role"]), int(s["index"])) for s in spans}):
            name, lane = f"{ROLES[role]} {index}", _lane(role, index)
            yield from _names(number, name, lane)
            own = spans[(spans["role"] == role) & (spans["index"] == index)]
            for span in own[own["kind"] != SpanKind.PULL]:
                kind = SpanKind(int(span["kind"]))
                args, label = self._args(span), kind.name.lower()
                if kind is SpanKind.STAGE:
                    args["worker"] = int(span["other"])
                title = f"{label} chunk {span['chunk']}" if span["chunk"] >= 0 else label
                yield self._span(number, lane, title, label, span["began"], span["ended"], args)
            if ROLES[role] != "worker":
                yield from self._waits(number, lane, own)

    def _waits(self, number: int, lane: int, own: npt.NDArray[Any]) -> Iterator[dict[str, Any]]:
        """Yield the spans in which a server had nothing to do."""
        ended = None
        for span in own:
            if ended is not None and span["began"] - ended > _LEAST_WAIT:
                what = "commit" if span["kind"] == SpanKind.APPLY else "pushes"
                args = {**self._args(span), "for": what}
                args = {name: args[name] for name in ("step", "version", "for") if name in args}
                yield self._span(number, lane, "wait", "wait", ended, span["began"], args)
            ended = span["ended"] if ended is None else max(ended, span["ended"])

    def _args(self, span: Any) -> dict[str, Any]:
        kind, number, version = int(span["kind"]), int(span["number"]), int(span["version"])
        args = {"step": self.shape.step_of(kind, number, version), "version": version}
        args["chunk"] = int(span["chunk"])
        if kind in (SpanKind.PUSH, SpanKind.STAGE):
            args["sequence"] = number
        return {name: value for name, value in args.items() if value is not None and value != -1}

    def _travelling(
        self, processes: Sequence[tuple[int, npt.NDArray[Any]]]
    ) -> Iterator[dict[str, Any]]:
        """Yield two events for each chunk of gradients and of weights: at its sender, and at its receiver."""
        taken: dict[tuple[int, ...], float] = {}  # by worker, sequence, chunk
        applied: dict[tuple[int, int], float] = {}  # by version, chunk
        for _, spans in processes:
            for span in spans[np.isin(spans["kind"], (SpanKind.STAGE, SpanKind.APPLY))]:
                chunk = int(span["chunk"])
                if span["kind"] == SpanKind.STAGE:
                    key = (int(span["other"]), int(span["number"]), chunk)
                    taken[key] = max(taken.get(key, 0.0), float(span["began"]))
                else:
                    made = (int(span["version"]), chunk)
                    applied[made] = min(applied.get(made, np.inf), float(span["ended"]))
        identity = 0
        begin: float | None
        end: float | None
        for number, spans in processes:
            for span in spans[np.isin(spans["kind"], (SpanKind.PUSH, SpanKind.PULL))]:
                chunk, version, began = int(span["chunk"]), int(span["version"]), span["began"]
                if span["kind"] == SpanKind.PUSH:
                    name, key = "push", (int(span["index"]), int(span["number"]), chunk)
                    begin, end = float(began), taken.get(key)
                else:
                    name, begin, end = "pull", applied.get((version, chunk)), float(began)
                if begin is None or end is None:
                    continue
                identity += 1
                args = {**self._args(span), "worker": int(span["index"])}
                lane = _lane(int(span["role"]), int(span["index"]))
                common = {
                    "name": name,
                    "cat": "transfer",
                    "id": identity,
                    "pid": number,
                    "tid": lane,
                }
                yield {"ph": "b", "ts": self._micros(begin), "args": args, **common}
                yield {"ph": "e", "ts": self._micros(max(begin, end)), **common}

    def _span(
        self,
        process: int,
        lane: int,
        name: str,
        category: str,
        began: float,
        ended: float,
        args: dict[str, Any],
    ) -> dict[str, Any]:
        ts = self._micros(began)
        event = {"name": name, "cat": category, "pid": process, "tid": lane, "args": args}
        return {"ph": "X", "ts": ts, "dur": round(self._micros(ended) - ts, 3), **event}

    def _micros(self, seconds: float) -> float:
        return round(1e6 * (float(seconds) - self.began), 3)


def _lane(role: int, index: int) -> int:
    """Return the number of a role's thread in the trace."""
    return 1 + index * len(ROLES) + role


def _names(process: int, name: str, lane: int = 0) -> Iterable[dict[str, Any]]:
    """Yield the event that names a process, or a lane of it."""
    what = "thread_name" if lane else "process_name"
    yield {"ph": "M", "name": what, "pid": process, "tid": lane, "args": {"name": name}}
