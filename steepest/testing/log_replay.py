"""The replay of a log: the same updates, computed by one process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from steepest.checkpoint import files
from steepest.core.engine.commit_log import Commit, CommitLog, LoggedPush, Unpushed
from steepest.core.engine.exchange import Exchange, PushPull
from steepest.core.engine.hosting import build_replicas
from steepest.core.engine.job import Job, ModelCreator
from steepest.core.engine.model_building import build_models
from steepest.core.engine.optimizer_slices import assemble, disassemble
from steepest.core.engine.replica_states import all_states, merged_states
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.server import Server, ServerMode
from steepest.core.messages import gradients
from steepest.core.messages.message import (
    Message,
    Peer,
    PushId,
    Send,
    aggregator_peer,
    server_peer,
    worker_peer,
)
from steepest.core.models.protocol import Model
from steepest.core.optim.arriving import ArrivingState
from steepest.core.tensors.dtypes import Tensors, same_bits
from steepest.core.tensors.half_precision import narrow_size, rounded
from steepest.errors import CheckpointError, ConfigurationError
from steepest.extensions import EXTENSIONS
from steepest.runtime.state.row_read import rows_of
from steepest.strategies.aggregation.extension import route_of
from steepest.strategies.aggregation.host_aggregator import HostAggregator
from steepest.strategies.compression.gradient_compressor import GradientCompressor
from steepest.strategies.named import renewed
from steepest.strategies.rounds import CommitQuorum
from steepest.tables.files.saved_rows import CheckpointRows
from steepest.tables.job.job_tables import dealing_of, delays_rows
from steepest.tables.job.restored_shards import HoldsRows, RestoredShards, RowsWanted
from steepest.tables.job.row_messages import RowKind, RowsOfPush

if TYPE_CHECKING:
    from steepest.tables.job.row_exchange import RowExchange
    from steepest.testing.replay_rows import RowsOfVersions


def replay(
    log: CommitLog, model_creator: ModelCreator, checkpoint: str | Path | None = None
) -> dict[str, torch.Tensor]:
    """Apply a log serially, and return the weights by name, which equal those of the run.

    Each gradient is computed again: from the weights of the version that its worker had pulled,
    over the samples and with the random state that it had; so this takes as long as all workers
    together did. Of past versions only those still needed are kept. Computes with as many torch
    threads as the run did, which change the order in which numbers are added up; the caller's
    number is set again at the end.

    Args:
        log: from `DistributedSGD.log()`, with ``RunConfig(keep_log=True)``.
        model_creator: as the run had it.
        checkpoint: from which the run went on, by `DistributedSGD.restore` or because it was started
            again; None if the log begins with the run.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigurationError: the log begins neither at the beginning nor at the checkpoint, because
            weights were set; or its workers have states of their own at the checkpoint, such as
            buffers that differ; or it goes on with other workers under local SGD or compression,
            whose own state it does not tell; or with a worker, added or a dead one's successor, that
            began with the others' mean of frozen parameters that the model updates; or its gradients
            need other rows of embedding tables than the run's.

    Example:
        >>> from steepest.testing import InProcessCluster, linear_model_creator, replay
        >>> cluster = InProcessCluster(linear_model_creator(), num_workers=2, keep_log=True)
        >>> _ = cluster.step(3)
        >>> weights = replay(cluster.log(), linear_model_creator())
        >>> bool((weights["bias"] == cluster.weights()["bias"]).all())
        True
    """
    return _replay_all(log, model_creator, checkpoint).weights


def _replay_all(
    log: CommitLog, model_creator: ModelCreator, checkpoint: str | Path | None
) -> _Carried:
    carried = None if checkpoint is None else _Carried.of(files.read_apart(Path(checkpoint)))
    before = torch.get_num_threads()
    try:
        for part in log.parts:
            carried = _replay(part, model_creator, carried)
    finally:
        torch.set_num_threads(before)
    assert carried is not None
    return carried


class _Carried(NamedTuple):
    """The state with which the replay of one part of a log ends and that of the next begins."""

    weights: dict[str, torch.Tensor]  # by name, with changed frozen parameters
    own: Tensors  # the values that replicas change themselves, as the mean over them
    differing: list[str]  # frozen parameters whose values differ between replicas
    state: dict[str, torch.Tensor]  # of the optimizer
    plain: list[str]  # keys of the state that are plain values
    step: int | None = None  # of the checkpoint that it was read from, if it was
    rows: CheckpointRows | None = None  # of tables

    @classmethod
    def of(cls, saved: files.Checkpoint) -> _Carried:
        """Return the state of a checkpoint; ConfigurationError: workers have states of their own there."""
        own = [name for name, value in saved.replicas.items() if not _is_mean(name, value, saved)]
        if own:
            raise ConfigurationError(
                f"in the checkpoint workers have states of their own ({own[0]!r}): a replay from "
                "there needs workers that are alike"
            )
        mean = Tensors(saved.weights)
        state = saved.optimizer, saved.about["plain"]
        return cls(dict(saved.weights), mean, [], *state, saved.about["step"], saved.saved_rows)


def _is_mean(name: str, value: torch.Tensor, saved: files.Checkpoint) -> bool:
    """Return whether one replica's own value, under "replica/buffer", is the mean over replicas."""
    replica, _, buffer = name.partition("/")
    mean = saved.weights.get(buffer)
    return replica.isdigit() and mean is not None and same_bits(value, mean)


