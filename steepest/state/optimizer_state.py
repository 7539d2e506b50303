"""The optimizer's state, read from servers or workers and given to those of another job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from steepest.checkpoint import files
from steepest.compression.gradient_compressor import check_residuals
from steepest.engine.client import Snapshot
from steepest.engine.job import Job
from steepest.engine.local_sgd import InnerOptimizerState
from steepest.engine.replica_states import mean_states
from steepest.engine.survivors import RecoveredState
from steepest.engine.worker_state import WorkerState, worker_state
from steepest.optim.portable import is_text
from steepest.optim.spec import ScheduleState
from steepest.runtime import remote_functions
from steepest.runtime.launch import Cluster
from steepest.tensors.dtypes import Tensors

#: Calls a function with these arguments, and the replicas of some workers before them; returns what
#: each returned.
Call = Callable[..., list[Any]]
#: State by worker, each by name.
Own = Mapping[int, Mapping[str, torch.Tensor]]
_OWN, _OUTER, _LEFT_OUT, _ROWS = "local:", "outer:", "compression:", "rows:"


@dataclass(frozen=True)
class OptimizerState:
    """What the model's optimizer remembers, in a form that fits any strategy.

    Attributes:
        state: tensors by "parameter/key"; with local SGD the mean over workers.
        plain: names of those that stand for other values, see `steepest.optim.portable`.
        apart: with local SGD each worker's own state, as "local:WORKER/parameter/key", and the
            outer optimizer's, as "outer:parameter/key". With compression what each worker has
            left out, as "compression:WORKER/left/parameter", see `GradientCompressor.state`. The
            gradients of rows that each worker has not pushed, as "rows:WORKER/group", see
            `DelayedRows.state`.
        schedule: where the learning-rate schedule stands, or stood some steps before; None if
            its state cannot be told.
    """

    state: dict[str, torch.Tensor]
    plain: list[str]
    apart: dict[str, torch.Tensor] = field(default_factory=dict)
    schedule: ScheduleState | None = None

    @classmethod
    def collect(
        cls,
        job: Job,
        held: Snapshot | RecoveredState,  # of servers and coordinator
        numbers: Iterable[int],  # of the workers, in the order in which `call` asks them
        step: int,
        call: Call,  # used with local SGD, compression, embedding tables
    ) -> OptimizerState:
        """Return the optimizer's state of a job."""
        own: dict[int, WorkerState] = {}
        if job.tables is not None or job.compresses or job.config.local:
            own = dict(zip(numbers, call(worker_state, step), strict=True))
        return cls.of(job, held, own)

    @classmethod
    def of(
        cls, job: Job, held: Snapshot | RecoveredState, workers: Mapping[int, WorkerState]
    ) -> OptimizerState:
        """Return the optimizer's state of a job of which all parts are known, those of workers by index."""
        local = job.config.local
        apart: dict[str, torch.Tensor] = {}
        for worker, own in workers.items():
            left_out = Tensors() if local else own.left_out
            for prefix, part in ((_LEFT_OUT, left_out), (_ROWS, own.rows)):
                apart |= {f"{prefix}{worker}/{name}": value for name, value in part.items()}
        on_servers, plain = files.assemble(job.description.layout, held.records)
        if not local:
            return cls(on_servers, plain, apart, held.state.get("schedule"))
        apart |= {_OUTER + name: value for name, value in on_servers.items()}
        inner = {worker: own.inner for worker, own in workers.items() if own.inner is not None}
        for worker, (state, _, _) in inner.items():
            apart |= {f"{_OWN}{worker}/{name}": value for name, value in state.items()}
        mean, plain, schedule = mean_inner(list(inner.values()))
        return cls(mean, plain, apart, schedule)

    def renumbered(self, numbers: Mapping[int, int]) -> OptimizerState:
        """Return the same state with other numbers of workers, by old ones, without those that have none.

        The gradients of rows that these have not pushed are left to be pushed by any worker.
        """
        apart = {key: value for key, value in self.apart.items() if key.startswith(_OUTER)}
        for prefix in (_OWN, _LEFT_OUT):
            for worker, state in self._by_worker(prefix).items():
                if worker in numbers:
                    new = f"{prefix}{numbers[worker]}/"
                    apart |= {new + name: value for name, value in state.items()}
        others = itertools.count(max(numbers.values(), default=-1) + 1)
        for worker, state in self._by_worker(_ROWS).items():
            number = numbers[worker] if worker in numbers else next(others)
            apart |= {f"{_ROWS}{number}/{name}": value for name, value in state.items()}
        return replace(self, apart=apart)

    def place(self, cluster: Cluster, *, same: bool = False) -> list[files.Record]:
        """Give workers' state to them; return the servers' state.

        Args:
            same: whether there are as many workers as there were: then those of which there is no
                state are successors of dead ones, and the others keep theirs. Otherwise all get the
                mean if the state is that of another number of workers.

        Raises:
            CheckpointError: there is state of an unknown or frozen parameter.
        """
        layout, workers = cluster.job.description.layout, range(cluster.job.num_workers)
        if cluster.job.tables is not None:
            cluster.workers.call(remote_functions.push_rows_later, self.rows_for(cluster.job))
        if not cluster.job.config.local:
            records = files.disassemble(layout, self.state, self.plain)
            if cluster.job.compresses:
                own = self._by_worker(_LEFT_OUT)
                check_residuals(layout, own.values())
                if same and own:
                    parts: tuple[Own, Mapping[str, torch.Tensor]] = (
                        {worker: own.get(worker, {}) for worker in workers},
                        {},
                    )
                else:
                    parts = _own_or_mean(own, len(workers))
                cluster.workers.call(remote_functions.load_left_out, *parts)
            return records
        files.disassemble(layout, self.state, self.plain)  # raises before anything is changed
        own = self._by_worker(_OWN)
        if not same and len(own) != len(workers):
            own = {}
        cluster.workers.call(
            remote_functions.load_inner_state, own, self.state, self.plain, self.schedule
        )
        outer = {
            key.removeprefix(_OUTER): v for key, v in self.apart.items() if key.startswith(_OUTER)
        }
        return files.disassemble(layout, outer, [])

    def rows_for(self, job: Job) -> dict[int, Tensors]:
        """Return by worker of a job the gradients of rows that it is to push.

        Where each push is an update by itself, worker 0 pushes all of them.

        Raises:
            CheckpointError: they are not of the job's tables.
        """
        found = self._by_worker(_ROWS)
        if not found or job.tables is None:
            return {}
        from steepest.engine.delayed_rows import divided  # needs what only tables need

        pushers = job.num_workers if job.strategy.rule.together else 1
        states = [found[worker] for worker in sorted(found)]
        return dict(enumerate(divided(job.tables, states, pushers)))

    def _by_worker(self, prefix: str) -> dict[int, dict[str, torch.Tensor]]:
        found: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in self.apart.items():
            if key.startswith(prefix):
                worker, _, name = key.removeprefix(prefix).partition("/")
                found.setdefault(int(worker), {})[name] = value
        return found

    @staticmethod
    def split(
        replicas: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return, of a checkpoint's tensors by replica, those of `apart`, and the others."""
        apart = {
            key: value
            for key, value in replicas.items()
            if key.startswith((_OWN, _OUTER, _LEFT_OUT, _ROWS))
        }
        return apart, {key: value for key, value in replicas.items() if key not in apart}


def mean_inner(found: Sequence[InnerOptimizerState]) -> InnerOptimizerState:
    """Return the mean of workers' own optimizer states, with the furthest schedule, for a worker that has none."""
    begun = [state for state, _, _ in found if state]  # not by those that have had no samples yet
    names = set.intersection(*map(set, begun)) if begun else set()
    one = {name for name in names if not _can_be_averaged([state[name] for state in begun])}
    one |= {name for name in names if name.rpartition(":")[0] in one}  # what is inside of those
    shared = [{name: state[name] for name in sorted(names - one)} for state in begun]
    mean = mean_states(shared, [1.0] * len(begun)) if begun else {}
    mean |= {name: begun[0][name] for name in sorted(one)}
    schedules = [schedule for _, _, schedule in found if schedule is not None]
    furthest = max(schedules, key=lambda schedule: int(schedule["step"]), default=None)
    return mean, sorted({name for _, plain, _ in found for name in plain}), furthest


def _can_be_averaged(values: Sequence[torch.Tensor]) -> bool:
    """Return whether several workers' values of a name have one form: tensors, or the same text."""
    first = values[0]
    alike = all((v.shape, v.dtype) == (first.shape, first.dtype) for v in values)
    return alike and not (is_text(first) and any(not torch.equal(first, v) for v in values))


def _own_or_mean(own: Own, workers: int) -> tuple[Own, Mapping[str, torch.Tensor]]:
    """Return what compression has left out of each worker's gradients, or a mean for all.

    The mean is used when there are other workers than those that left it; the sum of all parts
    stays.
    """
    if len(own) == workers or not own:
        return own, {}
    names = {name for state in own.values() for name in state if name.startswith("left/")}
    mean: dict[str, torch.Tensor] = {}
    for name in sorted(names):
        parts = [state[name] for state in own.values() if name in state]
        mean[name] = torch.stack(parts).sum(0).div_(len(own))
    factors = {name: value for name, value in own[min(own)].items() if not name.startswith("left/")}
    return {}, {**mean, **factors}
