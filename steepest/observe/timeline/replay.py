"""The replay of a trace: how long its steps would have taken if workers had computed for other times.

Each worker's share begins when the new weights are there and its step before has ended; a chunk is taken when it
was sent and, by a server in a worker's process, when that worker has ended its share; a version is committed when
as many gradients as before are ready; weights arrive as long after the commit as they did. What is not one of
these waits (computing, transfers, reducing, updating) lasts as long as recorded. After "Understanding stragglers
in large model training using what-if analysis" (arXiv 2505.05713).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from steepest.observe.timeline.parsed import ParsedTrace, VersionSpans, WorkerStep

#: Returns for how long a worker computes, given what all computed for a version, and its number.
Busy = Callable[[Mapping[int, WorkerStep], int], float]

PARTS = ("idle", "load", "compute", "push", "transfer", "commit", "apply", "pull")
_TOLERANCE = 1e-5  # seconds between what is known exactly


@dataclass(frozen=True)
class ReplayedStep:
    """One version of a replay, in seconds.

    Attributes:
        last: the worker whose gradient was awaited last.
        ahead: by worker, how long before the last one its gradient was ready.
        parts: by name of `PARTS`, what lies between the commit before and this one, on the path of the last
            worker.
    """

    last: int
    ahead: dict[int, float]
    parts: dict[str, float]


@dataclass(frozen=True)
class Replay:
    """The steps, and the mean seconds from one commit to the next."""

    steps: list[ReplayedStep]
    seconds: float


def as_recorded(work: Mapping[int, WorkerStep], worker: int) -> float:
    """Return the seconds for which a worker computed, as recorded."""
    return work[worker].busy


def without_slowness(*slow: int) -> Busy:
    """Return a worker's time as recorded, but for some of them: the median of the others'."""

    def busy(work: Mapping[int, WorkerStep], worker: int) -> float:
        others = [each.busy for other, each in work.items() if other not in slow]
        return statistics.median(others) if worker in slow and others else work[worker].busy

    return busy


def all_alike(work: Mapping[int, WorkerStep], worker: int) -> float:
    """Return the median of all workers' times."""
    return statistics.median(each.busy for each in work.values())


def replay(trace: ParsedTrace, busy: Busy = as_recorded) -> Replay:
    """Return a trace's steps as they would have been; two versions at least."""
    first = trace.versions[0]
    ended = {worker: each.ended for worker, each in first.work.items()}
    arrived, committed = dict(first.arrived), first.committed
    begun, steps, before = committed, [], first
    for version in trace.versions[1:]:
        started, ends, ready = _computed(trace, before, version, (ended, arrived), busy)
        needed = _needed(trace, version)
        last = sorted(ready, key=lambda worker: ready[worker])[needed - 1]
        recorded = sorted(each.ready for each in version.work.values())[needed - 1]
        commit = ready[last] + (version.committed - recorded)
        parts = _parts(before, version.work[last], busy(version.work, last))
        parts["idle"] = started[last] - (committed + parts["apply"] + parts["pull"])
        parts["transfer"] = ready[last] - ends[last]
        parts["commit"] = commit - ready[last]
        ahead = {worker: ready[last] - each for worker, each in ready.items()}
        steps.append(ReplayedStep(last, ahead, parts))
        arrived = {
            worker: commit + (at - version.committed) for worker, at in version.arrived.items()
        }
        ended, committed, before = ends, commit, version
    return Replay(steps, (committed - begun) / max(len(steps), 1))


def _computed(
    trace: ParsedTrace,
    before: VersionSpans,
    version: VersionSpans,
    last: tuple[Mapping[int, float], Mapping[int, float]],
    busy: Busy,
) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Return by worker when its share begins, ends, and is ready on the servers."""
    # last: when the shares before ended, and when the weights arrived
    started: dict[int, float] = {}
    ends: dict[int, float] = {}
    for worker, each in version.work.items():
        recorded = max(before.arrived[worker], before.work[worker].ended)
        started[worker] = max(last[1][worker], last[0][worker]) + (each.started - recorded)
        ends[worker] = started[worker] + busy(version.work, worker)
    ready = {}
    for worker, each in version.work.items():
        scale = (ends[worker] - started[worker]) / each.busy if each.busy > 0 else 1.0
        ready[worker] = ends[worker]
        for chunk, (began, until, process) in each.staged.items():
            sent = each.sent.get(chunk, each.ended)
            now = started[worker] + max(sent - each.started, 0.0) * scale
            if sent >= each.ended:
                now = ends[worker] + (sent - each.ended)
            home = trace.homes.get(process)
            if home is not None and began >= version.work[home].ended:
                sent, now = max(sent, version.work[home].ended), max(now, ends[home])
            ready[worker] = max(ready[worker], now + (until - sent))
    return started, ends, ready


def _needed(trace: ParsedTrace, version: VersionSpans) -> int:
    """Return how many workers' gradients a version had: all except backup workers' that came after the commit."""
    limit = version.committed + 2 * trace.error + _TOLERANCE
    return max(sum(each.ready <= limit for each in version.work.values()), 1)


def _parts(before: VersionSpans, work: WorkerStep, busy: float) -> dict[str, float]:
    """Return the parts other than computing, which last as long as recorded."""
    arrived = before.arrived[work.worker] - before.committed
    applied = min(before.updated - before.committed, arrived)
    others = work.loading + work.pushing
    parts = dict.fromkeys(PARTS, 0.0)
    return parts | {
        "load": work.loading,
        "push": work.pushing,
        "compute": busy - others,
        "apply": applied,
        "pull": arrived - applied,
    }
