"""The results of steps, evaluations and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from steepest.core.messages.driver import Result
from steepest.core.messages.means import Measured, mean_metrics


@dataclass(frozen=True, slots=True)
class StepResult:
    """One committed step.

    Attributes:
        step: steps committed so far, this one included: 1 for the first one. A function given as
            ``learning_rate=`` is called with the steps before it, `step` - 1.
        epoch: the epoch that the step belongs to, from 0; None when the data are streams.
        loss: mean over all samples of all replicas, by weight; NaN when statistics were not
            fetched.
        metrics: means over all samples, by name.
        samples: number of samples in the step.
        staleness: for each contribution, updates committed between its pull and its application.
        timings: seconds, means over workers: "data" (loading its batches), "compute", "wait" (for the weights
            before it, less what of that time was spent on loading), in audited steps "audit" (for another worker's
            samples).
        gradient_norm: 2-norm of the mean gradient over all that is trained, before clipping; where
            a step is several updates, the mean of their norms. None where it is not known: with backup
            workers.
        learning_rate: of each of the optimizer's parameter groups in this step, before any
            correction of staleness; under "local" in the first update of the round.
    """

    step: int
    epoch: int | None
    loss: float
    metrics: dict[str, float]
    samples: int
    staleness: tuple[int, ...]
    timings: dict[str, float] = field(default_factory=dict)
    gradient_norm: float | None = None
    learning_rate: tuple[float, ...] = ()

    @classmethod
    def from_result(
        cls, result: Result, epoch: int | None, learning_rate: tuple[float, ...] = ()
    ) -> StepResult:
        """Return the user's view of the coordinator's result of a step.

        Args:
            epoch: of the step, which the coordinator does not know; None when the data are streams.
            learning_rate: of each parameter group, likewise.
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
            learning_rate,
        )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Means over a data set.

    Attributes:
        loss: mean over all samples, by weight.
        metrics: likewise, by name.
        samples: number of samples.
        step: number of steps committed before.
        epoch: of the last of these steps; None before the first, and when the data are streams.
    """

    loss: float
    metrics: dict[str, float]
    samples: int
    step: int = 0
    epoch: int | None = None

    @classmethod
    def mean_of(cls, parts: Sequence[tuple[Measured, float, int]]) -> EvaluationResult:
        """Return the result over a data set from those of its parts.

        Args:
            parts: (metrics with weights, loss, samples) of each part; a part may lack a metric, and
                the weights are not all 0.
        """
        weight = sum(measured.weight for measured, _, _ in parts)
        return cls(
            sum(loss * measured.weight for measured, loss, _ in parts) / weight,
            mean_metrics(measured for measured, _, _ in parts)[0],
            sum(samples for _, _, samples in parts),
        )


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
        """Return the least staleness that a share of all pushes (0 to 1) did not exceed; 0 without pushes."""
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
        kind: "replaced" (a successor took a dead worker's place), "left" (the other workers
            continue without a dead one), "returned" (its successor joined them), "recovered" (other
            processes took over the chunks of a dead one), "draining" (a node will be removed, such as
            a spot machine that was given notice), "moved" (processes moved away from such a node),
            "resized", "difference" (gradients of an audited step, see `RunConfig.audit`); "changed" (anything
            else for which processes got their roles anew, such as another strategy).
        step: number of steps committed by then.
        line: the line of the log.
        record: what was done and why, and for how many seconds each part of it took, as the logger
            "steepest.changes" has it, see docs/explanation/deaths.md; "" for what is announced only.
    """

    time: float
    kind: str
    step: int
    line: str
    record: str = ""


class Straggler(NamedTuple):
    """A slow worker.

    Attributes:
        worker: its index.
        factor: its computing time, as a multiple of the median of the other workers'.
        since: number of the first step in which it was slow.
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
    slow = []
    for worker, step in since.items():
        others = sorted(pace for other, pace in paces.items() if other != worker)
        usual = others[len(others) // 2] if others else 0.0
        if usual > 0:  # else the others have computed nothing yet
            slow.append(Straggler(worker, paces[worker] / usual, step + 1))
    return tuple(slow)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process of a job, and where it runs.

    Attributes:
        role, index: "worker" or "server", and its number.
        node: Ray's id of the node.
        host: the node's IP address.
        pid: of the process, on its node.
    """

    role: str
    index: int
    node: str
    host: str
    pid: int

    @property
    def name(self) -> str:
        """As messages and `stats()` name it, "worker 0"."""
        return f"{self.role} {self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The counters of a job.

    Attributes:
        step: number of steps committed, those before a restore included.
        version: number of updates committed; as many as steps in synchronous modes.
        generation: number of memberships so far.
        samples: number of samples trained on since the job began.
        seconds: spent in `step` and `fit` since then.
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
        tables: by embedding table, its number of "rows", and since its rows last moved to other
            processes how many ids were "admitted"; how many gradients were "refused" because an id was not,
            "refused_full" because a table had no room, or "ignored" because it is frozen; and how many rows were
            evicted: "evicted_full", "evicted_age", "evicted_norm", "evicted_ttl".
            Of one with rows on disk, also how many were "looked_up", how many of them "read_from_disk", and the
            "bytes_on_disk".
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
    tables: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """The mean over the time spent training."""
        return self.samples / self.seconds if self.seconds else 0.0
