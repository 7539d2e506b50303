"""The optimizer's state, read from servers or workers and given to those of another job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from steepest.core.engine.exchange import COMPRESSION
from steepest.core.engine.job import Job
from steepest.core.engine.optimizer_slices import assemble, disassemble
from steepest.core.engine.replica_states import mean_states
from steepest.core.engine.replicas import InnerOptimizerState
from steepest.core.engine.shared_state import SharedState
from steepest.core.optim.portable import Record, is_text
from steepest.core.optim.spec import ScheduleState
from steepest.core.tensors.dtypes import Tensors
from steepest.core.tensors.layout import ParameterLayout
from steepest.runtime import remote_functions
from steepest.runtime.cluster import Cluster
from steepest.runtime.worker_state import WorkerState, worker_state
from steepest.strategies.compression.gradient_compressor import check_residuals
from steepest.strategies.local_sgd.own_weights import is_own_weight
from steepest.tables.job.job_tables import UNPUSHED, dealing_of

#: Calls a function with these arguments, and the replicas of some workers before them; returns what
#: each returned.
Call = Callable[..., list[Any]]
#: State by worker, each by name.
Own = Mapping[int, Mapping[str, torch.Tensor]]
Apart = Mapping[str, torch.Tensor]  # a checkpoint's tensors by replica, and others
_CHANGE = "change/"  # before the names of what was left out under local SGD, which is of weights
_OWN, _OUTER, _LEFT_OUT, _ROWS = "local:", "outer:", "compression:", "rows:"
#: In a checkpoint, the name of the state of a worker that has none: of how many workers a state is has to be known.
_NOTHING = "nothing"


@dataclass(frozen=True)
class OptimizerState:
    """The state of the model's optimizer, in a form that fits any strategy."""

    state: dict[str, torch.Tensor]  # by "parameter/key"; with local SGD the mean over workers
    plain: list[str]  # names of those that stand for other values, see `optim.portable`
    # where the learning-rate schedule stands, or stood some steps before; None if it cannot tell
    schedule: ScheduleState | None = None
    # with local SGD each worker's own state, and the outer optimizer's
    own: Own = field(default_factory=dict)
    outer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    left_out: Own = field(default_factory=dict)  # with compression, see `GradientCompressor.state`
    # gradients of rows that workers have not pushed, see `DelayedRows.state`
    rows: Own = field(default_factory=dict)

    @classmethod
    def collect(
        cls,
        job: Job,
        held: SharedState,  # of servers and coordinator
        numbers: Iterable[int],  # of the workers, in the order in which `call` asks them
        step: int,
        call: Call,  # used with local SGD, compression, embedding tables
        ledger: Sequence[int]
        | None = None,  # of a job that goes on elsewhere, where shares are leased
    ) -> OptimizerState:
        """Return the optimizer's state of a job."""
        own: dict[int, WorkerState] = {}
        if job.stores is not None or job.compresses or job.config.local:
            own = dict(zip(numbers, call(worker_state, step, ledger), strict=True))
        return cls.of(job, held, own)

    @classmethod
    def of(cls, job: Job, held: SharedState, workers: Mapping[int, WorkerState]) -> OptimizerState:
        """Return the optimizer's state of a job from its parts, those of workers by index."""
        layout = job.description.layout
        on_servers, plain = assemble(layout, dense(layout, held.records))
        rows, left_out = _exchanged(workers, UNPUSHED), _exchanged(workers, COMPRESSION)
        if job.config.local:
            left_out = {
                worker: Tensors((_CHANGE + name, value) for name, value in state.items())
                for worker, state in left_out.items()
            }
        if not job.config.local:
            schedule = held.state.get("schedule")
            return cls(on_servers, plain, schedule, left_out=left_out, rows=rows)
        inner = {worker: each.inner for worker, each in workers.items() if each.inner is not None}
        mean, plain, schedule = mean_inner(list(inner.values()))
        own = {worker: state for worker, (state, _, _) in inner.items()}
        own = own if any(own.values()) else {}
        return cls(mean, plain, schedule, own, on_servers, left_out, rows)

    @classmethod
    def saved(
        cls, state: dict[str, torch.Tensor], manifest: Mapping[str, Any], apart: Apart
    ) -> tuple[OptimizerState, Apart]:
        """Return a checkpoint's state, and its other tensors by replica."""

        def by_worker(prefix: str) -> Own:
            states: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in apart.items():
                if key.startswith(prefix):
                    worker, _, name = key.removeprefix(prefix).partition("/")
                    state = states.setdefault(int(worker), {})
                    if name != _NOTHING:
                        state[name] = value
            return states

        outer = {k.removeprefix(_OUTER): v for k, v in apart.items() if k.startswith(_OUTER)}
        own, left_out, rows = map(by_worker, (_OWN, _LEFT_OUT, _ROWS))
        optimizer = cls(
            state, manifest["plain"], manifest.get("schedule"), own, outer, left_out, rows
        )
        prefixes = (_OWN, _OUTER, _LEFT_OUT, _ROWS)
        return optimizer, {k: v for k, v in apart.items() if not k.startswith(prefixes)}

    @property
    def apart(self) -> dict[str, torch.Tensor]:
        """The tensors with names of their own in a checkpoint: "local:WORKER/...", "outer:...",
        "compression:WORKER/...", "rows:..."."""
        parts = ((_OWN, self.own), (_LEFT_OUT, self.left_out), (_ROWS, self.rows))
        return {_OUTER + name: value for name, value in self.outer.items()} | {
            f"{prefix}{worker}/{name}": value
            for prefix, own in parts
            for worker, state in own.items()
            for name, value in (state or {_NOTHING: torch.empty(0)}).items()
        }

    def renumbered(self, numbers: Mapping[int, int]) -> OptimizerState:
        """Return the state with workers renumbered, by old number, without those that get none.

        Gradients of rows that the latter have not pushed are left for any worker to push.
        """

        def staying(own: Own) -> Own:
            return {numbers[worker]: state for worker, state in own.items() if worker in numbers}

        others = itertools.count(max(numbers.values(), default=-1) + 1)
        rows = {
            numbers[worker] if worker in numbers else next(others): state
            for worker, state in self.rows.items()
        }
        own, left_out = staying(self.own), staying(self.left_out)
        return replace(self, own=own, left_out=left_out, rows=rows)

    def place(self, cluster: Cluster, *, same: bool = False) -> list[Record]:
        """Give workers' state to them; return the servers' state.

        Args:
            same: whether there are as many workers as before: then those without state here are
                successors of dead ones, and the others keep theirs. Otherwise all get the mean if
                the state is that of another number of workers.

        Raises:
            CheckpointError: there is state of an unknown or frozen parameter.
        """
        layout, workers = cluster.job.description.layout, range(cluster.job.num_workers)
        if cluster.job.stores is not None:
            rows = self.rows_for(cluster.job)
            cluster.workers.call(remote_functions.load_exchanged, UNPUSHED, rows, Tensors())
        records = disassemble(layout, self.state, self.plain)
        if cluster.job.config.local:
            records = disassemble(layout, self.outer, [])
        if cluster.job.compresses:
            left_out, mean = self._left_out_of(cluster.job), dict[str, torch.Tensor]()
            check_residuals(layout, left_out.values())
            if same and left_out:
                left_out = {worker: left_out.get(worker, {}) for worker in workers}
            elif left_out and len(left_out) != len(workers):
                left_out, mean = {}, _mean_left_out(left_out)
            cluster.workers.call(remote_functions.load_exchanged, COMPRESSION, dict(left_out), mean)
        if not cluster.job.config.local:
            return records
        own = dict(self.own) if same or len(self.own) == len(workers) else {}
        others = self.state | _mean_own_weights(self.own)
        cluster.workers.call(
            remote_functions.load_inner_state, own, others, self.plain, self.schedule
        )
        return records

    def _left_out_of(self, job: Job) -> Own:
        """Return the residuals of compression in workers of a job, of gradients or of changes of weights."""
        errors = {
            worker: {
                name.removeprefix(_CHANGE): value
                for name, value in state.items()
                if name.startswith(_CHANGE) == job.config.local
            }
            for worker, state in self.left_out.items()
        }
        return errors if any(errors.values()) else {}

    def rows_for(self, job: Job) -> dict[int, Tensors]:
        """Return the gradients of rows to be pushed, by worker of a job.

        Where each push is an update by itself, worker 0 pushes all of them.

        Raises:
            CheckpointError: they do not fit the job's tables.
        """
        rows = self.rows
        if not rows or (dealing := dealing_of(job)) is None:
            return {}
        from steepest.tables.job.delayed_rows import divided  # needs what only tables need

        pushers = 1 if job.pushes_per_update == 1 else job.num_workers
        states = [rows[worker] for worker in sorted(rows)]
        return dict(enumerate(divided(dealing, states, pushers)))


