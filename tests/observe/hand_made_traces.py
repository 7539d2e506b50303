"""Traces whose steps have known lengths, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from steepest.observe.timeline.trace_file import write_trace

#: Milliseconds of what each step has besides computing.
TRANSFER, REDUCE, COMMIT, APPLY, PULL = 1.0, 2.0, 0.5, 3.0, 1.5
REST = TRANSFER + REDUCE + COMMIT + APPLY + PULL


def lane(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": 1, "args": {"name": name}}


def span(process: int, kind: str, began: float, ended: float, **args: Any) -> dict[str, Any]:
    """A span of some milliseconds."""
    return {
        "ph": "X",
        "name": kind,
        "cat": kind,
        "pid": process,
        "tid": 1,
        "ts": 1e3 * began,
        "dur": 1e3 * (ended - began),
        "args": args,
    }


def synchronous(
    computed: Sequence[Sequence[float]], needed: int | None = None
) -> list[dict[str, Any]]:
    """Return the events of steps in which each worker computes for so many milliseconds: one server, one chunk.

    Args:
        computed: by step, by worker.
        needed: the gradients that a version waits for; None for all. A later one is dropped.
    """
    workers, server = len(computed[0]), 99
    events = [lane(worker + 2, f"worker {worker}") for worker in range(workers)]
    events.append(lane(server, "server 0"))
    begins = [0.0] * workers
    arrived = 0.0
    for version, times in enumerate(computed):
        step = {"step": version + 1, "version": version}
        ready = []
        for worker, milliseconds in enumerate(times):
            begun = max(arrived, begins[worker])
            end = begun + milliseconds
            begins[worker] = end
            events.append(span(worker + 2, "compute", begun, end, **step))
            events.append(span(worker + 2, "push", end, end, **step, chunk=0))
            taken = end + TRANSFER
            ready.append(taken + REDUCE)
            of_push = {**step, "chunk": 0, "worker": worker}
            events.append(span(server, "stage", taken, taken + REDUCE, **of_push))
        commit = sorted(ready)[(needed or workers) - 1] + COMMIT
        made = {"step": version + 1, "version": version + 1, "chunk": 0}
        events.append(span(server, "apply", commit, commit + APPLY, **made))
        arrived = commit + APPLY + PULL
        for worker in range(workers):
            identity = version * workers + worker
            pull = {"name": "pull", "cat": "transfer", "id": identity, "pid": worker + 2, "tid": 1}
            args = {**made, "worker": worker}
            events.append({"ph": "b", "ts": 1e3 * (commit + APPLY), "args": args, **pull})
            events.append({"ph": "e", "ts": 1e3 * arrived, **pull})
    return events


def written(
    path: Path,
    events: list[dict[str, Any]],
    strategy: str = "ps",
    *,
    needs_all: bool = True,
    nodes: int = 1,
) -> Path:
    """Write events as the trace of a job on some nodes, and return its path."""
    clocks = [{"node": str(number), "error_ms": 0.0} for number in range(nodes)]
    about = {"strategy": strategy, "needs_all": needs_all, "lost_spans": 0, "clocks": clocks}
    write_trace(path, events, about)
    return path
