"""What steps, evaluations and statistics return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from steepest.messages.driver import Result


@dataclass(frozen=True, slots=True)
class StepResult:
    """One committed step.

    Attributes:
        step: steps committed so far, this one included.
        epoch: the epoch that the step belongs to, from 0; None when the data are streams.
        loss: mean over all samples of all replicas, by weight; NaN when statistics were not
            fetched.
        metrics: means over all samples, by name.
        samples: number of samples in the step.
        staleness: for each contribution, updates committed between its pull and its application.
        timings: seconds, means over workers: "data", "compute", "wait" (for the weights before it).
        gradient_norm: 2-norm of the mean gradient over all that is trained, before clipping; where
            a step is several updates, the mean of their norms. None where it is not computed: with
            ``nonfinite="pass"`` and no `clip_norm`, and with backup workers.
    """

    step: int
    epoch: int | None
    loss: float
    metrics: dict[str, float]
    samples: int
    staleness: tuple[int, ...]
    timings: dict[str, float] = field(default_factory=dict)
    gradient_norm: float | None = None

    @classmethod
    def from_result(cls, result: Result, epoch: int | None) -> StepResult:
        """Return the user's view of the coordinator's result of a step.

        Args:
            epoch: that the step belongs to, which the coordinator does not know.
        """
        return cls(
            result.step,
            epoch,
            float("nan") if result.loss is None else float(result.loss),
            dict(result.metrics or {}),
            result.samples,
            tuple(result.staleness),
            dict(result.timings or {}),
            result.gradient_norm,
        )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Means over a data set.

    Attributes:
        loss: mean over all samples, by weight.
        metrics: likewise, by name.
        samples: number of samples.
    """

    loss: float
    metrics: dict[str, float]
    samples: int


@dataclass(frozen=True)
class Staleness:
    """The staleness of gradients: updates committed between their pull and their application.

    Attributes:
        histogram: number of pushes by staleness.

    Example:
        >>> staleness = Staleness({0: 50, 1: 40, 7: 10})
        >>> staleness.p50, staleness.p95, staleness.max
        (0, 7, 7)
    """

    histogram: dict[int, int]

    def quantile(self, share: float) -> int:
        """Return the least staleness that a share of all pushes (0 to 1) did not exceed.

        0 without pushes.
        """
        needed, seen = share * sum(self.histogram.values()), 0
        for staleness, count in sorted(self.histogram.items()):
            seen += count
            if seen >= needed:
                return staleness
        return 0

    @property
    def p50(self) -> int:
        """The median."""
        return self.quantile(0.5)

    @property
    def p95(self) -> int:
        """The 95th percentile."""
        return self.quantile(0.95)

    @property
    def max(self) -> int:
        """The maximum."""
        return max(self.histogram, default=0)


class Event(NamedTuple):
    """A change of a job's processes: a mark on the time line.

    Attributes:
        time: seconds since the epoch, as `time.time` has it.
        kind: "replaced" (a successor took the place of a worker), "left" (the others go on without
            a worker), "returned" (its successor joined them), "recovered" (other processes took
            over the chunks of a dead one), "moved" (away from a node that will go), "resized".
        step: committed by then.
        line: the line of the log.
    """

    time: float
    kind: str
    step: int
    line: str


class Straggler(NamedTuple):
    """A slow worker.

    Attributes:
        worker: its index.
        factor: how many times as long as the median of the others it computes.
        since: the step since which it does.
    """

    worker: int
    factor: float
    since: int


def stragglers(paces: Mapping[int, float], since: Mapping[int, int]) -> tuple[Straggler, ...]:
    """Return the slow workers, and how slow they are.

    Args:
        paces: by worker, seconds of computing for its share of a step.
        since: by slow worker, the number of steps committed before it became slow.

    Example:
        >>> stragglers({0: 0.1, 1: 0.5, 2: 0.1}, {1: 40})
        (Straggler(worker=1, factor=5.0, since=41),)
    """
    found = []
    for worker, step in since.items():
        others = sorted(pace for other, pace in paces.items() if other != worker)
        found.append(Straggler(worker, paces[worker] / others[len(others) // 2], step + 1))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The counters of a job.

    Attributes:
        step: steps committed, those before a restore included.
        version: updates committed; as many as steps in synchronous modes.
        generation: memberships so far.
        samples, seconds: trained since the job began, and spent in `step` and `fit`.
        bytes_pushed: gradient bytes that left workers for servers, in the precision in which they
            did.
        bytes_pulled: bytes of weights that came to workers, likewise; bytes in shared memory count
            too.
        refused: frames and connections refused by any process.
        memory: bytes that each process holds in memory, by its name ("worker 0"); what processes of
            a host share counts in each of them. About 300 MB are Python, torch and Ray. Empty where
            it cannot be known.
        skipped: updates left out because of NaN or infinity (``nonfinite="skip"``).
        dropped: gradients that were too late (backup workers) or too stale; their samples were
            computed again.
        staleness: of all gradients that were applied.
        num_workers, num_servers: worker processes, and servers, in processes of their own or in
            those of workers.
        replaced: number of processes that died and have a successor.
        paces: by worker, seconds of computing that its share of a step takes, a running mean; empty
            until steps with statistics were taken.
        stragglers: workers that compute over twice as long as the median of the others.
        events: deaths, departures, returns and joins of processes, and what each cost, oldest
            first.
    """

    step: int
    version: int
    generation: int
    samples: int
    seconds: float
    bytes_pushed: int
    bytes_pulled: int
    refused: int
    memory: Mapping[str, int]
    skipped: int
    dropped: int
    staleness: Staleness
    num_workers: int
    num_servers: int
    replaced: int = 0
    paces: Mapping[int, float] = field(default_factory=dict)
    stragglers: tuple[Straggler, ...] = ()
    events: tuple[Event, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """The mean over the time spent training."""
        return self.samples / self.seconds if self.seconds else 0.0