def dense(layout: ParameterLayout, records: Iterable[Record]) -> list[Record]:
    """Return the records of a state but those of opaque chunks, which are rows, see `rows_of`."""
    opaque = set(layout.opaque_chunks)
    return [record for record in records if record[0] not in opaque]


def _exchanged(workers: Mapping[int, WorkerState], what: str) -> dict[int, Tensors]:
    """Return a part of the state of workers' exchanges, by worker; empty if no worker has any."""
    parts = {w: each.exchanged[what] for w, each in workers.items() if what in each.exchanged}
    return parts if any(parts.values()) else {}


def mean_inner(inner_states: Sequence[InnerOptimizerState]) -> InnerOptimizerState:
    """Return the mean of workers' own optimizer states, with the furthest schedule, for a worker that has none."""
    states = [
        {n: v for n, v in each.items() if not is_own_weight(n)} for each, _, _ in inner_states
    ]
    begun = [state for state in states if state]  # not by those that have had no samples yet
    names = set.intersection(*map(set, begun)) if begun else set()
    one = {name for name in names if not _can_be_averaged([state[name] for state in begun])}
    one |= {name for name in names if name.rpartition(":")[0] in one}  # what is inside of those
    shared = [{name: state[name] for name in sorted(names - one)} for state in begun]
    mean = mean_states(shared, [1.0] * len(begun)) if begun else {}
    mean |= {name: begun[0][name] for name in sorted(one)}
    schedules = [schedule for _, _, schedule in inner_states if schedule is not None]
    furthest = max(schedules, key=lambda schedule: int(schedule["step"]), default=None)
    return mean, sorted({name for _, plain, _ in inner_states for name in plain}), furthest


