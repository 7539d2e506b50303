"""A trace as the steps that it records: what each worker computed and sent, what servers made of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steepest.errors import ConfigurationError
from steepest.observe.timeline.trace_file import read_trace

#: What is raised where an event lacks something, or has a value of another kind.
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass
class WorkerStep:
    """What a worker did for one version; times are seconds of the trace.

    Attributes:
        began, ended: its computation, with what it waited for meanwhile.
        waited, loading, pushing: seconds of that.
        sent: by chunk, when it was handed to the transport.
        staged: by chunk, when a server began and ended to take it, and the process of that server.
    """

    worker: int
    step: int
    began: float
    ended: float
    waited: float = 0.0
    loading: float = 0.0
    pushing: float = 0.0
    sent: dict[int, float] = field(default_factory=dict)
    staged: dict[int, tuple[float, float, int]] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        """Seconds in which it did not wait."""
        return self.ended - self.began - self.waited

    @property
    def started(self) -> float:
        """When it would have begun if it had waited before, and not in between."""
        return self.ended - self.busy

    @property
    def ready(self) -> float:
        """When all of it was on the servers and reported."""
        return max([self.ended, *(ended for _, ended, _ in self.staged.values())])


@dataclass
class VersionSpans:
    """What belongs to one version.

    Attributes:
        work: by worker.
        applied: when each chunk's update began and ended.
        arrived: by worker, when the last chunk of the new weights had come.
    """

    work: dict[int, WorkerStep] = field(default_factory=dict)
    applied: list[tuple[float, float]] = field(default_factory=list)
    arrived: dict[int, float] = field(default_factory=dict)

    @property
    def committed(self) -> float:
        """When the first update began."""
        return min(began for began, _ in self.applied)

    @property
    def updated(self) -> float:
        """When the last update had ended."""
        return max(ended for _, ended in self.applied)


@dataclass
class ParsedTrace:
    """A trace.

    Attributes:
        versions: of all members' gradients, in order; of an asynchronous strategy none.
        work: all that workers computed, by worker, in order.
        waits: seconds between two shares, by worker.
        homes: by process, the worker in it; servers in workers' processes take pushes between two steps.
        error: the greatest error of any clock, in seconds.
        nodes: on which the job ran.
        chunks: into which what is trained is cut, as far as steps show it.
    """

    strategy: str
    needs_all: bool
    servers: int
    versions: list[VersionSpans]
    work: dict[int, list[WorkerStep]]
    waits: dict[int, float]
    homes: dict[int, int]
    error: float
    lost: int
    nodes: int
    chunks: int


def parse(path: str | Path) -> ParsedTrace:
    """Return what a trace records.

    Raises:
        ConfigurationError: it is no whole trace of steepest, or has no step of which all is there.
    """
    events, description = read_trace(path)
    try:
        trace = _parsed(events, description)
    except NONSENSE as error:
        raise makes_no_sense(path, error) from error
    if not (trace.versions if trace.needs_all else trace.work):
        raise ConfigurationError(
            f"{path} has no whole step: record at least three, as with sgd.timeline(...): sgd.fit(steps=10)"
        )
    return trace


def makes_no_sense(path: str | Path, error: Exception) -> ConfigurationError:
    """Return the error for a trace with impossible events."""
    return ConfigurationError(
        f"{path} is no whole trace: an event of it makes no sense: {error!r:.200}"
    )


def _parsed(events: Sequence[Mapping[str, Any]], description: Mapping[str, Any]) -> ParsedTrace:
    lanes = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    roles = {lane: _role(name) for lane, name in lanes.items()}
    homes = {pid: index for (pid, _), (role, index) in roles.items() if role == "worker"}
    servers = {index for role, index in roles.values() if role == "server"}
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"]))
    work, waits = _of_workers(spans, roles)
    _add_staged(spans, roles, work)
    needs_all, versions = (
        bool(description["needs_all"]),
        defaultdict[int, VersionSpans](VersionSpans),
    )
    for of_worker in work.values():
        for version, each in of_worker.items():
            versions[version + 1].work[each.worker] = each
    for span in spans:
        if span["cat"] == "apply":
            began, ended = _edges(span)
            versions[span["args"]["version"]].applied.append((began, ended))
    for event, end in _transfers(events):
        if event["name"] == "pull":
            arrived = versions[event["args"]["version"]].arrived
            worker = event["args"]["worker"]
            arrived[worker] = max(arrived.get(worker, 0.0), end)
    clocks = [each["error_ms"] / 1e3 for each in description["clocks"]]
    whole = _whole(versions, len(work)) if needs_all else []
    chunks = {each["args"].get("chunk", 0) for each in spans if each["cat"] == "apply"}
    return ParsedTrace(
        str(description["strategy"]), needs_all, len(servers), whole,
        {worker: list(each.values()) for worker, each in sorted(work.items())},
        waits, homes, max(clocks, default=0.0), int(description["lost_spans"]), max(len(clocks), 1), len(chunks),
    )  # fmt: skip


def _role(name: str) -> tuple[str, int]:
    role, _, index = name.partition(" ")
    return (role, int(index)) if index.isdecimal() else (role, -1)


def _edges(span: Mapping[str, Any]) -> tuple[float, float]:
    """Return when a span began and ended, in seconds."""
    began, ended = _seconds(span["ts"]), _seconds(span["ts"] + span["dur"])
    if ended < began:
        raise ValueError(f"a span of {span['dur']!r:.40} microseconds")
    return began, ended


def _seconds(microseconds: float) -> float:
    seconds = microseconds / 1e6
    if not math.isfinite(seconds):
        raise ValueError(f"a time of {microseconds!r:.40} microseconds")
    return seconds


def _of_workers(
    spans: Sequence[Mapping[str, Any]], roles: Mapping[tuple[int, int], tuple[str, int]]
) -> tuple[dict[int, dict[int, WorkerStep]], dict[int, float]]:
    """Return what workers computed, by worker and version, and how long they waited between two shares."""
    work: defaultdict[int, dict[int, WorkerStep]] = defaultdict(dict)
    waits: defaultdict[int, float] = defaultdict(float)
    open_steps: dict[int, WorkerStep] = {}
    for span in spans:
        role, worker = roles[span["pid"], span["tid"]]
        if role != "worker":
            continue
        (began, ended), kind = _edges(span), span["cat"]
        step = open_steps.get(worker)
        inside = step is not None and began < step.ended
        if kind == "compute":
            # one that is computed again, after a failure, takes the place of the one before
            number, version = span["args"].get("step", 0), span["args"].get("version", -1)
            step = open_steps[worker] = WorkerStep(worker, number, began, ended)
            work[worker][version] = step
        elif kind == "wait" and not inside:
            waits[worker] += ended - began
        elif step is not None and inside:
            if kind == "wait":
                step.waited += ended - began
            elif kind == "load":
                step.loading += ended - began
            elif kind == "push":
                step.pushing += ended - began
                step.sent[span["args"]["chunk"]] = began
    return dict(work), dict(waits)


def _add_staged(
    spans: Sequence[Mapping[str, Any]],
    roles: Mapping[tuple[int, int], tuple[str, int]],
    work: Mapping[int, Mapping[int, WorkerStep]],
) -> None:
    """Add when servers, and not aggregators before them, took the chunks of workers' gradients."""
    for span in spans:
        if span["cat"] != "stage" or roles[span["pid"], span["tid"]][0] != "server":
            continue
        arguments = span["args"]
        step = work.get(arguments["worker"], {}).get(arguments.get("version", -1))
        if step is not None:
            step.staged[arguments["chunk"]] = (*_edges(span), span["pid"])


def _transfers(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Yield what travelled, and when it had come, in seconds."""
    ends = {e["id"]: _seconds(e["ts"]) for e in events if e["ph"] == "e"}
    for event in events:
        if event["ph"] == "b" and event["id"] in ends:
            yield event, ends[event["id"]]


def _whole(versions: Mapping[int, VersionSpans], workers: int) -> list[VersionSpans]:
    """Return the longest run of versions of which all workers' computation, update and arrival is there."""
    runs: list[list[VersionSpans]] = [[]]
    before = None
    for number in sorted(versions):
        each = versions[number]
        if before is not None and number != before + 1:
            runs.append([])
        if len(each.work) == workers and each.applied and len(each.arrived) == workers:
            runs[-1].append(each)
            before = number
    return max(runs, key=len)