def _replay(log: CommitLog, model_creator: ModelCreator, carried: _Carried | None) -> _Carried:
    run = _PartReplay(replace(log, strategy=renewed(log.strategy)), model_creator, carried)
    for commit in log.commits:
        run.repeat(commit)
    return run.carried()


def _begin_state(server: Server, job: Job, model: Model, carried: _Carried | None) -> None:
    """Give a server the optimizer's state and the rows with which a part of a log begins.

    Raises:
        CheckpointError: the job cannot have them.
    """
    state = model.optimizer_state if not job.strategy.local else None
    if carried is not None:
        state = ArrivingState(carried.state, tuple(carried.plain))
    if state is not None:
        server.begin_with(disassemble(job.description.layout, state.state, state.plain))
    dealing, saved = dealing_of(job), None if carried is None else carried.rows
    if dealing is None or saved is None:
        return
    restored, wanted = RestoredShards(), RowsWanted(0, dealing.chunks, dealing, saved)
    answer = restored.read(wanted)
    if answer.elsewhere:
        answer = restored.read(replace(wanted, dealt=True))
    if why := answer.damaged or answer.unfit:
        raise CheckpointError(f"embedding tables: {why}")
    for chunk in dealing.chunks:
        held, shard = server.chunks[chunk], restored.take(0, chunk)
        assert isinstance(held, HoldsRows)
        assert shard is not None
        held.rows = shard


