"""What the tests of all modes share: the modes, jobs that train in them, and what a log must say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from msgspec.structs import asdict
from torch import nn

from steepest.core.engine.commit_log import CommitLog
from steepest.core.engine.server import Server
from steepest.core.engine.server_chunk import ServerChunk
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.driver import Result
from steepest.core.messages.message import Kind
from steepest.core.strategies.strategy import Strategy
from steepest.runtime.chunk_transfer import ChunkState, RetainedChunks
from steepest.strategies.allreduce import AllreduceStrategy
from steepest.strategies.parameter_server import ParameterServerStrategy
from steepest.testing import InProcessCluster, replay
from tests.reference import Task, Weights, difference, same_bits, samples, sgd, snapshot

MODES: dict[str, AllreduceStrategy | ParameterServerStrategy] = {
    "sync": ParameterServerStrategy(),
    "copies": ParameterServerStrategy(replication=2),
    "allreduce": AllreduceStrategy(),
    "replicated": AllreduceStrategy(sharded=False),
    "groups": AllreduceStrategy(data_plane="gloo"),  # simulated groups
    "sharded-groups": AllreduceStrategy(data_plane="gloo", sharded=True),
    "backup": ParameterServerStrategy(backup_workers=1),
    "async": ParameterServerStrategy(mode="async"),
    "async-drop": ParameterServerStrategy(mode="async", correction="drop", staleness=1),
    "async-rate": ParameterServerStrategy(mode="async", correction="learning_rate"),
    "ssp-0": ParameterServerStrategy(mode="ssp", staleness=0),
    "ssp-2": ParameterServerStrategy(mode="ssp", staleness=2),
}
#: those in which every member contributes to every version
TOGETHER = ("sync", "copies", "allreduce", "replicated", "groups", "sharded-groups")
#: those in which workers add up gradients among themselves
GROUPED = ("groups", "sharded-groups")
#: those in which workers push whole gradients to servers, so that any number of servers makes the same bits
PUSHED = [name for name in MODES if name not in GROUPED]
PUSHED_TOGETHER = tuple(name for name in TOGETHER if name in PUSHED)
#: those in which each push is an update
EACH = [name for name in MODES if name not in (*TOGETHER, "backup")]


def staged_kind(name: str) -> Kind:
    """What servers tell the coordinator in that mode once everything is staged."""
    return Kind.VERSION_STAGED if name in TOGETHER else Kind.PUSH_STAGED


def credit_kind(name: str) -> Kind:
    """What the coordinator tells workers in that mode to have them take a step."""
    return Kind.GRANT if name in TOGETHER else Kind.LEASE


def mode(name: str, servers: int = 2, chunk_bytes: int = 64, **settings: Any) -> Strategy:
    """The strategy of that name, with small chunks on several servers."""
    chosen = replace(MODES[name], chunk_bytes=chunk_bytes, **settings)
    servers = max(servers, getattr(chosen, "replication", 1))
    return (
        replace(chosen, num_servers=servers)
        if isinstance(chosen, ParameterServerStrategy)
        else chosen
    )


def make(
    name: str,
    task: Task | None = None,
    workers: int = 3,
    devices: int = 1,
    servers: int = 2,
    *,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> InProcessCluster:
    """A job in that mode which keeps its log."""
    return InProcessCluster(
        (task or Task(optimizer=sgd(momentum=0.9))).creator(),
        num_workers=workers,
        devices_per_worker=devices,
        strategy=mode(name, servers, **(settings or {})),
        keep_log=True,
        **options,
    )


def trained(cluster: InProcessCluster, steps: int) -> list[Result]:
    """Results of steps, all of which were taken."""
    results = cluster.step(steps)
    taken = [result for result in results if isinstance(result, Result)]
    assert len(taken) == len(results) == steps
    return taken


def settle(cluster: InProcessCluster) -> None:
    """Lets everything arrive that is on its way."""
    cluster.network.settle()


def trainable(server: Server) -> list[ServerChunk]:
    """The chunks that a server updates."""
    return [held for held in server.chunks.values() if held.chunk.trainable]


def counters(cluster: InProcessCluster) -> dict[str, Any]:
    """The coordinator's."""
    return asdict(cluster.wait(cluster.client.counters(), "the counters"))


def shares(log: CommitLog) -> list[int]:
    """The shares of the samples that were committed, in that order."""
    return [push.share for commit in log.commits for push in commit.pushes]


def worker_weights(cluster: InProcessCluster, version: int) -> list[torch.Tensor]:
    """What each worker holds at a version, as an evaluation there would find it."""
    futures = [
        worker.at_version(
            cluster.coordinator.generation, version, lambda replicas: replicas.weights.clone()
        )
        for worker in cluster.workers
    ]
    return [cluster.wait(future, "the workers' weights") for future in futures]


