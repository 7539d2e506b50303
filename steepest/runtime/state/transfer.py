"""Captures the state of a running job from its processes, and installs it in them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from steepest.checkpoint import files
from steepest.checkpoint.replicated_tables import described_replicated, with_tables_of
from steepest.core.data.sampler import epoch_ends
from steepest.core.engine.client import read_log
from steepest.core.engine.commit_log import Commit, CommitLog, Unpushed
from steepest.core.engine.job import Job
from steepest.core.engine.replica_states import (
    all_states,
    differing_buffers,
    merged_states,
)
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.shared_state import SharedState
from steepest.core.models.names import plainly
from steepest.core.optim.portable import Record
from steepest.core.optim.spec import ScheduleState
from steepest.core.strategies.strategy import Strategy
from steepest.core.system import system
from steepest.core.tensors.dtypes import LOOP_STATE, Tensors
from steepest.errors import CheckpointError, ConfigurationError
from steepest.runtime import remote_functions
from steepest.runtime.cluster import Cluster
from steepest.runtime.context import Lineup
from steepest.runtime.owner import Moment, owned
from steepest.runtime.state.job_state import JobState
from steepest.runtime.state.optimizer_state import OptimizerState, dense
from steepest.runtime.state.restored_rows import RestoredRows
from steepest.runtime.state.row_read import RowRead, read_apart
from steepest.runtime.state.table_export import table_of
from steepest.runtime.worker_state import WorkerState
from steepest.tables.files.saved_rows import CheckpointRows
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.row_messages import Bases

log = logging.getLogger(__name__)


class StateTransfer:
    """Captures a job's state between two steps, and installs one; keeps the log over changes of the job."""

    def __init__(self, cluster: Cluster) -> None:
        self.owner = cluster.owner
        self._cluster = cluster
        self._ends: list[int] = []  # of epochs, under earlier plans too
        # of what the job was before; None for a part that is lost
        self._logs: list[CommitLog | None] = []
        self._start = 0  # the version with which the log begins
        self._unpushed: Unpushed = {}  # gradients of rows that workers had then
        self._told_of_schedule = False
        self._told_of_buffers = False
        self._restored = 0  # checkpoints
        self._change = 0  # the number of the last change of the job's processes
        #: The state with which to continue when a change failed in the middle.
        self.pending: JobState | None = None
        #: Workers' processes that are new, and have no buffers of the others yet: a change that fails in the
        #: middle may have put them into the job already.
        self._blank: set[Any] = set()
        #: Gives the job's processes their roles anew, with the state as it is; set by `Supervisor`.
        self.give_roles_anew: Callable[[], None] = lambda: None

    @owned(Moment.WHOLE)
    def snapshot(self, what: str) -> SharedState:
        """Return the servers' state at one version; workers may train meanwhile.

        Args:
            what: "weights"; "state" for the optimizer's state too; "standing" for the version and
                the coordinator's state alone.
        """
        client = self._cluster.client
        future = self._cluster.on_router(lambda: client.read(what))
        shared: SharedState = self._cluster.wait(future, "a snapshot of the weights")
        return shared

    def weights(self) -> tuple[dict[str, torch.Tensor], int]:
        """Return parameters by name, as CPU copies, and the number of steps that made them.

        It may be called on any thread, during training. Frozen parameters that the model changes itself are
        averaged over replicas, see `merged_states`.
        """
        job = self._cluster.job
        layout, snapshot = job.description.layout, self.snapshot("weights")
        named = snapshot.named(layout)
        if not all(entry.trainable for entry in layout.entries):
            states = all_states(self._cluster.workers.ask)
            own = merged_states(states, job.description) if states else {}
            named |= {name: value for name, value in own.items() if name in named}
        return named, job.step_of(snapshot.version)

    def set_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Set parameters by name, see `DistributedSGD.set_weights`; they are version `version`."""
        layout, weights = self._cluster.job.description.layout, _tensors("weights", weights)
        for name, value in weights.items():
            if not torch.isfinite(value).all():
                raise ConfigurationError(
                    f"{name!r} holds NaN or infinity: give finite weights; those of the last "
                    "commit stay"
                )
        snapshot = self.snapshot("weights")
        assert snapshot.weights is not None
        layout.write(snapshot.weights, weights)
        self._give(version, weights=snapshot.weights)
        self._workers_take(weights)
        frozen = [
            e.name
            for e in layout.entries
            if not e.trainable and not weights.keys().isdisjoint({e.name, *e.aliases})
        ]
        if frozen:
            self._cluster.workers.call(remote_functions.take_installed, frozen)

    def _workers_take(self, names: Collection[str]) -> None:
        """Let workers with weights of their own begin with the servers' weights, which have been set."""
        if self._cluster.job.config.local:
            call = self._cluster.workers.call
            call(remote_functions.take_servers_weights, tuple(names))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters, under all their names, and buffers, see `merged_states`, as CPU copies."""
        layout = self._cluster.job.description.layout
        state = self.snapshot("weights").named(layout) | self.merged_buffers()
        state.pop(LOOP_STATE, None)
        return state | {
            alias: state[entry.name] for entry in layout.entries for alias in entry.aliases
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Set all parameters and buffers, see `DistributedSGD.load_state_dict`, as a version."""
        layout, mine = self._cluster.job.description.layout, self.buffers()[0]
        mine.pop(LOOP_STATE, None)
        state = _tensors("state", state)
        parameters = {name for entry in layout.entries for name in (entry.name, *entry.aliases)}
        own = parameters | mine.keys()
        for lacks, names in (("state", own - state.keys()), ("the model", state.keys() - own)):
            if names:
                raise ConfigurationError(
                    f"{lacks} has no {', '.join(sorted(names)[:8])}: give what state_dict() of "
                    "such a model returned; set_weights() takes some parameters"
                )
        buffers = Tensors((name, state[name]) for name in mine.keys() - parameters)
        for name, value in buffers.items():
            if value.shape != mine[name].shape:
                raise ConfigurationError(
                    f"{name!r} has shape {tuple(value.shape)}, the model's has "
                    f"{tuple(mine[name].shape)}"
                )
        weights = layout.allocate()
        layout.write(weights, {name: value for name, value in state.items() if name not in buffers})
        self._give(version, weights=weights)
        self._workers_take(state)
        # frozen parameters of replicas are as installed
        self._cluster.workers.call(remote_functions.load_buffers, buffers)

    def log(self) -> CommitLog:
        """Return every commit so far, see `DistributedSGD.log`."""
        commits = self._commits()
        if commits is None:
            raise ConfigurationError("no log was kept: give RunConfig(keep_log=True)")
        earlier: list[CommitLog] = []
        for part in self._logs:
            earlier = [] if part is None else [*earlier, part]
        return replace(self.part(commits), earlier=tuple(earlier))

    def _commits(self) -> list[Commit] | None:
        """Return the coordinator's log; None if it keeps none."""
        client = self._cluster.client
        if not self._cluster.run_config.keep_log:
            return None
        future = self._cluster.on_router(lambda: read_log(client))
        commits: list[Commit] = self._cluster.wait(future, "the coordinator's log")
        return commits

    def part(self, commits: Sequence[Commit] = ()) -> CommitLog:
        """Return the log of the job in its present form, without earlier forms."""
        job, (plan, seed) = self._cluster.job, self._cluster.plan
        workers = servers = job.description.threads
        if not job.servers_in_workers:
            servers = torch.get_num_threads() if job.strategy.in_driver else 1
        return CommitLog(
            tuple(commits), job.config, job.num_workers, job.devices_per_worker, seed, job.hosts,
            job.micro_batches, self._start, plan, (job.shares, job.parts), (workers, servers),
            self._cluster.rates.changes, self._unpushed,
        )  # fmt: skip

    def _close_log(self, before: JobState, version: int) -> None:
        """Keep the log of a job whose processes have got other roles, and begin another one at `version`.

        If a part of the log is lost, the parts before it do not explain the weights.
        """
        assert before.log is not None
        first, last = before.log.start, before.shared.version
        commits: Sequence[Commit] | None = () if last == first else before.shared.log
        if before.part < len(self._logs):
            closed = self._logs[before.part]
            commits = None if closed is None else closed.commits
        part = None
        if commits is not None:
            part = replace(before.log, commits=_newest(commits, first, last))
        self._logs[before.part :] = [part]
        self._start = version

    def install(self, state: JobState, records: list[Record]) -> None:
        """Give a state, in terms of the present job, to the job's processes.

        Args:
            state: to be installed.
            records: the servers' part of the optimizer's state, see `OptimizerState.place`.
        """
        shared, optimizer = state.shared, state.optimizer
        coordinator = None if state.log is None else shared.state
        self._give(shared.version, shared.weights, records, coordinator, optimizer.schedule)
        self._unpushed = optimizer.rows_for(self._cluster.job)
        self._cluster.use_plan(state.plan, state.seed)
        self._continue(state)

    def _give(
        self,
        version: int,
        # None to keep the weights that servers hold; the optimizer's state, and the order of samples
        weights: torch.Tensor | None,
        records: list[Record] | None = None,
        state: Mapping[str, Any] | None = None,  # None if the weights do not follow from the log
        schedule: ScheduleState | None = None,  # if `state` does not hold it
    ) -> None:
        """Set the servers' weights and the coordinator's state, see `Client.install`."""
        if state is None:  # what came before does not explain it
            self._logs, self._start, self._unpushed = [], version, {}
        everything = dict(state or {})
        if schedule is not None:
            everything["schedule"] = schedule
        if "schedule" not in everything and (
            state is not None or records is not None
        ):  # else it stays where it is
            self._tell_of_schedule(version)
        client = self._cluster.client
        future = self._cluster.on_router(
            lambda: client.install(version, weights, records, everything or None)
        )
        self._cluster.wait(future, "servers to take new weights")
        if records is not None:
            # The coordinator's answer says that the state is ordered. Servers answer a read when they have loaded it:
            # rows in files may be dropped, and a server that could not load its part has died by then.
            self.snapshot("standing")

    def _tell_of_schedule(self, version: int) -> None:
        """Log, once, that a schedule without a state has to be computed from its beginning."""
        job = self._cluster.job
        updates = job.updates_before(job.step_of(version))
        if (
            job.description.optimizer_spec.lr_scheduler is None
            or not updates
            or self._told_of_schedule
        ):
            return
        self._told_of_schedule = True
        log.warning(
            "the state of lr_scheduler= has no JSON, or too much of it, so the schedule is "
            "computed from its beginning (%d steps) whenever training goes on elsewhere: give a "
            "scheduler whose state_dict() holds plain values, "
            "or learning_rate=", updates,
        )  # fmt: skip

    def buffers(self) -> list[Tensors]:
        """Return each replica's buffers, and the frozen parameters that any replica has changed."""
        return all_states(self._cluster.workers.call)

    def merged_buffers(self) -> Tensors:
        """Return the buffers that stand for those of all replicas, see `merged_states`."""
        return self._merged(self.buffers())

    def _merged(self, states: Sequence[Tensors]) -> Tensors:
        """Return the state that stands for those of replicas; warn once if none can."""
        description = self._cluster.job.description
        if not self._told_of_buffers and (differing := differing_buffers(states, description)):
            self._told_of_buffers = True
            log.warning(
                "the buffers %.200s differ between workers, by more than a mean could stand for: state_dict() and "
                "the weights of checkpoints have worker 0's. A checkpoint has all workers' besides, which are restored "
                'with as many workers. Say what you want of each: buffers={"%s": "first"}, or "mean", to '
                "steepest.prepare or TorchModel",
                ", ".join(map(repr, differing)),
                differing[0],
            )
        return merged_states(states, description)

    @owned(Moment.WHOLE)
    def ends(self) -> list[int]:
        """Return the first step after each epoch that has ended: the list itself, not to be changed."""
        plan = self._cluster.plan[0]
        if plan is not None:
            epoch_ends(plan, self._ends, self._cluster.step)
        return self._ends

    def collect(self, since: Bases | None = ()) -> tuple[files.Checkpoint, RowRead]:
        """Return everything that a checkpoint holds, at one version, except rows of tables, which come later.

        No step may be going on. For `since` see `read_apart`.
        """
        cluster, job = self._cluster, self._cluster.job
        shared, rows_to_come = read_apart(cluster, since)
        with rows_to_come.given_up_on_error():
            step, states = job.step_of(shared.version), self.buffers()
            everybody, call = range(job.num_workers), cluster.workers.call
            collected = OptimizerState.collect(job, shared, everybody, step, call)
            state = replace(
                self.capture(shared, collected=collected),
                collected_buffers=(dict(enumerate(states)), self._merged(states)),
            )
            rates = cluster.rates.state(step)
            return state.checkpoint(self.signature(), self.ends(), rates), rows_to_come

    def signature(self) -> files.JobSignature:
        """Return the signature that a checkpoint is compared with, without buffers."""
        return self._owner({})

    def place(self, saved: files.Checkpoint, where: object, data: str = "continue") -> None:
        """Continue from a checkpoint; with `data="new"` at epoch 0, whatever samples were left over.

        Raises:
            CheckpointError: it is of another model, optimizer or data set, or is no state of a job;
                nothing has changed.
        """
        if saved.saved_rows is not None:
            lies = replace(saved.saved_rows, now=int(system().time()))
            saved = replace(saved, saved_rows=lies)
        with self._restoring() as rows:
            self._place(saved, where, data, rows.read)

    def _restoring(self) -> RestoredRows:
        self._restored += 1
        return RestoredRows(self._cluster, -self._restored)

    def _place(
        self,
        saved: files.Checkpoint,
        where: object,
        data: str,
        read: Callable[[CheckpointRows | None], list[Record]],
    ) -> None:
        """Continue from a checkpoint of the present form, see `place`; `read` returns records in place of its rows."""
        cluster = self._cluster
        try:
            spec = cluster.job.description.optimizer_spec
            saved = with_tables_of(saved, spec, dealing_of(cluster.job))
            manifest = saved.about
            self._owner(self.buffers()[0]).check(saved, data)
            _check_place(manifest, cluster.job)
            self._unfreeze(manifest)
            state = JobState.saved(saved, cluster.job, data)
            if self._move_schedule(manifest):
                state = JobState.saved(saved, cluster.job, data)
            records = read(saved.saved_rows)
            records += state.optimizer.place(cluster)
        except files.UnreachableError:
            raise
        except files.DamagedRowsError as error:
            raise files.DamagedRowsError(
                f"the checkpoint at {where} is damaged: {error}"
            ) from error
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint at {where} is not of this job: {error}"
            ) from error
        before = cluster.job.plan()  # older checkpoints do not tell when epochs ended
        try:
            self.install(state, records)
        except ConfigurationError as error:
            raise CheckpointError(f"the checkpoint at {where} is damaged: {error}") from error
        cluster.rates.restore(state.step, manifest.get("rates"), manifest.get("schedule"))
        plan = state.plan
        for epoch, blocks in () if plan is None else plan.begun:
            log.warning(
                "epoch %d ends in the order in which it was begun, with blocks of samples %.200s, "
                "later ones have "
                "%.200s; until then a stream may be begun often", epoch, blocks, cluster.job.description.blocks,
            )  # fmt: skip
        guessed = []
        if before is not None:
            guessed = [min(before.end_of(e), state.step) for e in range(manifest["epoch"])]
        self._ends = [] if data == "new" else list(manifest.get("ends", guessed))

    def import_rows(self, name: str, rows: Any) -> None:
        """Give rows to ids of a table, see `DistributedSGD.import_table`; no step may be going on."""
        from steepest.tables.files.imported_rows import imported_rows

        dealing, table = table_of(self._cluster, name)
        imported = imported_rows(table, rows)
        saved, _ = self.collect(None)
        with self._restoring() as restored:
            self._place(
                saved, "hand", "continue", lambda _: restored.given(dealing, table, imported)
            )
            log.warning(
                "table %r has %d imported rows, %d of them in place of others; their slots begin anew",
                name, len(imported.ids), restored.replaced,
            )  # fmt: skip

    def _unfreeze(self, manifest: Mapping[str, Any]) -> None:
        """Train the parameters that a checkpoint's job had unfrozen; for that, processes get their roles anew."""
        self._cluster.unfrozen |= frozenset(manifest.get("unfrozen", ()))
        if self._cluster.unfrozen != self._cluster.job.unfrozen:
            self.give_roles_anew()

    def _move_schedule(self, manifest: Mapping[str, Any]) -> bool:
        """Move the schedule to its position in a checkpoint; return whether processes got their roles anew.

        It differs from the step if steps were several updates each. Checkpoints without a number of
        updates leave it where it is.
        """
        cluster, step = self._cluster, manifest["step"]
        updates = cluster.job.updates_before(step)
        ahead = manifest.get("updates", updates) - updates
        if ahead:
            cluster.shift_schedule(ahead)
            self.give_roles_anew()
        return bool(ahead)

    def capture(
        self,
        shared: SharedState,
        workers: Sequence[WorkerState] | None = None,
        collected: OptimizerState | None = None,
    ) -> JobState:
        """Return the job's present state, with all that is needed to continue from it as another job."""
        plan, log, part = self._cluster.plan, self.part(), len(self._logs)
        return JobState(self._cluster.job, *plan, shared, log, workers, collected, part=part)

    @contextlib.contextmanager
    def _changing(self, before: JobState, keep: Mapping[int, int]) -> Iterator[int]:
        """Keep `pending` while the job is assembled from other processes; yield the number of this change."""
        members, self._change = self._cluster.members, self._change + (self.pending is None)
        try:
            yield self._change
        except BaseException:
            if self._cluster.members is not members:  # the old job is no more
                self.pending = before.renumbered({was: now for now, was in keep.items()})
            raise
        self.pending = None
        self._cluster.end_leaving(self._change)

    def put_together(self, before: JobState, wanted: Lineup, *, as_before: bool) -> None:
        """Assemble the job from some processes; it continues with the state that they have.

        It is another job, unless as many workers as before are to be `as_before`: then version, plan
        and the place of each share in it stay as they were.

        Raises:
            PeerLostError, DeadlineError: a process died, or did not answer. If the old job is no
                more by then, `pending` is the state with which to begin again.
        """
        cluster, job, step, keep = self._cluster, before.job, before.step, wanted.keep
        self._blank |= {actor for peer, actor in wanted.added.items() if peer.role == "worker"}
        if as_before:  # with new processes in the places of dead ones
            wanted = replace(wanted, keep={index: index for index in range(wanted.num_workers)})
        with self._changing(before, keep) as change:
            if before.plan is not None:
                epoch_ends(before.plan, self._ends, step)
            updates, holders = job.updates_before(step), before.shared.holders
            cluster.reform(wanted, step, updates, holders, change)
            if as_before:
                state = replace(before, collected=before.optimizer)
            else:
                state = before.renumbered({was: now for now, was in keep.items()})
                state = state.for_job(cluster.job)
            same = as_before or job.num_workers == wanted.num_workers
            records = state.optimizer.place(cluster, same=same)
            if as_before:
                records = dense(job.description.layout, before.shared.records)
            if (rows := state.rows) is None:
                self.install(state, records)
            else:
                with self._restoring() as restored:
                    self.install(state, records + restored.read(rows))
            self._close_log(before, state.shared.version)
            if wanted.unfrozen != job.unfrozen:
                self._logs = [None]  # a replay does not unfreeze

    def _continue(self, state: JobState) -> None:
        """Give workers their place in the data, and the state's buffers; without any, new ones get the others' mean."""
        call, plan, actors = self._cluster.workers.call, self._cluster.plan, self._cluster.actors
        workers = sorted(peer for peer in actors if peer.role == "worker")
        new = [peer.index for peer in workers if actors[peer] in self._blank]
        old = [peer.index for peer in workers if peer.index not in new]
        if plan[0] is None and state.log is None:
            call(Replicas.continue_streams, None)
        elif plan[0] is None and old:
            place = call(Replicas.stream_place)[old[0]]
            if place is not None:  # streams that are not divided stay open where they are
                call(Replicas.continue_streams, place)
        if (buffers := state.buffers) is not None:
            call(remote_functions.continue_from, *plan, *buffers, self._cluster.job.replicas)
        else:
            call(Replicas.use_plan, *plan)
            if new and old:
                mean = self._merged(all_states(partial(call, workers=old)))
                call(remote_functions.load_buffers, mean, workers=new)
        self._blank.clear()

    def stopped(self, config: Strategy) -> SharedState:
        """Stop the workers, and return the job's state; the coordinator and all servers must live.

        Where servers can keep their chunks under another strategy, it names the processes that hold them.
        """
        cluster, client = self._cluster, self._cluster.client
        cluster.wait(cluster.on_router(client.revoke), "the coordinator to stop the workers")
        stays = self._stays(config)
        shared = self.snapshot("standing" if stays else "state")
        if stays:
            shared.holders = cluster.holdings()
        shared.log = self._commits()
        return shared

    def _stays(self, config: Strategy) -> bool:
        """Return whether servers keep their chunks: the model is cut alike, the kind of servers is the same."""
        before, after = self._cluster.job.strategy, config
        return (
            before.cut == after.cut
            and self._cluster.unfrozen == self._cluster.job.unfrozen
            and before.kind == after.kind
            and "simple" not in (before.kind, after.kind)
        )

    def _owner(self, buffers: Mapping[str, torch.Tensor]) -> files.JobSignature:
        described, tables = self._cluster.job.description, dealing_of(self._cluster.job)
        spec = described.optimizer_spec
        own = spec.name, spec.state_flags(), described.samples, buffers
        tables_description = () if tables is None else tables.description()
        batch = described.batch_size, self._cluster.job.global_batch
        replicated = described_replicated(spec)
        hashes = {} if tables is None else tables.hashes()
        return files.JobSignature(
            described.layout,
            *own,
            tables_description,
            described.fingerprint,
            batch,
            replicated,
            hashes,
            described.offsets,
        )


