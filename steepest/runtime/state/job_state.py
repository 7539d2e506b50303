"""The state of a job as one value, in which it is read, kept, written and handed over."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steepest.checkpoint import files
from steepest.core.data.sampler import Remaining, SamplePlan
from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.job import Job
from steepest.core.engine.shared_state import SharedState
from steepest.core.tensors.dtypes import Tensors
from steepest.runtime import remote_functions
from steepest.runtime.state.optimizer_state import OptimizerState
from steepest.runtime.state.row_read import rows_of
from steepest.runtime.worker_state import WorkerState, buffers_of
from steepest.tables.files import table_moves
from steepest.tables.files.saved_rows import CheckpointRows
from steepest.tables.job.job_tables import dealing_of

#: Buffers by replica, and their mean.
Buffers = tuple[dict[int, Tensors], Tensors]


@dataclass(frozen=True)
class JobState:
    """The state of one version: everything that a job needs to continue, on whatever processes.

    `StateTransfer.capture` makes it of a running job, and `StateTransfer.install` gives it to one. It
    has three parts: what servers and coordinator hold, what each worker alone has (as it is, or in the
    forms that fit any processes), and the place in the data.
    """

    job: Job  # whose version it is, and by whose numbers of workers
    plan: SamplePlan | None
    seed: int
    shared: SharedState
    log: CommitLog | None = None  # an empty one of that job; None where none explains the state
    #: In the driver's copy, to which survivors go back too, what each worker alone had, if anything.
    workers: Sequence[WorkerState] | None = None
    #: Elsewhere the optimizer's state, that of workers by their numbers in the job as it is.
    collected: OptimizerState | None = None
    #: Those of a checkpoint; None where workers keep theirs.
    collected_buffers: Buffers | None = None
    #: The rows of tables, of a state in terms of another job than servers sent it in.
    collected_rows: CheckpointRows | None = None
    part: int = 0  # how many forms the job had before, of which there are logs

    @classmethod
    def saved(cls, saved: files.Checkpoint, job: Job, data: str) -> JobState:
        """Return a checkpoint's state, for a job; with `data="new"` at epoch 0.

        Raises:
            CheckpointError: it has parts that do not belong to such a job.
        """
        manifest, layout = saved.about, job.description.layout
        tables, dealing = manifest.get("tables", ()), dealing_of(job)
        collected, replicas = OptimizerState.saved(saved.optimizer, manifest, saved.replicas)
        kept = {} if files.changes_rows(saved) else collected.rows
        collected = replace(collected, rows=table_moves.unpushed(kept, tables, dealing))
        weights = layout.allocate()
        layout.write(weights, {entry.name: saved.weights[entry.name] for entry in layout.entries})
        mean = Tensors((k, value) for k, value in saved.weights.items() if k not in layout.index)
        rest = Remaining() if data == "new" else _remaining(manifest)
        plan = job.plan(manifest["step"], rest, manifest["seed"])
        shared = SharedState(job.version_of(manifest["step"]), weights)
        buffers = remote_functions.by_replica(replicas), mean
        return cls(
            job, plan, manifest["seed"], shared, collected=collected, collected_buffers=buffers
        )

    def checkpoint(
        self, signature: files.JobSignature, ends: Sequence[int], rates: Any
    ) -> files.Checkpoint:
        """Return the state as a checkpoint to be written; `signature` has no buffers yet."""
        assert self.shared.weights is not None
        assert self.collected_buffers is not None
        rest, optimizer, (replicas, mean) = self.remaining, self.optimizer, self.collected_buffers
        manifest = {
            "step": self.step,
            "epoch": rest.epoch,
            "offset": rest.offset,
            "left": rest.left,
            "begun": rest.begun,
            "updates": self.job.updates_before(self.step),
            "ends": list(ends),
            "seed": self.seed,
            "unfrozen": sorted(self.job.unfrozen),
            "rates": rates,
            "schedule": optimizer.schedule,
        }
        return files.gather(
            replace(signature, buffers=mean), self.shared.weights,
            (optimizer.state, optimizer.plain), list(replicas.values()), manifest, optimizer.apart,
        )  # fmt: skip

    @property
    def copied(self) -> bool:
        """Whether it is the driver's copy."""
        return self.workers is not None

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.job.step_of(self.shared.version)

    @property
    def remaining(self) -> Remaining:
        """The samples still to come."""
        if self.plan is None:
            return Remaining()
        job = self.job
        ledger = [self.step * job.shares]  # where each worker has its share of each step
        if job.leases_samples:
            ledger = self.shared.state["ledger"]
        following, *returned = ledger
        return self.plan.remaining(following, returned, job.shares, job.parts)

    @property
    def optimizer(self) -> OptimizerState:
        """The optimizer's state; computed anew each time if this is a copy."""
        if self.collected is not None:
            return self.collected
        return OptimizerState.of(self.job, self.shared, dict(enumerate(self.workers or ())))

    @property
    def rows(self) -> CheckpointRows | None:
        """The rows of tables that servers sent, or keep on disk; None where servers keep their shards."""
        if self.job.stores is None:
            return None
        return self.collected_rows or rows_of(self.job, self.shared.records)

    @property
    def has_buffers(self) -> bool:
        """Whether any worker's replica had state of its own, such as buffers."""
        if self.workers is not None:
            return any(any(each.buffers) for each in self.workers)
        return self.collected_buffers is not None and any(self.collected_buffers[0].values())

    @property
    def buffers(self) -> Buffers | None:
        """Buffers by replica, and their mean; None if workers keep their own."""
        weights, description, workers = self.shared.weights, self.job.description, self.workers
        if weights is None or workers is None or not any(any(each.buffers) for each in workers):
            return self.collected_buffers
        return buffers_of(workers, description.layout.named(weights), description)

    def is_held_by(self, processes: Collection[Any]) -> bool:
        """Return whether these processes suffice to lose nothing newer than the driver's copy.

        They do if the driver was sent the newest state, or each chunk is in one of the processes.
        """
        holders = self.shared.holders
        return not self.copied and (
            holders is None
            or all(any(one in processes for one in each) for each in holders.values())
        )

    def renumbered(self, numbers: Mapping[int, int]) -> JobState:
        """Return the state with workers renumbered, without those that get no number.

        The driver's copy stays whole: from it, as from a checkpoint, each worker gets its own share
        if as many workers continue as there were, and otherwise the mean.
        """
        if self.collected is None:
            return self
        return replace(self, collected=self.collected.renumbered(numbers))

    def only_in(self, processes: Collection[Any]) -> JobState:
        """Return the state with only these processes as holders of chunks."""
        if self.shared.holders is None:
            return self
        holders = {
            chunk: [one for one in each if one in processes]
            for chunk, each in self.shared.holders.items()
        }
        return replace(self, shared=replace(self.shared, holders=holders))

    def for_job(self, job: Job) -> JobState:
        """Return the state in terms of another job, whose ledger begins anew with its plan."""
        weights, shared = None, self.shared
        if shared.weights is not None:
            layout = job.description.layout
            layout.write(
                weights := layout.allocate(), self.job.description.layout.named(shared.weights)
            )
        return replace(
            self,
            job=job,
            plan=job.plan(self.step, self.remaining, self.seed),
            shared=SharedState(
                job.version_of(self.step),
                weights,
                state={
                    key: shared.state[key] for key in ("history", "open") if key in shared.state
                },
            ),
            # what is left of the driver's copy: each worker's own, in a form that fits any processes
            workers=None,
            collected=self.optimizer,
            collected_buffers=self.buffers,
            collected_rows=self.rows,
        )


def _remaining(manifest: Mapping[str, Any]) -> Remaining:
    """Return the samples that are still to come according to a checkpoint."""
    left = tuple((e, b, t) for e, b, t in manifest.get("left", ()))
    begun = tuple((e, tuple(b) if isinstance(b, list) else b) for e, b in manifest.get("begun", ()))
    return Remaining(manifest["epoch"], manifest["offset"], left, begun)
