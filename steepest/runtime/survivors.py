"""The state of a job of which servers died: survivors are brought to one version, chunks found."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from steepest.core.engine.commit_log import Commit
from steepest.core.engine.server import Server
from steepest.core.messages.gradients import Decision
from steepest.core.optim.portable import Record
from steepest.core.protocol.decision_log import missing

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class ServerState:
    """The state that one process' servers hold."""

    position: tuple[int, int]  # generation and version
    chunks: frozenset[int]  # their indices; none if the optimizer raised in the middle of an update
    # of the coordinator, from its last decision: ledger and history, and the schedule if one was sent
    state: dict[str, Any]
    log: list[list[Any]]  # entries of the coordinator's log


@dataclass(frozen=True)
class RecoveredState:
    """A whole job's state at one version."""

    version: int  # of the weights
    # of the coordinator: "ledger" (see `Leases.state`), "history" and, if there is one that can be carried, "schedule"
    # (see `Schedule.state`), which may be of a step before
    state: dict[str, Any]
    # every commit until then; None if they were not kept or are not known
    log: list[Commit] | None = None
    # the flat vector; None if chunks are in the processes that held them
    weights: torch.Tensor | None = None
    records: list[Record] = field(default_factory=list)  # with weights, the optimizer's state
    # without weights, the processes that have each chunk
    holders: Mapping[int, Sequence[Any]] | None = None


def catch_up(server: Server, heard: Iterable[Sequence[Decision]]) -> None:
    """Have a server carry out the decisions that other servers have heard of and it has not.

    A version is committed when it is staged on every server, so each server can apply a commit of
    which one has heard; and a worker's gradient is not overwritten before the worker has the
    weights that came of it.

    Args:
        server: a survivor.
        heard: the decisions that each survivor remembers, oldest first.
    """
    for decision in missing(server.decisions.recent, heard):
        server.carry_out(decision)


def state_of(servers: Sequence[Server]) -> ServerState:
    """Return the state that the servers of one process hold."""
    chunks = frozenset(
        index for server in servers if server.torn is None for index in server.chunks
    )
    recent = servers[0].decisions.recent
    state = dict(recent[-1].state or {}) if recent else {}
    if servers[0].decisions.schedule:
        state["schedule"] = servers[0].decisions.schedule
    return ServerState(
        (servers[0].generation, servers[0].version), chunks, state, servers[0].decisions.log
    )


def assemble(chunks: int, found: Mapping[T, ServerState]) -> RecoveredState | None:
    """Return one state from those of processes at the newest version; None if one of so many chunks is lost."""
    newest = max(found.values(), key=lambda part: part.position)
    whole = {
        process: part.chunks for process, part in found.items() if part.position == newest.position
    }
    holders = {
        chunk: [process for process, held in whole.items() if chunk in held]
        for chunk in range(chunks)
    }
    if not all(holders.values()):
        return None
    log = [Commit.from_entry(entry) for entry in newest.log]
    return RecoveredState(newest.position[1], newest.state, log, holders=holders)
