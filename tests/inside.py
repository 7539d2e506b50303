"""What the parts of a job keep inside, for tests that look at it."""

from __future__ import annotations

from pathlib import Path

import torch

from steepest.core.engine.commit_log import Commit, CommitLog
from steepest.core.engine.exchange import Exchange
from steepest.core.engine.job import ModelCreator
from steepest.core.engine.replicas import Replicas
from steepest.core.engine.server import Server
from steepest.core.engine.worker import Worker
from steepest.core.messages.message import Peer
from steepest.core.protocol.coordinator import Coordinator
from steepest.core.protocol.push_tracking import SequenceSet, StagedEach
from steepest.core.transport.router import Role, Router
from steepest.core.transport.sockets import WireTransport
from steepest.strategies.collectives.members import MemberCollective
from steepest.tables.files.saved_rows import TABLES
from steepest.testing import log_replay


def role_of(router: Router, peer: Peer) -> Role:
    """Return the role of that name that lives in a process."""
    return router._roles[peer]


def replicas_of(worker: Worker) -> Replicas:
    """Return the copies of the model with which a worker computes."""
    return worker._replicas


def exchange_of(worker: Worker) -> Exchange:
    """Return a worker's end of its strategy."""
    return worker._exchange


def log_of(coordinator: Coordinator) -> list[Commit]:
    """Return the commits of a coordinator that keeps a log."""
    return [Commit.from_entry(entry) for entry in coordinator.state.history.page(0)["log"]]


def gradient_of(worker: Worker) -> torch.Tensor:
    """Return the flat vector (uint8) of the gradient that a worker pushed last."""
    assert worker._replicas._sum is not None
    return worker._replicas._sum


def channels_of(wire: WireTransport) -> int:
    """Return the number of a process' open channels."""
    return len(wire._channels)


def unsent_of(wire: WireTransport) -> int:
    """Return the bytes that have not left a process yet."""
    return sum(channel.pending for channel in wire._channels)


def weight_buffers_of(holder: Server | MemberCollective) -> int:
    """Return the number of a server's weight buffers (given back ones included), or of those that a member lends."""
    return len(
        holder._weights._buffers._buffers if isinstance(holder, Server) else holder._lending_buffers
    )


def buffers_of(server: Server) -> int:
    """Return the most staging buffers that a chunk of a server has, free ones included."""
    return max((len(held._buffers) for held in server.gradient_stores.values()), default=0)


def ranges_of(counted: SequenceSet) -> list[tuple[int, int]]:
    """Return the numbers that were counted, as ranges (first, last)."""
    return list(counted._ranges)


def remembered_by(of: Server | Coordinator | StagedEach) -> set[int]:
    """Return the workers with pushes that are remembered as committed or dropped."""
    if isinstance(of, Server):
        return {worker for worker, _ in of._intake._done._counted}
    staging = of.state.staging if isinstance(of, Coordinator) else of
    assert isinstance(staging, StagedEach)
    return {worker for worker, _ in staging._closed._counted}


def weight_buffers_held(server: Server) -> int:
    """Return the number of flat vectors that take memory: one, and those for readers' old versions."""
    return server._weights._buffers.held + server._weights._narrow_buffers.held


def replay_state(
    log: CommitLog, model_creator: ModelCreator, checkpoint: str | Path | None = None
) -> dict[str, torch.Tensor]:
    """Apply a log as `replay` does; return the servers' state beside the weights, by the names that checkpoints use.

    Names of the optimizer's state are "parameter/key", those of shards of embedding tables "tables/shard/key".
    """
    carried = log_replay._replay_all(log, model_creator, checkpoint)
    state = dict(carried.state)
    if carried.rows is not None:
        for file in carried.rows.layers[0].files:
            state |= file.arrays
        for shard, mark in enumerate(carried.rows.marks):
            known = {"updates": mark.updates, "seed": mark.seed, "clock": mark.clock}
            known = {key: n for key, n in known.items() if n or key != "clock"}
            state |= {f"{TABLES}{shard}/{key}": torch.tensor([n]) for key, n in known.items()}
    return state
