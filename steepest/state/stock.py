"""Everything with which a job continues when its processes change, wherever it lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steepest.core.data.sampler import Remaining, SamplePlan
from steepest.core.engine.client import Snapshot
from steepest.core.engine.commit_log import Commit, CommitLog
from steepest.core.engine.job import Job
from steepest.core.tensors.dtypes import Tensors
from steepest.runtime.survivors import RecoveredState
from steepest.runtime.worker_state import WorkerState, buffers_of
from steepest.state.optimizer_state import OptimizerState


@dataclass(frozen=True)
class Stock:
    """Everything with which a job continues, whatever its processes are then: the state of one version."""

    job: Job  # whose version it is
    plan: SamplePlan | None
    seed: int
    found: RecoveredState  # of servers and coordinator, or the processes that hold chunks
    log: CommitLog  # an empty one of that job
    #: In the driver's copy, to which survivors go back too, what each worker alone had, if anything.
    workers: Sequence[WorkerState] | None = None
    #: Elsewhere the optimizer's state, that of workers by their numbers in the job as it is.
    collected: OptimizerState | None = None
    part: int = 0  # how many forms the job had before, of which there are logs

    @property
    def copied(self) -> bool:
        """Whether it is the driver's copy."""
        return self.workers is not None

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.job.step_of(self.found.version)

    @property
    def remaining(self) -> Remaining:
        """The samples still to come."""
        if self.plan is None:
            return Remaining()
        job = self.job
        together = job.strategy.rule.together  # the steps are the ledger
        following, *returned = [self.step * job.shares] if together else self.found.state["ledger"]
        return self.plan.remaining(following, returned, job.shares, job.parts)

    @property
    def optimizer(self) -> OptimizerState:
        """The optimizer's state; of a copy it is made anew each time."""
        if self.collected is not None:
            return self.collected
        return OptimizerState.of(self.job, self.found, dict(enumerate(self.workers or ())))

    def is_held_by(self, processes: Collection[Any]) -> bool:
        """Return whether nothing newer than the driver's copy is lost if only these processes live.

        So it is where the driver was sent the newest state, or one of the processes has each chunk.
        """
        holders = self.found.holders
        return not self.copied and (
            holders is None
            or all(any(one in processes for one in each) for each in holders.values())
        )

    def renumbered(self, numbers: Mapping[int, int]) -> Stock:
        """Return the same with other numbers of workers, without those that have none.

        The driver's copy stays whole: of it, as of a checkpoint, each worker gets its own share
        where as many workers continue as there were, and otherwise the mean.
        """
        if self.collected is None:
            return self
        return replace(self, collected=self.collected.renumbered(numbers))

    def buffers(self) -> tuple[dict[int, Tensors], Tensors] | None:
        """Return buffers by replica, and their mean; None where workers keep those that they have."""
        weights, layout, workers = self.found.weights, self.job.description.layout, self.workers
        if weights is None or workers is None or not any(any(each.buffers) for each in workers):
            return None
        return buffers_of(workers, layout.named(weights))

    def only_in(self, processes: Collection[Any]) -> Stock:
        """Return the same without the holders of chunks that are not among some processes."""
        if self.found.holders is None:
            return self
        holders = {
            chunk: [one for one in each if one in processes]
            for chunk, each in self.found.holders.items()
        }
        return replace(self, found=replace(self.found, holders=holders))


def recovered(found: Snapshot, log: list[Commit] | None) -> RecoveredState:
    """Return what a read of the state has found, with the commits until then, and perhaps later ones."""
    return RecoveredState(found.version, found.state, log, found.weights, found.records)
