"""Everything with which a job continues when its processes change, wherever it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from steepest.cluster.optimizer_state import OptimizerState
from steepest.data.sampler import Remaining, SamplePlan
from steepest.engine.commit_log import CommitLog
from steepest.engine.job import Job
from steepest.engine.survivors import RecoveredState


@dataclass(frozen=True)
class Copy:
    """Weights, servers' optimizer state and the coordinator's state at one version of one job.

    Attributes:
        job, plan, seed: of the job whose version it is.
        found: the state, or the processes that hold its chunks.
        log: an empty log of that job.
    """

    job: Job
    plan: SamplePlan | None
    seed: int
    found: RecoveredState
    log: CommitLog

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


@dataclass(frozen=True)
class Stock:
    """Everything with which a job continues, whatever its processes are then.

    Attributes:
        copy: the state of servers and coordinator.
        optimizer: the optimizer's state, that of workers by their numbers in the job as it is.
        workers: the number of workers whose shares of state `optimizer` has or lacks.
        copied: whether `copy` is the driver's, and the workers' state may be of a later version.
    """

    copy: Copy
    optimizer: OptimizerState
    workers: int
    copied: bool = False

    @property
    def found(self) -> RecoveredState:
        """The state of servers and coordinator, or the processes that hold its chunks."""
        return self.copy.found

    def is_held_by(self, processes: Sequence[Any]) -> bool:
        """Return whether nothing newer than the driver's copy is lost if only these processes live.

        So it is where the driver was sent the newest state, or one of the processes has each chunk.
        """
        if self.copied:
            return False
        holders = self.found.holders
        return holders is None or all(
            any(one in processes for one in each) for each in holders.values()
        )

    def from_copy(self, copy: Copy) -> Stock:
        """Return the driver's copy together with the workers' state."""
        optimizer = self.optimizer.with_records(copy.job.description.layout, copy.found)
        return replace(self, copy=copy, optimizer=optimizer, copied=True)

    def only_in(self, processes: Sequence[Any]) -> Stock:
        """Return the same without the holders of chunks that are not among some processes."""
        if self.found.holders is None:
            return self
        holders = {
            chunk: [one for one in each if one in processes]
            for chunk, each in self.found.holders.items()
        }
        return replace(self, copy=replace(self.copy, found=replace(self.found, holders=holders)))