def check(cluster: InProcessCluster, task: Task) -> CommitLog:
    """What holds in every mode whatever happened: the log explains the weights, and nothing is counted twice."""
    log = cluster.log()
    assert explains(cluster, replay(log, task.creator()))
    check_counts(cluster, log)
    return log


def explains(cluster: InProcessCluster, replayed: Weights) -> bool:
    """Whether a replay has the bits of a job's weights; a replay of process groups adds up in another order."""
    return as_replayed(cluster, replayed, cluster.weights())


def as_replayed(cluster: InProcessCluster, replayed: Weights, found: Weights) -> bool:
    """Whether weights of a job are as exact as its mode can be those of a replay."""
    if cluster.job.places.reduces:
        return difference(replayed, found) < 1e-12
    return same_bits(replayed, found)


def check_counts(cluster: InProcessCluster, log: CommitLog) -> None:
    """What holds in every mode of a log, and of what processes keep: nothing is counted twice."""
    pushes = list(chain.from_iterable(commit.pushes for commit in log.commits))
    versions = [commit.version for commit in log.commits]
    assert [commit.before for commit in log.commits] == [0, *versions][:-1]
    assert len({push[:3] for push in pushes}) == len(pushes)
    assert len({push.share for push in pushes}) == len(pushes)
    told = counters(cluster)
    assert told["committed"] == len(log.commits)
    assert told["version"] == max(versions, default=0)
    assert dict(told["staleness"]) == Counter(
        chain.from_iterable(commit.staleness for commit in log.commits)
    )
    assert told["skipped"] == sum(commit.skipped for commit in log.commits)
    settle(cluster)  # an order to forget a push may be on its way
    for held in (chunk for server in cluster.servers for chunk in server.gradient_stores.values()):
        assert len(held.staged) <= len(cluster.workers)


class Plus(nn.Module):
    """Its gradient is -1 everywhere, whatever the samples: with a learning rate of 1, an update adds 1."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.count.sum()


def plus_one() -> Task:
    """The task whose weights count updates."""
    return Task(Plus, sgd(lr=1.0), samples(24), lambda output, target: output, batch_size=1)


class Moody(nn.Module):
    """A perceptron whose gradient passes through a function of the test's, in the middle of the backward pass."""

    def __init__(self, mood: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4).double()
        self.last = nn.Linear(4, 2).double()
        self.mood = mood

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(self.mood)
        return self.last(hidden)


def salvaged_weights(cluster: InProcessCluster, found: SharedState) -> dict[str, torch.Tensor]:
    """What lies in the servers that a salvage names, by server index; all that have a chunk have the same of it."""
    layout = cluster.job.description.layout
    flat = layout.allocate()
    assert found.holders is not None
    for chunk, holders in found.holders.items():
        first, *others = [cluster.servers[index].chunks[chunk].weights for index in holders]
        assert all(torch.equal(first, other) for other in others)
        layout.chunk_view(flat, chunk).copy_(first)
    return layout.named(flat)


def hand_over(before: InProcessCluster, after: InProcessCluster) -> None:
    """Chunks of one job for another; a server lives in the process of that of its index before, if there was one."""
    kept = [RetainedChunks([server]) for server in before.servers]
    for index, server in enumerate(after.servers):
        own = kept[index] if index < len(kept) else RetainedChunks()
        given: dict[int, ChunkState] = {}
        for chunk in server.chunks:
            holders = before.job.holders[chunk]
            if index not in holders:
                given |= kept[holders[0]].give([chunk])
        own.hand_over([server], given)


def serial(
    task: Task, log: CommitLog, plan: Any, shares_per_step: int, versions_per_step: int
) -> Weights:
    """The log carried out with plain torch: the mean of the gradients at the pulled weights, one optimizer step."""
    torch.manual_seed(log.seed)
    module = task.module()
    optimizer = task.optimizer(module)
    scheduler = None if task.lr_scheduler is None else task.lr_scheduler(optimizer)
    history = [snapshot(module)]
    for commit in log.commits:
        total = 0
        mean = {name: torch.zeros_like(value) for name, value in history[0].items()}
        for push in commit.pushes:
            module.load_state_dict(history[push.pulled])
            module.zero_grad()
            step, part = divmod(push.share, shares_per_step)
            index = torch.from_numpy(plan.share(step, part, shares_per_step).copy())
            if len(index):
                *inputs, target = (column[index] for column in task.data)
                task.loss(module(*inputs), target).backward()
                for name, parameter in module.named_parameters():
                    mean[name] += parameter.grad * len(index)
            total += len(index)
        module.load_state_dict(history[-1])
        for name, parameter in module.named_parameters():
            parameter.grad = mean[name] / max(total, 1)
        late = commit.version - 1 - min(push.pulled for push in commit.pushes)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] /= (
                max(1, late) if getattr(log.strategy, "correction", None) == "learning_rate" else 1
            )
        if total:
            optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if scheduler is not None and commit.version % versions_per_step == 0:
            scheduler.step()
        history.append(snapshot(module))
    return history[-1]
