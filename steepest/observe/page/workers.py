"""How fast each worker is, against the others and against itself, and who is waited for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from steepest.observe.job_record import typical
from steepest.observe.page.thinning import plain, short

_SPANS = 200  # of a page
_EARLIER = 3  # spans that a worker needs before the last one to be compared with itself


class WorkerTimes:
    """What workers spent steps on: means of spans of steps, and the last steps one by one."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []  # rows of kind "workers"
        self._best: dict[str, float] | None = None  # see `usual_times`; None where it is not known

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a span, in place of those with the same steps; an error, such as ValueError: it is no span."""
        _check_span(row)
        while self.spans and self.spans[-1]["step"] >= row["first"]:
            self.spans.pop()
        self.spans.append(dict(row))
        self._best = None

    def as_json(
        self, now: Mapping[str, Any] | None = None, *, whole: bool = True
    ) -> dict[str, Any]:
        """Return what a page shows of workers.

        Args:
            now: the span that has not ended, if any.
            whole: whether to tell of all spans; else of the last steps and scores only.

        Returns:
            "workers" (their numbers), "scores", "lanes" and, of the whole, "spans".
        """
        if (newest := now or (self.spans[-1] if self.spans else None)) is None:
            return {"workers": [], "scores": [], "lanes": [], **({"spans": {}} if whole else {})}
        if self._best is None:  # the last of the spans is compared with those before
            self._best = usual_times(self.spans[:-1])
        lanes = newest.get("last") or (self.spans[-1].get("last") if self.spans else None) or []
        workers = {int(worker) for span in (*self.spans[-1:], newest) for worker in span["spent"]}
        recent = _means(lanes) or newest["spent"]
        parts = {"lanes": lanes, "scores": scores(recent, self._best, lanes)}
        if whole:
            thin = _thinned([*self.spans, *([now] if now else [])], _SPANS)
            workers |= {int(worker) for span in thin for worker in span["spent"]}
            every = sorted(workers)
            parts["spans"] = {
                "workers": every,
                "step": [span["step"] for span in thin],
                "compute": [[_compute(span, worker) for span in thin] for worker in every],
            }
        return {"workers": sorted(workers), **parts}


def _check_span(row: Mapping[str, Any]) -> None:
    """Check a span that comes from a file; an error of any kind: it is no span."""
    shares = [[worker, *parts] for worker, parts in row["spent"].items()]
    shares = [[int(worker), *parts[1:]] for worker, *parts in shares if float(parts[0]) > 0]
    if len(shares) < len(row["spent"]):
        raise ValueError("a worker without steps")
    lanes = row.get("last") or []
    shares += [share for _, _, own in lanes for share in own]
    numbers = [row["first"], *(number for step, now, _ in lanes for number in (step, now))]
    for worker, data, compute, wait in shares:
        numbers += int(worker), data, compute, wait
    if any(plain(number) is None for number in numbers):
        raise ValueError("a number that is none")


def usual_times(spans: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return by worker the computing time that its own best quarter of spans did not exceed; of some spans at least."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for span in spans:
        for worker, (_, _, compute, _) in span["spent"].items():
            times[worker].append(compute)
    return {
        worker: sorted(each)[len(each) // 4]
        for worker, each in times.items()
        if len(each) >= _EARLIER
    }


def scores(
    newest: Mapping[str, Sequence[float]],
    usual: Mapping[str, float],
    lanes: Sequence[Sequence[Any]],
) -> list[dict[str, Any]]:
    """Return for each worker how fast it is.

    Args:
        newest: by worker its steps, and the seconds of its data, computing and wait, as means.
        usual: see `usual_times`.
        lanes: the last steps one by one, see `JobRecord`.

    Returns:
        For each "worker": "compute", "data" and "wait" (seconds of a step); "others": the median of the
        others' computing time divided by its own, 1 where it is as fast, 0.5 where it takes twice as
        long, None without others; "itself": likewise its own usual time; "last": the share of the last
        steps that it was the last to end; "cost": by how many seconds the others' median was done before
        it then, a mean over these steps.

    Example: worker 1 takes twice as long as the others.

        >>> spent = {str(worker): [8, 0.0, 0.2 if worker == 1 else 0.1, 0.0] for worker in range(4)}
        >>> [each["others"] for each in scores(spent, {}, [])]
        [1.0, 0.5, 1.0, 1.0]
    """
    waited = _waited_for(lanes)
    rows = []
    for worker, (_, data, compute, wait) in newest.items():
        others = typical(each[2] for other, each in newest.items() if other != worker)
        last, cost = waited.get(int(worker), (0.0, 0.0))
        rows.append(
            {
                "worker": int(worker),
                "data": data,
                "compute": compute,
                "wait": wait,
                "others": short(others / compute) if others and compute else None,
                "itself": short(usual[worker] / compute) if worker in usual and compute else None,
                "last": short(last),
                "cost": short(cost),
            }
        )
    return rows


def _means(lanes: Sequence[Sequence[Any]]) -> dict[str, list[float]]:
    """Return by worker its steps among the last ones, and the seconds of its parts, as means."""
    sums: dict[str, list[float]] = {}
    for _, _, shares in lanes:
        for worker, *parts in shares:
            own = sums.setdefault(str(worker), [0, 0.0, 0.0, 0.0])
            own[:] = [own[0] + 1, *(a + b for a, b in zip(own[1:], parts, strict=True))]
    return {
        worker: [own[0], *(short(each / own[0]) or 0.0 for each in own[1:])]
        for worker, own in sorted(sums.items(), key=lambda item: int(item[0]))
    }


def _waited_for(lanes: Sequence[Sequence[Any]]) -> dict[int, tuple[float, float]]:
    """Return by worker the share of steps that it ended last, and by how many seconds."""
    ended: dict[int, list[float]] = defaultdict(list)
    for _, _, shares in lanes:
        busy = {int(worker): data + compute for worker, data, compute, _ in shares}
        if len(busy) < 2:
            continue
        slowest = max(busy, key=lambda worker: busy[worker])
        others = typical(seconds for worker, seconds in busy.items() if worker != slowest)
        ended[slowest].append(busy[slowest] - others)
    steps = sum(map(len, ended.values()))
    return {worker: (len(each) / steps, sum(each) / len(each)) for worker, each in ended.items()}


def _compute(span: Mapping[str, Any], worker: int) -> float | None:
    spent = span["spent"].get(str(worker))
    return None if spent is None else spent[2]


def _thinned(spans: Sequence[Mapping[str, Any]], limit: int) -> list[Mapping[str, Any]]:
    """Return at most a number of spans, each with the means of successive ones."""
    together = -(-len(spans) // limit)
    if together == 1:
        return list(spans)
    return [_joined(spans[at : at + together]) for at in range(0, len(spans), together)]


def _joined(spans: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    sums: dict[str, list[float]] = {}
    for span in spans:
        for worker, (steps, *seconds) in span["spent"].items():
            own = sums.setdefault(worker, [0, 0.0, 0.0, 0.0])
            own[:] = [
                own[0] + steps,
                *(a + steps * b for a, b in zip(own[1:], seconds, strict=True)),
            ]
    spent = {
        worker: [own[0], *(short(each / own[0]) for each in own[1:])]
        for worker, own in sums.items()
    }
    return {"first": spans[0]["first"], "step": spans[-1]["step"], "spent": spent}
