"""The replay of a log: the same updates, computed by one process, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from steepest.checkpoint.files import assemble, disassemble
from steepest.config.strategies import LocalStrategy
from steepest.engine.commit_log import CommitLog
from steepest.engine.host_aggregator import Relay
from steepest.engine.job import Job, ModelCreator, build_models, build_replicas
from steepest.engine.push_pull import PushPull
from steepest.engine.replicas import Replicas, all_states, mean_states
from steepest.engine.server import Server, ServerMode
from steepest.engine.strategy import make_strategy
from steepest.errors import ConfigurationError
from steepest.messages.message import Kind, Message, Peer, relay_peer, worker_peer
from steepest.tensors.dtypes import Tensors, same_bits
from steepest.tensors.half_precision import narrow_size, rounded


def replay(log: CommitLog, model_creator: ModelCreator) -> dict[str, torch.Tensor]:
    """Apply a log serially, and return the weights by name, which equal those of the run.

    Each gradient is computed again: from the weights of the version that its worker had pulled,
    over the samples and with the random state that it had; so this takes as long as all workers
    together did. Of past versions only those still needed are kept. Computes with as many torch
    threads as the run did, which change the order in which numbers are added up; the caller's
    number is set again at the end.

    Args:
        log: from `DistributedSGD.log()`, with ``RunConfig(keep_log=True)``.
        model_creator: as the run had it.

    Raises:
        ConfigurationError: the log does not begin at the beginning, because weights were set or
            restored, or it goes on with other workers under local SGD or compression, whose own
            state it does not tell; or with a worker, added or a dead one's successor, that began
            with the others' mean of frozen parameters that the model updates.

    Example:
        >>> from steepest.testing import InProcessCluster, linear_model_creator, replay
        >>> cluster = InProcessCluster(linear_model_creator(), num_workers=2, keep_log=True)
        >>> _ = cluster.step(3)
        >>> weights = replay(cluster.log(), linear_model_creator())
        >>> bool((weights["bias"] == cluster.weights()["bias"]).all())
        True
    """
    carried: _Carried | None = None
    before = torch.get_num_threads()
    try:
        for part in log.parts:
            carried = _replay(part, model_creator, carried)
    finally:
        torch.set_num_threads(before)
    assert carried is not None
    return carried.weights


class _Carried(NamedTuple):
    """The state with which the replay of one part of a log ends and that of the next begins.

    Attributes:
        weights: by name, with changed frozen parameters.
        own: the values that replicas change themselves, as the mean over them.
        differing: frozen parameters whose values differ between replicas.
        state: of the optimizer.
        plain: keys of the state that are plain numbers.
    """

    weights: dict[str, torch.Tensor]
    own: Tensors
    differing: list[str]
    state: dict[str, torch.Tensor]
    plain: list[str]


def _replay(log: CommitLog, model_creator: ModelCreator, carried: _Carried | None) -> _Carried:
    if log.commits and (log.commits[0].version != log.start + 1 or (carried is None and log.start)):
        raise ConfigurationError(
            f"the log begins at version {log.commits[0].version - 1}, where weights were set or restored: a replay "
            "needs a run from its beginning"
        )
    strategy = make_strategy(log.strategy)
    devices = log.devices_per_worker
    models, description = build_models(model_creator, 0, devices, log.seed, strategy.cut)
    servers = strategy.num_servers(1, log.num_workers) if log.hosts is None else len(log.hosts.servers)
    job = Job(
        description, log.strategy, log.num_workers, devices, servers, log.seed, 1.0, False, log.hosts, log.accumulate
    )
    if carried is not None and (job.compresses or isinstance(log.strategy, LocalStrategy)):
        raise ConfigurationError(
            f"the run went on at version {log.start} with other processes, under a strategy in which workers have "
            "a state of their own, which the log does not tell: only the part before can be replayed"
        )
    cpu = [torch.device("cpu")] * devices
    workers = [build_replicas(job, 0, models, cpu)] * log.num_workers
    if isinstance(log.strategy, LocalStrategy):  # each worker has a state of its own
        workers = [
            build_replicas(job, i, build_models(model_creator, i, devices, log.seed, strategy.cut)[0], cpu)
            for i in range(log.num_workers)
        ]
    for replicas in workers:
        replicas.use_plan(log.plan or job.plan(), log.seed)
    weights = workers[0].weights.clone()
    layout = description.layout
    if carried is not None:
        layout.write(weights, carried.weights)
    server = Server(
        0,
        replace(job.topology, holders=[(0,)] * len(layout.chunks)),
        job.server_spec,
        weights,
        lambda peer, message: None,
        mode=ServerMode(together=False, open_to_all=True, checked=strategy.nonfinite != "pass"),
    )
    server.version = log.start
    for chunk, about, value in disassemble(layout, carried.state, carried.plain) if carried is not None else ():
        server._chunks[chunk].load_state(about, value.clone())
    senders = _Senders(job, server)
    compute, apply = (partial(torch.set_num_threads, count) for count in log.threads or [torch.get_num_threads()] * 2)
    last_use = {push.pulled: commit.version for commit in log.commits for push in commit.pushes}
    history = {log.start: weights.clone()}
    if carried is not None:
        _refuse_if(carried.differing, log)
        workers[0].begin_with(carried.own)
    begun = workers[0].states()
    # Of each worker's replicas: buffers, and frozen parameters that they change.
    states = [begun] * log.num_workers
    lives: dict[int, int] = {}
    succeeded = False
    for commit in log.commits:
        compute()
        for push in commit.pushes:
            replicas = workers[push.worker]
            _pull(history[push.pulled], replicas, push.worker, job)
            for model, state in zip(replicas.models, states[push.worker], strict=True):
                model.load_state(state)
            first_life = 0 if carried is None else push.incarnation
            succeeded |= lives.setdefault(push.worker, first_life) != push.incarnation
            exchange = senders.exchange(push.worker, push.incarnation)
            exchange.begin(0, push.pulled, push.incarnation)
            exchange.sequence = push.sequence
            replicas.compute(push.share, exchange.ready, False)
            states[push.worker] = replicas.states()
            exchange.packer.commit()
        order = Message(Kind.COMMIT, version=commit.version, weight=commit.rate)
        order.meta = {"pushes": [list(push[:3]) for push in commit.pushes], "readers": [], "skip": commit.skipped}
        order.meta["clip"] = commit.clip
        if commit.hyperparameters is not None:
            order.meta["hyper"] = commit.hyperparameters
        apply()
        server.handle(worker_peer(0), order)
        history[commit.version] = weights.clone()
        for version in [v for v in history if last_use.get(v, 0) <= commit.version]:
            del history[version]
    records = [(index, about, value) for index, held in server._chunks.items() for about, value in held.state()]
    everything = _all(states, workers)
    mean = mean_states(everything, [1.0] * len(everything))
    own = {name: value for name, value in mean.items() if name in layout.index}
    if succeeded:
        _refuse_if(list(own), log)
    differing = [name for name in own if any(not same_bits(own[name], state[name]) for state in everything)]
    return _Carried(layout.named(weights) | own, mean, differing, *assemble(layout, records))


def _refuse_if(names: list[str], log: CommitLog) -> None:
    """Refuse a part of a log before which workers began with a mean of frozen parameters.

    The log does not tell when that mean was taken.

    Raises:
        ConfigurationError: `names` has a parameter.
    """
    if names:
        raise ConfigurationError(
            f"after version {log.start} a worker began with the mean of what the others had made of frozen parameters "
            f"({names[0]!r}), and the log does not tell what that was: only what came before can be replayed"
        )


def _all(states: list[list[Tensors]], workers: list[Replicas]) -> list[Tensors]:
    """Return the values that each worker's replicas have changed themselves, all with the same names."""

    def call(function: Callable[..., Any], *names: Sequence[str]) -> list[Any]:
        found = []
        for replicas, own in zip(workers, states, strict=True):
            for model, state in zip(replicas.models, own, strict=True):
                model.load_state(state)
            found.append(function(replicas, *names))
        return found

    return all_states(call)