def _check_place(manifest: Mapping[str, Any], job: Job) -> None:
    """Check a checkpoint's account of progress; CheckpointError: this job cannot have made it."""
    described, rates = job.description, manifest.get("rates")
    if unknown := set(manifest.get("unfrozen", ())) - described.layout.index.keys():
        raise CheckpointError(f"it trains {sorted(unknown)!r:.100}, which the model has not")
    if rates is not None and len(rates) != (groups := len(described.optimizer_spec.groups)):
        raise CheckpointError(
            f"it has learning rates for {len(rates)} parameter groups, this job's optimizer has {groups}"
        )


def _tensors(what: str, values: Any) -> dict[str, torch.Tensor]:
    """Return a user's mapping as tensors by plain names; ConfigurationError: it is no such mapping."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"{what} is a {type(values).__name__}: give tensors by name, as weights() and "
            "state_dict() return them"
        )
    tensors = {}
    for name, value in values.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"{what} has the name {name!r:.80}: give strings as names")
        try:
            tensors[name] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigurationError(
                f"{what}[{name!r}] is a {type(value).__name__} that is no tensor ({error}): give "
                "a tensor or array"
            ) from None
    return plainly(tensors)


def _newest(commits: Sequence[Commit], start: int, last: int) -> tuple[Commit, ...]:
    """Return the commits of the versions after `start` until `last`.

    A server also remembers commits from before weights were set or restored, perhaps of the same
    versions: for each version the newest commit counts.
    """
    newest: list[Commit] = []
    for commit in commits:
        while newest and newest[-1].version > commit.before:
            newest.pop()
        newest.append(commit)
    return tuple(commit for commit in newest if start < commit.version <= last)
