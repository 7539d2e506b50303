"""How the roles of one job are made in a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from steepest.core.engine.auditing import Auditor
from steepest.core.engine.client import Client
from steepest.core.engine.coordinator_role import CoordinatorRole
from steepest.core.engine.exchange import Compressor, Exchange, PushPull
from steepest.core.engine.extension import Extension
from steepest.core.engine.job import Job
from steepest.core.engine.optimizer_slices import disassemble
from steepest.core.engine.replicas import CPU, Memory, Replicas, WorkShare
from steepest.core.engine.server import Server, ServerMode
from steepest.core.engine.step_waits import BetweenTurns
from steepest.core.engine.worker import Worker
from steepest.core.messages.message import COORDINATOR, Peer, server_peer, worker_peer
from steepest.core.messages.permissions import MessageCheck
from steepest.core.models.protocol import Model
from steepest.core.optim.arriving import ArrivingState
from steepest.core.optim.spec import Schedule
from steepest.core.protocol.audits import Audits
from steepest.core.protocol.commit_state import CommitState
from steepest.core.protocol.coordinator import Updates
from steepest.core.protocol.job_coordinator import JobCoordinator
from steepest.core.system import system
from steepest.core.tensors.codec import Codec
from steepest.core.tensors.layout import ParameterLayout
from steepest.core.transport.router import Role, Router
from steepest.errors import ConfigurationError

#: How often, while it waits for further pushes of a round, a coordinator checks whether the grace period is over.
_LOOKS = 4


def build_replicas(
    job: Job,
    worker: int,
    models: Sequence[Model],
    devices: Sequence[torch.device],
    before: Replicas | None = None,
    memory: Memory | None = None,
    extensions: Sequence[Extension] = (),
    *,
    serves: bool = False,
) -> Replicas:
    """Return a worker's replicas: its models, bound to flat vectors on their devices.

    Args:
        job: of the worker.
        worker: its index.
        models: one for each device.
        devices: of the models.
        before: the replicas of these models in an earlier job. If they fit this job they are renumbered
            and returned; their place in the data is kept in any case.
        memory: for new replicas' weights and gradients, see `memory_for`.
        extensions: one of them may have replicas of another kind.
        serves: whether servers of the job are hosted in the worker's process.

    Raises:
        ConfigurationError: no extension has the replicas that the strategy needs.
    """
    share = WorkShare(
        first_index=worker * job.devices_per_worker,
        shares=job.shares,
        seed=job.seed,
        accumulate=job.micro_batches,
        updates=job.strategy.updates_of_share,
        updates_of_step=job.strategy.updates,
        varies=job.global_batch_size is not None,
        rule=job.strategy.rule,
        workers=job.num_workers,
    )
    made = (each.replicas(job, share, models, devices, memory) for each in extensions)
    replicas = next((candidate for candidate in made if candidate is not None), None)
    home = devices[0] if job.stays_on_gpu(serves=serves) else CPU
    if replicas is not None:
        pass
    elif job.strategy.local:
        raise ConfigurationError(
            f"strategy {job.config.name!r} has workers with an optimizer of their own, for which nothing is "
            "attached here: give build_replicas() the extension steepest.strategies.local_sgd.extension.LocalSgd()"
        )
    elif (
        type(before) is Replicas
        and before.leases_samples == job.leases_samples
        and before.home == home
        and before.layout.chunks == models[0].layout.chunks
    ):
        before.renumber(share)
        return before
    else:
        replicas = Replicas(models, devices, share, memory, home)
    if before is not None:
        replicas.take_over(before)
    return replicas


def make_coordinator(job: Job) -> JobCoordinator:
    """Return the coordinator of a job; the caller carries its messages."""
    chunks, strategy = job.description.layout.chunks, job.strategy
    state = CommitState(
        members=frozenset(range(job.num_workers)),
        servers=tuple(range(job.num_servers)),
        holding=frozenset(
            server for chunk in chunks if chunk.trainable for server in job.holders[chunk.index]
        ),
        rule=strategy.rule,
        schedule=Schedule(job.server_spec, strategy.updates, job.schedule_offset),
        # under local SGD the rates are those of the workers' own optimizers
        sets_rates=not strategy.local,
        keep_log=job.keep_log,
        witnessed=job.replication > 1,
    )

    updates = Updates(
        state.hyperparameters,
        nonfinite=strategy.nonfinite,
        clip_norm=strategy.clips_updates,
        sums=job.sums_at_commit,
        scale_rate=strategy.scale_rate,
        clock=system().time if job.stores is not None and job.stores.keeps_time else None,
        groups=[hyper for _, hyper in job.server_spec.groups],
    )
    return strategy.coordinator(
        state,
        updates,
        step_timeout=job.step_timeout,
        replaces=job.workers_are_replaced,
        reloads=job.passes_weights,
        audits=Audits() if job.audit else None,
        replaces_wrong=job.audit_replaces,
    )


def host_coordinator(router: Router, job: Job, pause: float = 0.0) -> JobCoordinator:
    """Host the coordinator in this process; for `pause` see `CoordinatorRole`."""
    if grace := job.strategy.grace:
        router.tick_within(grace / _LOOKS)
    coordinator = make_coordinator(job)
    host_role(
        router,
        job,
        COORDINATOR,
        CoordinatorRole(
            coordinator, router.sender(COORDINATOR), router.pump, pause, router.when_idle
        ),
    )
    return coordinator


def host_server(
    router: Router,
    job: Job,
    index: int,
    weights: torch.Tensor,
    *,
    shared: bool = False,
    arriving: ArrivingState | None = None,
) -> Server:
    """Host a server in this process.

    Args:
        router: of the process.
        job: of the server.
        index: of the server.
        weights: the flat vector (uint8, of the layout's size) with the initial values.
        shared: whether workers compute with the weights in this same vector, so that the server
            must update them in place.
        arriving: the state with which the model's optimizer arrives; under local SGD it is for
            workers alone.
    """
    peer = server_peer(index)
    if job.stores is not None:
        job.stores.prepare()
    server = Server(
        index,
        job.topology,
        job.server_spec,
        weights,
        router.sender(peer),
        router.in_use,
        own_pending=router.own_pending if shared else None,
        mode=ServerMode(
            stages_each=job.stages_each,
            versions_differ=not job.needs_all,
            in_workers=job.strategy.in_workers,
        ),
    )
    server.flush = router.pump
    if arriving is not None and not job.strategy.local:
        layout = job.description.layout
        server.begin_with(disassemble(layout, arriving.state, arriving.plain))
    host_role(router, job, peer, server)
    return server


def host_worker(
    router: Router,
    job: Job,
    index: int,
    replicas: Replicas,
    wait: Callable[[], None] | None = None,
    incarnation: int = 0,
    extensions: Sequence[Extension] = (),
) -> Worker:
    """Host a worker in this process; it takes part after its `join` only.

    Args:
        router: of the process.
        job: of the worker.
        index: of the worker.
        replicas: its copies of the model.
        wait: called in the middle of a step to receive what its models need; by default a turn of the router. With
            it no step begins before its weights are here, which a strategy with a `delay` does otherwise.
        incarnation: number of this life of the worker, from 0.
        extensions: add to the worker's exchange of dense chunks; each wraps those before it.

    Raises:
        ConfigurationError: no extension has what the strategy or the models need.
    """
    peer = worker_peer(index)
    send = router.sender(peer)
    own = index if job.strategy.in_workers else None
    compressor = partial(_compressor, extensions)
    exchange: Exchange = PushPull(
        index,
        job.topology,
        replicas.arrivals,
        send,
        own,
        compressor,
        _route(job, index, extensions),
    )
    for extension in extensions:
        exchange = extension.exchange(job, index, replicas, exchange, send)
    inner = exchange
    for extension in extensions:
        exchange = extension.around(job, index, replicas, exchange, router)
    if job.places.reduces and exchange is inner:
        raise ConfigurationError(
            f"strategy {job.config.name!r} has workers add up gradients among themselves, and nothing here does: give "
            "host_worker() the extension steepest.strategies.process_groups.extension.ProcessGroups()"
        )
    replicas.use_exchange(exchange)
    # Where every worker contributes to each version, no weights come before it has computed its
    # gradient, so that it may receive other workers' pushes meanwhile.
    pump = router.pump_both_ways if job.strategy.in_workers and job.needs_all else router.pump
    pulled, auditor = job.wire_formats[1], None
    if job.audit:
        auditor = Auditor(job.audit, job.num_workers, replicas, pulled)
    worker = Worker(
        index,
        replicas,
        exchange,
        send,
        members=job.num_workers,
        incarnation=incarnation,
        between=BetweenTurns(
            pump,
            router.finish,
            router.when_idle,
            wait or router.wait,
            poll=partial(router.wait, 0.0) if wait is None and job.num_workers > 1 else None,
        ),
        auditor=auditor,
    )
    replicas.use_plan(job.plan(), job.seed)
    host_role(router, job, peer, worker)
    return worker


def _route(job: Job, worker: int, extensions: Sequence[Extension]) -> Callable[[int], Peer]:
    """Return a function from a server to the peer that takes a worker's pushes for it.

    Raises:
        ConfigurationError: the worker's host has an aggregator, and no extension for it is given.
    """
    for extension in extensions:
        if (route := extension.route(job, worker)) is not None:
            return route
    if job.places.aggregator_of(worker) is not None:
        raise ConfigurationError(
            f"the host of worker {worker} has an aggregator, of which nothing is known here: give host_worker() the "
            "extension steepest.strategies.aggregation.extension.Aggregation(), or the job hosts that do not gather"
        )
    return server_peer


def _compressor(
    extensions: Sequence[Extension], layout: ParameterLayout, codec: Codec, packed: Sequence[bool]
) -> Compressor:
    """Return the compressor that an extension has; ConfigurationError: none has one."""
    for extension in extensions:
        if (compressor := extension.compressor(layout, codec, packed)) is not None:
            return compressor
    raise ConfigurationError(
        f"gradients travel as {type(codec).__name__}, and this process can pack none: give host_worker() an "
        "extension that has a compressor, or the strategy no codec"
    )


def host_role(router: Router, job: Job, peer: Peer, role: Role) -> None:
    """Have a router deliver messages to a role, and admit only messages that the job allows."""
    router.host(peer, role)
    router.admit(MessageCheck(job.lines, job.limits))
    if job.description.attend is not None and peer.role in ("server", "worker"):
        job.description.attend(router, peer, role)


def host_client(router: Router, job: Job, index: int) -> Client:
    """Host a client in this process."""
    peer = Peer("client", index)
    client = Client(job.description.layout, job.holders, job.num_servers, router.sender(peer))
    host_role(router, job, peer, client)
    return client