class _PartReplay:
    """The replay of one part of a log in one process; `carried`: from the part before, None for the first."""

    # It has every worker's replicas, one server, and the weights of the versions that are still needed.

    def __init__(
        self, log: CommitLog, model_creator: ModelCreator, carried: _Carried | None
    ) -> None:
        begun = not log.commits or log.commits[0].before == log.start
        if not begun or (carried is None and log.start):
            first = log.start if begun else log.commits[0].before
            raise ConfigurationError(
                f"the log begins at version {first}, where weights were set or restored: a replay "
                "needs a run from its beginning, or checkpoint=, from which it went on"
            )
        models, self._job = _models_and_job(log, model_creator)
        if carried is not None and carried.step is not None:
            saved = self._job.version_of(carried.step)
            if saved != log.start:
                raise ConfigurationError(
                    f"the log begins at version {log.start}, the checkpoint is of version {saved}: "
                    "give the one from which the run went on last"
                )
        if carried is not None and (self._job.compresses or log.strategy.local):
            raise ConfigurationError(
                f"the run went on at version {log.start} with other processes, under a strategy in "
                "which workers have a state of their own, which the log does not tell: only the "
                "part before can be replayed"
            )
        self._log = log
        self._layout = self._job.description.layout
        self._first_part = carried is None
        self._workers = _workers(log, self._job, models, model_creator)
        self._weights = self._workers[0].weights.clone()
        if carried is not None:
            of_layout = carried.weights.keys() & self._layout.index.keys()
            self._layout.write(self._weights, {name: carried.weights[name] for name in of_layout})
        self._server = _server(self._job, self._weights, log.start)
        _begin_state(self._server, self._job, models[0], carried)
        if carried is not None:
            _refuse_if(carried.differing, log)
            trained = {entry.name for entry in self._layout.entries if entry.trainable}
            own = Tensors((n, value) for n, value in carried.own.items() if n not in trained)
            self._workers[0].begin_with(own)
        self._rows = self._rows_of_versions()
        self._senders = _Senders(self._job, self._server, self._rows, log.unpushed)
        self._threads = log.threads or [torch.get_num_threads()] * 2  # of workers, of servers
        self._last_use = {
            push.pulled: commit.version for commit in log.commits for push in commit.pushes
        }
        # by version: the weights, and what workers of other hosts have of them
        self._history, self._sent = ({log.start: self._weights.clone()} for _ in range(2))
        # By worker and replica: buffers, and frozen parameters that the model changes.
        self._states = [self._workers[0].states()] * log.num_workers
        self._lives: dict[int, int] = {}
        self._succeeded = False  # whether a worker had a successor

    def _rows_of_versions(self) -> RowsOfVersions | None:
        """Return what answers workers' pulls of rows; None without tables."""
        if (dealing := dealing_of(self._job)) is None:
            return None
        from steepest.testing.replay_rows import RowsOfVersions

        commits, delays = self._log.commits, delays_rows(self._job)
        return RowsOfVersions(dealing, self._server, commits, delays)

    def repeat(self, commit: Commit) -> None:
        """Compute the gradients of a commit again, and apply them."""
        torch.set_num_threads(self._threads[0])
        for push in commit.pushes:
            self._compute(push)
        order = gradients.CommitOrder(
            *(
                0,
                commit.version,
                commit.rate,
                tuple(PushId(*push[:3]) for push in commit.pushes),
                (),
            ),
            hyper=commit.hyperparameters,
            skip=commit.skipped,
            clip=commit.clip,
            made=commit.made,
            clock=commit.clock,
            fragments=self._fragments_of(commit),
        )
        torch.set_num_threads(self._threads[1])
        self._server.handle(worker_peer(0), order.pack())
        for push in commit.pushes:
            exchange = self._senders.end(push.worker, push.incarnation).exchange
            if commit.skipped:
                exchange.left_out()
                self._workers[push.worker].left_out()
            else:
                exchange.committed(push.sequence)
        if self._rows is not None:
            self._rows.committed()
        self._history[commit.version] = sent = self._weights.clone()
        if self._job.topology.pull_codec is not None:
            sent = sent.clone()
            for index, held in self._server.chunks.items():
                if held.sent is not None:
                    self._layout.chunk_view(sent, index).copy_(held.sent)
        self._sent[commit.version] = sent
        for version in [v for v in self._history if self._last_use.get(v, 0) <= commit.version]:
            del self._history[version], self._sent[version]

    def _fragments_of(self, commit: Commit) -> list[int]:
        """Return the fragments that a commit changes where its pushes say so; none where they take turns."""
        if not isinstance(self._log.strategy.rule, CommitQuorum):
            return []
        return sorted({push.fragment or 0 for push in commit.pushes})

    def _compute(self, push: LoggedPush) -> None:
        replicas = self._workers[push.worker]
        weights = self._history[push.pulled], self._sent[push.pulled]
        _pull(*weights, replicas, push.worker, self._job)
        for model, state in zip(replicas.models, self._states[push.worker], strict=True):
            model.load_state(state)
        first_life = 0 if self._first_part else push.incarnation
        if self._lives.setdefault(push.worker, first_life) != push.incarnation:
            self._succeeded, self._lives[push.worker] = True, push.incarnation
            begun = replicas.models[0].optimizer_state or ArrivingState({}, ())
            replicas.load_inner_state(begun.state, begun.plain, None)
        end = self._senders.end(push.worker, push.incarnation)
        exchange = end.exchange
        if self._rows is not None and end.rows is not None:
            self._rows.begin(push, end.rows)
        replicas.use_exchange(exchange)
        exchange.begin(0, push.pulled, push.incarnation, is_last=RowsOfPush.of(push).own)
        end.dense.sequence = push.sequence
        replicas.leased_shares, replicas.turn = push.length, push.fragment
        replicas.compute(push.share, exchange.ready, False)
        if self._rows is not None:
            self._rows.end()
        self._states[push.worker] = replicas.states()

    def carried(self) -> _Carried:
        """Return the state with which the next part of the log begins."""
        held = self._server.chunks.items()
        records = [
            (index, record, value) for index, chunk in held for record, value in chunk.state()
        ]
        everything = _all(self._states, self._workers)
        mean = merged_states(everything, self._job.description)
        own = {name: value for name, value in mean.items() if name in self._layout.index}
        if self._succeeded:
            _refuse_if(list(own), self._log)
        differing = [
            name
            for name in own
            if any(not same_bits(own[name], state[name]) for state in everything)
        ]
        weights = self._layout.named(self._weights) | own
        rows = rows_of(self._job, records)
        dense = [record for record in records if record[0] not in self._layout.opaque_chunks]
        return _Carried(weights, mean, differing, *assemble(self._layout, dense), rows=rows)


