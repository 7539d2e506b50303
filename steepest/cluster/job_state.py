"""The state from which training continues: read from a job's processes, and given to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from steepest.checkpoint import files
from steepest.cluster import remote_functions
from steepest.cluster.launch import Cluster
from steepest.cluster.optimizer_state import OptimizerState, mean_inner
from steepest.cluster.training import Training
from steepest.config.strategies import StrategyConfig
from steepest.data.sampler import Remaining, epoch_ends
from steepest.engine.client import Snapshot, read_log
from steepest.engine.commit_log import Commit, CommitLog
from steepest.engine.local_sgd import InnerOptimizerState
from steepest.engine.replicas import all_states, mean_states
from steepest.engine.strategy import make_strategy
from steepest.engine.survivors import RecoveredState
from steepest.errors import CheckpointError, ConfigurationError
from steepest.messages.driver import Counters
from steepest.messages.message import Peer
from steepest.optim.spec import ScheduleState
from steepest.tensors.dtypes import Tensors

log = logging.getLogger(__name__)


class JobState:
    """The state of one job between two steps.

    Args:
        training: its steps.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._ends: list[int] = []  # of epochs, under earlier plans too
        self._logs: list[CommitLog] = []  # of what the job was before
        self._start = 0  # the version with which the log begins
        self._gap = False  # whether a part of it is lost
        self._told_of_schedule = False

    @property
    def _cluster(self) -> Cluster:
        return self._training.cluster

    def snapshot(self, what: str) -> Snapshot:
        """Return the servers' state at one version; workers may train meanwhile.

        Args:
            what: "weights"; "state" for the optimizer's state too; "standing" for the version and
                the coordinator's state alone.
        """
        client = self._cluster.client
        future = self._cluster.on_router(lambda: client.read(what))
        found: Snapshot = self._training.wait(future, "a snapshot of the weights")
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters by name, as CPU copies; may be called on any thread, amid training.

        Frozen parameters are averaged over replicas.
        """
        layout = self._cluster.job.description.layout
        found = layout.named(self.snapshot("weights").weights)
        if not all(entry.trainable for entry in layout.entries):
            states = all_states(self._cluster.workers.ask)
            mean = mean_states(states, [1.0] * len(states)) if states else {}
            found |= {name: value for name, value in mean.items() if name in found}
        return found

    def set_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Set parameters by name, see `DistributedSGD.set_weights`; they are version `version`."""
        layout = self._cluster.job.description.layout
        snapshot = self.snapshot("weights")
        layout.write(snapshot.weights, weights)
        self.install(version, snapshot.weights, None)
        frozen = [
            e.name
            for e in layout.entries
            if not e.trainable and not weights.keys().isdisjoint({e.name, *e.aliases})
        ]
        if frozen:
            self._cluster.workers.call(remote_functions.take_installed, frozen)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return parameters, under all their names, and averaged buffers, as CPU copies."""
        layout = self._cluster.job.description.layout
        state = layout.named(self.snapshot("weights").weights) | self.mean_buffers()
        return state | {
            alias: state[entry.name] for entry in layout.entries for alias in entry.aliases
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor], version: int) -> None:
        """Set all parameters and buffers, see `DistributedSGD.load_state_dict`, as a version."""
        layout, mine = self._cluster.job.description.layout, self.buffers()[0]
        parameters = {name for entry in layout.entries for name in (entry.name, *entry.aliases)}
        own = parameters | mine.keys()
        for lacks, names in (("state", own - state.keys()), ("the model", state.keys() - own)):
            if names:
                raise ConfigurationError(
                    f"{lacks} has no {', '.join(sorted(names)[:8])}: give what state_dict() of "
                    "such a model returned; set_weights() takes some parameters"
                )
        buffers = Tensors((name, torch.as_tensor(state[name])) for name in mine.keys() - parameters)
        for name, value in buffers.items():
            if value.shape != mine[name].shape:
                raise ConfigurationError(
                    f"{name!r} has shape {tuple(value.shape)}, the model's has "
                    f"{tuple(mine[name].shape)}"
                )
        weights = layout.allocate()
        layout.write(weights, {name: value for name, value in state.items() if name not in buffers})
        self.install(version, weights, None)
        # frozen parameters of replicas are as installed
        self._cluster.workers.call(remote_functions.load_buffers, buffers)

    def log(self) -> CommitLog:
        """Return every commit so far, see `DistributedSGD.log`."""
        commits = self._commits()
        if commits is None:
            raise ConfigurationError("no log was kept: give RunConfig(keep_log=True)")
        return replace(self.part(commits), earlier=tuple(self._logs))

    def _commits(self) -> list[Commit] | None:
        """Return the coordinator's log; None if it keeps none."""
        client = self._cluster.client
        if not self._cluster.run_config.keep_log:
            return None
        future = self._cluster.on_router(lambda: read_log(client))
        commits: list[Commit] = self._training.wait(future, "the coordinator's log")
        return commits

    def part(self, commits: Sequence[Commit] = ()) -> CommitLog:
        """Return the log of the job as it is now, without the jobs that it was before.

        Args:
            commits: of this job.
        """
        job, (plan, seed) = self._cluster.job, self._cluster.plan
        where = (
            job.config,
            job.num_workers,
            job.devices_per_worker,
            seed,
            job.hosts,
            job.accumulate,
        )
        workers = job.description.threads
        servers = (
            workers
            if job.servers_in_workers
            else torch.get_num_threads()
            if job.strategy.in_driver
            else 1
        )
        return CommitLog(
            tuple(commits), *where, self._start, plan, (job.shares, job.parts), (workers, servers)
        )

    def _close_log(self, found: RecoveredState, before: CommitLog, version: int) -> None:
        """Keep the log of a job whose processes have got other roles, and begin another one.

        Args:
            found: what was found of the job, with its log, if any.
            before: an empty log of the job.
            version: with which the next log begins.
        """
        if found.log is not None and not self._gap:
            commits = tuple(commit for commit in found.log if commit.version <= found.version)
            self._logs.append(replace(before, commits=commits))
        self._gap |= found.log is None
        self._start = version

    def install(
        self,
        version: int,
        weights: torch.Tensor | None,
        records: list[files.Record] | None,
        state: dict[str, Any] | None = None,
        schedule: ScheduleState | None = None,
    ) -> None:
        """Set the servers' weights and the coordinator's state, see `Client.install`.

        Args:
            version: of the weights.
            weights: flat; None to keep those that servers hold.
            records: optimizer state; None to keep it, and the order of samples.
            state: of the coordinator; None if the weights do not follow from the log so far.
            schedule: where the schedule stands, if `state` does not hold it.
        """
        self._cluster.mend()  # a dead server would be waited for
        if self._cluster.recovery is not None and "ledger" not in (state or {}):
            self._cluster.recovery.forget()  # the copy of other ones
        if state is None:  # what came before does not explain it
            self._logs, self._start, self._gap = [], 0, False
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
        self._training.wait(future, "servers to take new weights")

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

    def mean_buffers(self) -> Tensors:
        """Return the mean of buffers over all replicas, which see equally many samples."""
        states = self.buffers()
        return mean_states(states, [1.0] * len(states))

    def remaining(self) -> Remaining:
        """Return which samples are still to come, as the coordinator has it."""
        (plan, _), job, client = self._cluster.plan, self._cluster.job, self._cluster.client
        if plan is None:
            return Remaining()
        counters: Counters = self._training.wait(
            self._cluster.on_router(client.counters), "the coordinator's counters"
        )
        return plan.remaining(counters.following, counters.returned, job.shares, job.parts)

    def ends(self) -> list[int]:
        """Return the first step after epoch 0, 1, ..., for the epochs that have ended."""
        plan = self._cluster.plan[0]
        if plan is not None:
            self._ends = epoch_ends(plan, self._ends, self._training.step)
        return self._ends

    def collect(self) -> files.Checkpoint:
        """Return everything that a checkpoint holds, at one version."""
        snapshot = self.snapshot("state")
        step, rest = self._cluster.job.step_of(snapshot.version), self.remaining()
        about = {
            "step": step,
            "epoch": rest.epoch,
            "offset": rest.offset,
            "left": rest.left,
            "begun": rest.begun,
            "updates": self._cluster.job.updates_before(step),
            "ends": self.ends(),
            "seed": self._cluster.plan[1],
        }
        states = self.buffers()
        owner = self._owner(mean_states(states, [1.0] * len(states)))
        everybody = range(self._cluster.job.num_workers)
        found = OptimizerState.collect(
            self._cluster, snapshot, everybody, step, self._cluster.workers.call
        )
        about["schedule"] = found.schedule
        return files.gather(
            owner, snapshot.weights, (found.state, found.plain), states, about, found.apart
        )

    def place(self, saved: files.Checkpoint, where: object) -> None:
        """Continue from a checkpoint.

        Args:
            saved: the checkpoint.
            where: it was read, for the error.

        Raises:
            CheckpointError: it is of another model, optimizer or data set; nothing has changed.
        """
        cluster, about = self._cluster, saved.about
        layout = cluster.job.description.layout
        try:
            self._owner(self.buffers()[0]).check(saved)
            apart, replicas = OptimizerState.split(saved.replicas)
            state = OptimizerState(saved.optimizer, about["plain"], apart, about.get("schedule"))
            records = state.place(cluster)
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoint at {where} is not of this job: {error}"
            ) from error
        if self._move_schedule(about):
            records = state.place(cluster)
        weights = layout.allocate()
        layout.write(weights, {entry.name: saved.weights[entry.name] for entry in layout.entries})
        averaged = Tensors(
            (name, value) for name, value in saved.weights.items() if name not in layout.index
        )
        version = cluster.job.version_of(about["step"])
        self.install(version, weights, records, schedule=about.get("schedule"))
        left = tuple((e, b, t) for e, b, t in about.get("left", ()))
        begun = tuple(
            (e, tuple(b) if isinstance(b, list) else b) for e, b in about.get("begun", ())
        )
        rest = Remaining(about["epoch"], about["offset"], left, begun)
        plan, seed = cluster.job.plan(about["step"], rest, about["seed"]), about["seed"]
        for epoch, blocks in () if plan is None else plan.begun:
            log.warning(
                "epoch %d ends in the order in which it was begun, with blocks of samples %.200s, "
                "later ones have "
                "%.200s; until then a stream may be begun often", epoch, blocks, cluster.job.description.blocks,
            )  # fmt: skip
        before = cluster.job.plan()  # older checkpoints do not tell when epochs ended
        guessed = (
            []
            if before is None
            else [min(before.end_of(e), about["step"]) for e in range(rest.epoch)]
        )
        self._ends = list(about.get("ends", guessed))
        cluster.plan = (plan, seed)
        own = remote_functions.by_replica(replicas)
        cluster.workers.call(
            remote_functions.continue_from, plan, seed, own, averaged, cluster.job.replicas
        )

    def _move_schedule(self, about: Mapping[str, Any]) -> bool:
        """Move the learning-rate schedule to where it stood in a checkpoint.

        It stands elsewhere where steps were several updates each. Processes get their roles anew
        for that. Checkpoints without a number of updates leave it where it is.

        Returns:
            Whether processes got their roles anew.
        """
        cluster, step = self._cluster, about["step"]
        ahead = about.get("updates", cluster.job.updates_before(step)) - cluster.job.updates_before(
            step
        )
        if ahead:
            cluster.mend()
            cluster.job = job = replace(
                cluster.job, schedule_offset=cluster.job.schedule_offset + ahead
            )
            cluster.reform(
                job.config, step, {i: i for i in range(job.num_workers)}, {}, job.num_workers
            )
        return bool(ahead)

    def reform(
        self,
        config: StrategyConfig,
        workers: int | None = None,
        added: Mapping[Peer, Any] | None = None,
        keep: Mapping[int, int] | None = None,
        placement: Mapping[int, int] | None = None,
    ) -> None:
        """Continue under another strategy, or with other workers, from the last committed step.

        Args:
            config: the strategy.
            workers: how many; as many as now unless given.
            added: new processes.
            keep: maps each surviving worker's new index to its old one; by default the first
                workers stay.
            placement: seats of new workers, see `Cluster.reform`.

        Raises:
            ConfigurationError: the processes could not talk here; nothing has changed.
        """
        cluster = self._cluster
        if keep is None:
            cluster.mend()  # a dead worker could not drop its roles
        job, stays = cluster.job, self._stays(config)
        snapshot = self.snapshot("standing" if stays else "state")
        counters: Counters = self._training.wait(
            cluster.on_router(cluster.client.counters), "the coordinator's counters"
        )
        count = workers or job.num_workers
        if keep is None:
            keep = {index: index for index in range(min(count, job.num_workers))}
        old = list(keep.values())

        def call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
            return cluster.workers.call(function, *arguments, workers=old)

        step = job.step_of(snapshot.version)
        optimizer = OptimizerState.collect(cluster, snapshot, keep, step, call)
        buffers = self.mean_buffers() if added else Tensors()
        history = {
            name: getattr(counters, name)
            for name in ("committed", "skipped", "dropped", "staleness")
        }
        state = {"ledger": [counters.following, *counters.returned], "history": history}
        if stays:
            found = RecoveredState(
                snapshot.version, state, self._commits(), holders=cluster.holdings()
            )
        else:
            found = RecoveredState(snapshot.version, state, self._commits(), snapshot.weights)
        self.form(config, found, optimizer, buffers, count, keep, added or {}, placement)

    def form(
        self,
        config: StrategyConfig,
        found: RecoveredState,
        optimizer: OptimizerState,
        buffers: Tensors,
        count: int,
        keep: Mapping[int, int],
        added: Mapping[Peer, Any],
        placement: Mapping[int, int] | None = None,
    ) -> None:
        """Give a job's processes other roles, in which they continue from the state that was found.

        Args:
            config: the strategy.
            found: weights, or the processes that hold them, and the coordinator's state; its
                optimizer records are not used.
            optimizer: the optimizer's state.
            buffers: for new workers.
            count: number of workers.
            keep, added, placement: see `Cluster.reform`.
        """
        cluster, job = self._cluster, self._cluster.job
        plan, seed = cluster.plan
        step, rest = job.step_of(found.version), Remaining()
        if plan is not None:
            together = job.strategy.rule.together  # the steps are the ledger
            following, *returned = [step * job.shares] if together else found.state["ledger"]
            rest = plan.remaining(following, returned, job.shares, job.parts)
            self._ends = epoch_ends(plan, self._ends, step)
        weights = None if found.weights is None else job.description.layout.named(found.weights)
        before = self.part()
        cluster.reform(config, step, keep, added, count, placement, found.holders)
        self._close_log(found, before, cluster.job.version_of(step))
        layout = cluster.job.description.layout
        flat = None if weights is None else layout.allocate()
        if flat is not None and weights is not None:
            layout.write(flat, weights)
        state = {"history": found.state["history"]}  # the ledger begins anew, with the plan
        version, records = cluster.job.version_of(step), optimizer.place(cluster)
        self.install(version, flat, records, state, optimizer.schedule)
        plan = cluster.job.plan(step, rest, seed)
        cluster.plan = (plan, seed)
        cluster.workers.call(remote_functions.use_plan, plan, seed)
        if buffers and (new := [peer.index for peer in added if peer.role == "worker"]):
            cluster.workers.call(remote_functions.load_buffers, buffers, workers=new)

    def stopped(self) -> RecoveredState:
        """Stop the workers, and return the job's state.

        The coordinator and all servers must live.
        """
        client = self._cluster.client
        self._training.wait(
            self._cluster.on_router(client.revoke), "the coordinator to stop the workers"
        )
        cluster = self._cluster
        stays = self._stays(cluster.job.config)
        found = self.snapshot("standing" if stays else "state")
        if stays:
            return RecoveredState(
                found.version, found.state, self._commits(), holders=cluster.holdings()
            )
        return RecoveredState(
            found.version, found.state, self._commits(), found.weights, found.records
        )

    def _stays(self, config: StrategyConfig) -> bool:
        """Return whether servers keep their chunks under another strategy.

        They do where the model is cut alike and both strategies have servers of the same kind.
        """
        before, after = self._cluster.job.strategy, make_strategy(config)
        return (
            before.cut == after.cut
            and before.kind == after.kind
            and "simple" not in (before.kind, after.kind)
        )

    def put_back(
        self,
        found: RecoveredState,
        before: CommitLog,
        left_out: dict[int, dict[str, torch.Tensor]],
        inner: dict[int, InnerOptimizerState],
        buffers: Sequence[Tensors],
        added: Sequence[Peer],
    ) -> None:
        """Give a job that was put together again after deaths the state that was found.

        Args:
            found: the servers' and the coordinator's state.
            before: an empty log of the job that it was.
            left_out: by worker, what compression has left out of its gradients.
            inner: by surviving worker, with local SGD, what its own optimizer remembers.
            buffers: of the surviving replicas.
            added: new processes.
        """
        cluster = self._cluster
        self._close_log(found, before, found.version)
        mean, plain, schedule = mean_inner(list(inner.values()))
        self.install(found.version, found.weights, found.records, found.state, schedule)
        cluster.workers.call(remote_functions.use_plan, *cluster.plan)
        if left_out:
            cluster.workers.call(remote_functions.load_left_out, left_out, {})
        if inner:
            own = {i: state for i, (state, _, _) in inner.items()}
            cluster.workers.call(remote_functions.load_inner_state, own, mean, plain, schedule)
        if buffers and (new := [peer.index for peer in added if peer.role == "worker"]):
            cluster.workers.call(
                remote_functions.load_buffers,
                mean_states(buffers, [1.0] * len(buffers)),
                workers=new,
            )

    def _owner(self, buffers: Mapping[str, torch.Tensor]) -> files.JobSignature:
        described = self._cluster.job.description
        spec = described.optimizer_spec
        return files.JobSignature(
            described.layout, spec.name, spec.state_flags(), described.samples, buffers
        )
