"""The living processes of a trainer: where each runs, and the workers' process numbers."""

from __future__ import annotations

from steepest import (
    DistributedSGD,
    ProcessInfo,
)
from steepest.core.messages.message import Peer


def places_of(trainer: DistributedSGD) -> dict[Peer, ProcessInfo]:
    """Return where each process runs."""
    return {Peer(process.role, process.index): process for process in trainer.processes()}


def pids(trainer: DistributedSGD) -> list[int]:
    return trainer.foreach_worker(lambda view: view.pid)