def _models_and_job(log: CommitLog, model_creator: ModelCreator) -> tuple[list[Model], Job]:
    strategy, devices = log.strategy, log.devices_per_worker
    models, description = build_models(
        model_creator, 0, devices, log.seed, strategy.cut, None, EXTENSIONS
    )
    servers = (
        strategy.servers_for(1, log.num_workers) if log.hosts is None else len(log.hosts.servers)
    )
    return models, Job(
        description,
        log.strategy,
        log.num_workers,
        devices,
        servers,
        log.seed,
        1.0,
        False,
        log.hosts,
        log.accumulate,
    )


def _workers(
    log: CommitLog, job: Job, models: list[Model], model_creator: ModelCreator
) -> list[Replicas]:
    """Return each worker's replicas: the same for all, unless each has a state of its own."""
    devices = log.devices_per_worker
    cpu = [torch.device("cpu")] * devices
    workers = [build_replicas(job, 0, models, cpu, extensions=EXTENSIONS)] * log.num_workers
    if log.strategy.local:
        workers = [
            build_replicas(
                job,
                i,
                build_models(model_creator, i, devices, log.seed, job.strategy.cut)[0],
                cpu,
                extensions=EXTENSIONS,
            )
            for i in range(log.num_workers)
        ]
    for replicas in workers:
        replicas.use_plan(log.plan or job.plan(), log.seed)
        replicas.rates = log.rates
    return workers


def _server(job: Job, weights: torch.Tensor, version: int) -> Server:
    """Return one server of all chunks, at a version."""
    server = Server(
        0,
        replace(
            job.topology,
            holders=[(0,)] * len(job.description.layout.chunks),
            pushes=job.topology.pushed,
        ),
        job.server_spec,
        weights,
        lambda peer, message: None,
        mode=ServerMode(stages_each=True, versions_differ=True, open_to_all=True),
    )
    server.version = version
    return server


def _refuse_if(names: list[str], log: CommitLog) -> None:
    """Refuse a log's part before which workers began with a mean of frozen parameters (`names`): ConfigurationError."""
    # The log does not tell when that mean was taken.
    if names:
        raise ConfigurationError(
            f"after version {log.start} a worker began with the mean of the other workers' frozen "
            f"parameters ({names[0]!r}), which the log does not tell: only the part before can be "
            "replayed"
        )


def _all(states: list[list[Tensors]], workers: list[Replicas]) -> list[Tensors]:
    """Return the values that each worker's replicas changed themselves, all with the same names."""

    def call(function: Callable[..., Any], *names: Sequence[str]) -> list[Any]:
        results = []
        for replicas, own in zip(workers, states, strict=True):
            for model, state in zip(replicas.models, own, strict=True):
                model.load_state(state)
            results.append(function(replicas, *names))
        return results

    return all_states(call)


