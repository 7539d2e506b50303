"""The state of a job after servers' deaths: survivors are brought to one version, chunks located."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from steepest.core.engine.commit_log import Commit
from steepest.core.engine.server import Server
from steepest.core.engine.shared_state import SharedState
from steepest.core.messages.gradients import CommitOrder, Decision
from steepest.core.protocol.decision_log import missing

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Survivor:
    """What one process' servers hold, as they report it."""

    position: tuple[int, int]  # generation and version
    chunks: frozenset[int]  # their indices; none if the optimizer raised in the middle of an update
    # of the coordinator, from its last decision: ledger and history, and the schedule if one was sent
    state: dict[str, Any]
    log: list[list[Any]]  # entries of the coordinator's log
    results: list[bytes]  # of the last steps, see `CommitOrder`


def catch_up(server: Server, heard: Iterable[Sequence[Decision]]) -> None:
    """Let a server carry out the decisions that other servers have received and it has not.

    A version is committed when it is staged on every server, so each server can apply a commit of
    which one has received word; and a worker's gradient is not overwritten before the worker has
    the weights that it led to.

    Args:
        server: a survivor.
        heard: the decisions that each survivor remembers, oldest first.
    """
    for decision in missing(server.decisions.recent, heard):
        server.carry_out(decision)


def state_of(servers: Sequence[Server], since: int = 0) -> Survivor:
    """Return what the servers of one process hold, with the results of the steps that ended after a version."""
    chunks = frozenset(
        index for server in servers if server.torn is None for index in server.chunks
    )
    recent = servers[0].decisions.recent
    state = dict(recent[-1].state or {}) if recent else {}
    if servers[0].decisions.schedule:
        state["schedule"] = servers[0].decisions.schedule
    results = [
        result
        for decision in recent
        if isinstance(decision, CommitOrder) and decision.version > since
        for result in decision.results
    ]
    position = servers[0].generation, servers[0].version
    return Survivor(position, chunks, state, servers[0].decisions.log, results)


def assemble(chunks: int, parts: Mapping[T, Survivor]) -> SharedState | None:
    """Return the state assembled from processes at the newest version; None if one of the `chunks` is lost."""
    newest = max(parts.values(), key=lambda part: part.position)
    whole = {
        process: part.chunks for process, part in parts.items() if part.position == newest.position
    }
    holders = {
        chunk: [process for process, held in whole.items() if chunk in held]
        for chunk in range(chunks)
    }
    if not all(holders.values()):
        return None
    log = [Commit.from_entry(entry) for entry in newest.log]
    version = newest.position[1]
    return SharedState(version, state=newest.state, log=log, holders=holders)