class _Senders:
    """The workers' ends, whose pushes reach the one server in the form that they had in the run."""

    def __init__(self, job: Job, server: Server) -> None:
        self._job = job
        self._server = server
        self._exchanges: dict[int, tuple[int, PushPull]] = {}  # by worker: incarnation, end
        self._relays = {
            index: Relay(
                index,
                job.topology,
                job.description.layout.allocate(),
                partial(self._arrive, relay_peer(index)),
                checked=job.strategy.nonfinite != "pass",
            )
            for index in job.places.relays
        }

    def exchange(self, worker: int, incarnation: int) -> PushPull:
        """Return a worker's end; a successor begins with a new one, because the old residuals died.

        Args:
            worker: its index.
            incarnation: its life.
        """
        life, exchange = self._exchanges.get(worker, (-1, None))
        if exchange is None or life != incarnation:
            memory = self._job.description.layout.allocate()
            send = partial(self._arrive, worker_peer(worker))
            exchange = PushPull(worker, self._job.topology, memory, send)
            self._exchanges[worker] = incarnation, exchange
        return exchange

    def _arrive(self, source: Peer, target: Peer, message: Message) -> None:
        if target.role == "server" and target.index != self._job.owners[message.chunk]:
            return  # the holders of copies get the same
        message.source, message.target = source, target
        if message.payload is not None:
            message.payload = message.payload.clone()  # the next push overwrites it
        (self._relays[target.index] if target.role == "relay" else self._server).handle(source, message)


def _pull(weights: torch.Tensor, replicas: Replicas, worker: int, job: Job) -> None:
    """Copy weights into a worker's replicas, in the precision in which it received them."""
    layout, wire = job.description.layout, job.wire_formats[1]
    replicas.weights.copy_(weights)
    for chunk in layout.chunks:
        holders = job.holders[chunk.index]
        near = (job.strategy.in_workers and worker in holders) or job.places.beside(worker, holders[0])
        if wire is not None and chunk.trainable and not near and narrow_size(chunk.dtype, chunk.nbytes, wire):
            view = layout.chunk_view(replicas.weights, chunk.index)
            view.copy_(rounded(view, wire))
    replicas.weights_changed()
