"""Everything with which a job continues when its processes change, wherever it lies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steepest.data.sampler import Remaining, SamplePlan
from steepest.engine.commit_log import CommitLog
from steepest.engine.job import Job
from steepest.engine.survivors import RecoveredState
from steepest.engine.worker_state import WorkerState, buffers_of
from steepest.state.optimizer_state import OptimizerState
from steepest.tensors.dtypes import Tensors


@dataclass(frozen=True)
class Copy:
    """Everything that a job's processes hold, at one version.

    Attributes:
        job, plan, seed: of the job whose version it is.
        found: the state of servers and coordinator, or the processes that hold its chunks.
        log: an empty log of that job.
        workers: what each worker alone had; empty where workers have nothing of their own, and
            where `found` names processes, because their workers are there too.
        part: how many forms the job had before, of which there are logs.
    """

    job: Job
    plan: SamplePlan | None
    seed: int
    found: RecoveredState
    log: CommitLog
    workers: Sequence[WorkerState] = ()
    part: int = 0

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
        optimizer: the optimizer's state, that of workers by their numbers in the job as it is; in
            the job of `copy` where that is the driver's.
        workers: the number of workers whose shares of state `optimizer` has or lacks.
        copied: whether `copy` is the driver's, so that survivors go back to it too.
    """

    copy: Copy
    optimizer: OptimizerState
    workers: int
    copied: bool = False

    @property
    def found(self) -> RecoveredState:
        """The state of servers and coordinator, or the processes that hold its chunks."""
        return self.copy.found

    def is_held_by(self, processes: Collection[Any]) -> bool:
        """Return whether nothing newer than the driver's copy is lost if only these processes live.

        So it is where the driver was sent the newest state, or one of the processes has each chunk.
        """
        if self.copied:
            return False
        holders = self.found.holders
        return holders is None or all(
            any(one in processes for one in each) for each in holders.values()
        )

    @classmethod
    def from_copy(cls, copy: Copy) -> Stock:
        """Return what the driver's copy holds, and nothing of what survivors hold."""
        left_out = {index: each.left_out for index, each in enumerate(copy.workers)}
        inner = {
            index: each.inner for index, each in enumerate(copy.workers) if each.inner is not None
        }
        rows = {index: each.rows for index, each in enumerate(copy.workers)}
        optimizer = OptimizerState.of(copy.job, copy.found, left_out, inner, rows)
        return cls(copy, optimizer, copy.job.num_workers, copied=True)

    def renumbered(self, numbers: Mapping[int, int]) -> Stock:
        """Return the same with other numbers of workers, without those that have none.

        The driver's copy stays whole: of it, as of a checkpoint, each worker gets its own share
        where as many workers continue as there were, and otherwise the mean.
        """
        if self.copied:
            return self
        return replace(self, optimizer=self.optimizer.renumbered(numbers))

    def buffers(self) -> tuple[dict[int, Tensors], Tensors] | None:
        """Return buffers by replica, and their mean; None where workers keep those that they have."""
        weights, layout = self.found.weights, self.copy.job.description.layout
        if not self.copied or weights is None or not any(any(w.buffers) for w in self.copy.workers):
            return None
        return buffers_of(self.copy.workers, layout.named(weights))

    def only_in(self, processes: Collection[Any]) -> Stock:
        """Return the same without the holders of chunks that are not among some processes."""
        if self.found.holders is None:
            return self
        holders = {
            chunk: [one for one in each if one in processes]
            for chunk, each in self.found.holders.items()
        }
        return replace(self, copy=replace(self.copy, found=replace(self.found, holders=holders)))
