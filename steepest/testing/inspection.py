"""The messages and memory that the parts of a job keep, for tests that these are bounded."""

from __future__ import annotations

from steepest.core.engine.server import Server
from steepest.core.protocol.coordinator import Coordinator
from steepest.core.protocol.push_tracking import StagedEach, StagedTogether, Staging
from steepest.parameter_server.pusher import Pusher


def pushes_of(server: Server) -> int:
    """Return how many pushes a server keeps: staged and arriving ones, and buffers in use."""
    chunks = server.gradient_stores.values()
    used = sum(len(held._buffers) - sum(map(len, held._spare.values())) for held in chunks)
    return used + sum(len(held.staged) for held in chunks) + len(server._intake.progress.pushes)


def puts_of(server: Server) -> int:
    """Return the number of states that were put into a server and not installed yet."""
    return len(server._puts)


def undecided(of: Coordinator | Staging) -> int:
    """Return the number of pushes that were announced and are neither committed nor dropped."""
    if isinstance(of, Coordinator):
        return undecided(of.state.staging) + len(of.state.open_step._reports)
    if isinstance(of, StagedTogether):
        return len(of._reports) + len(of._servers)
    assert isinstance(of, StagedEach)
    return len(of._tracked) + len(of._complete) + len(of._closing)


def unanswered(pusher: Pusher) -> int:
    """Return the number of a user's requests that are neither done nor failed."""
    return len(pusher._requests)