def _can_be_averaged(values: Sequence[torch.Tensor]) -> bool:
    """Return whether several workers' values of a name have one form: tensors, or the same text."""
    first = values[0]
    alike = all((v.shape, v.dtype) == (first.shape, first.dtype) for v in values)
    return alike and not (is_text(first) and any(not torch.equal(first, v) for v in values))


def _mean_own_weights(own: Own) -> Tensors:
    """Return the mean of workers' own weights, for a worker that has none."""
    states = [state for state in own.values() if state]  # not of those that have not begun yet
    names = (
        set.intersection(*(set(filter(is_own_weight, state)) for state in states)) if states else ()
    )
    common = [{name: state[name] for name in sorted(names)} for state in states]
    return mean_states(common, [1.0] * len(common)) if names else Tensors()


def _mean_left_out(own: Own) -> dict[str, torch.Tensor]:
    """Return the mean of the residuals of compression, for other workers; the sum of all parts stays."""
    names = {name for state in own.values() for name in state if name.startswith("left/")}
    mean: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        parts = [state[name] for state in own.values() if name in state]
        mean[name] = torch.stack(parts).sum(0).div_(len(own))
    factors: dict[str, torch.Tensor] = {}
    for _, state in sorted(own.items(), reverse=True):  # the first worker's that has one
        factors |= {name: value for name, value in state.items() if not name.startswith("left/")}
    return {**mean, **factors}