class _End(NamedTuple):
    """A worker's end of pushes."""

    dense: PushPull
    rows: RowExchange | None  # of embedding tables; None without tables
    exchange: Exchange  # of both


class _Senders:
    """The workers' ends of pushes, which reach the one server, of all chunks, in the form of the run."""

    # rows: answers pulls of rows, None without tables; unpushed: by worker, the gradients of rows with which it begins.

    def __init__(
        self, job: Job, server: Server, rows: RowsOfVersions | None, unpushed: Unpushed
    ) -> None:
        self._job = job
        self._server = server
        self._rows = rows
        self._unpushed = dict(unpushed)
        self._ends: dict[int, tuple[int, _End]] = {}  # by worker: incarnation, end
        self._aggregators = {
            index: HostAggregator(
                index,
                job.topology,
                job.description.layout.allocate(),
                partial(self._arrive, aggregator_peer(index)),
                checked=job.strategy.nonfinite != "pass",
            )
            for index in job.places.aggregators
        }

    def end(self, worker: int, incarnation: int) -> _End:
        """Return a worker's end of pushes.

        Each life of the worker has its own: what compression has left out is lost when a life ends.
        """
        life, end = self._ends.get(worker, (-1, None))
        if end is None or life != incarnation:
            memory = self._job.description.layout.allocate()
            send = partial(self._arrive, worker_peer(worker))
            dense = PushPull(
                worker,
                self._job.topology,
                memory,
                send,
                compressor=GradientCompressor,
                route=route_of(self._job, worker) or server_peer,
            )
            end = _End(dense, None, dense)
            if dealing_of(self._job) is not None:
                end = _with_rows(dense, worker, self._job, send, self._unpushed.pop(worker, {}))
            self._ends[worker] = incarnation, end
        return end

    def _arrive(self, source: Peer, target: Peer, message: Message) -> None:
        if message.kind is RowKind.PULL_ROWS:
            rows = self._ends[source.index][1].rows
            assert self._rows is not None
            assert rows is not None
            self._rows.answer(source, target, message, rows)
            return
        if target.role == "server" and target.index != self._job.owners[message.body.chunk]:
            return  # other holders of the chunk get the same push
        message.source, message.target = source, target
        if message.payload is not None:
            message.payload = message.payload.clone()  # the next push overwrites it
        (self._aggregators[target.index] if target.role == "aggregator" else self._server).handle(
            source, message
        )


def _with_rows(
    dense: PushPull, worker: int, job: Job, send: Send, unpushed: Mapping[str, torch.Tensor]
) -> _End:
    """Return the end of a worker that uses rows of tables, and asks for none beforehand."""
    from steepest.tables.job.companion import RowCompanion
    from steepest.tables.job.exchange import ExchangeWithRows
    from steepest.tables.job.row_exchange import RowExchange

    dealing = dealing_of(job)
    assert dealing is not None
    rows = RowExchange(worker, dealing, job.topology, send)
    rows.push_later(unpushed)
    return _End(dense, rows, ExchangeWithRows(dense, rows, RowCompanion(rows, None, job.shares)))


def _pull(
    weights: torch.Tensor, sent: torch.Tensor, replicas: Replicas, worker: int, job: Job
) -> None:
    """Copy weights into a worker's replicas, in the precision in which it received them."""
    # sent: as workers of other hosts have them.
    layout, wire = job.description.layout, job.wire_formats[1]
    replicas.arrivals.copy_(weights)
    for chunk in layout.chunks:
        holders = job.holders[chunk.index]
        near = (job.strategy.in_workers and worker in holders) or job.places.beside(
            worker, holders[0]
        )
        if not near:
            view = layout.chunk_view(replicas.arrivals, chunk.index)
            view.copy_(layout.chunk_view(sent, chunk.index))
        if (
            wire is not None
            and chunk.trainable
            and not near
            and narrow_size(chunk.dtype, chunk.nbytes, wire)
        ):
            view = layout.chunk_view(replicas.arrivals, chunk.index)
            view.copy_(rounded(view, wire))
    replicas.weights_changed()
