"""What is left of a job when servers die: survivors are brought to one version, and every chunk is found again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from steepest.checkpoint import Record
from steepest.comm.message import COORDINATOR, Message
from steepest.model import ParameterLayout
from steepest.observe.commits import Commit
from steepest.server import Server
from steepest.witness import missing


@dataclass(frozen=True)
class Remains:
    """What one process' servers hold.

    Attributes:
        position: generation and version.
        weights: bytes of each chunk.
        records: the optimizer's state of these.
        state: what the coordinator said last of its ledger and history.
        log: entries of the coordinator's log.
    """

    position: tuple[int, int]
    weights: dict[int, npt.NDArray[np.uint8]]
    records: list[Record]
    state: dict[str, Any]
    log: list[list[Any]]


@dataclass(frozen=True)
class Salvage:
    """A whole job's state at one version.

    Attributes:
        weights: the flat vector.
        state: of the coordinator: "ledger" (see `Leases.state`) and "history".
        log: every commit until then, if they were kept and are known.
    """

    version: int
    weights: torch.Tensor
    records: list[Record]
    state: dict[str, Any]
    log: list[Commit] | None = None


def catch_up(server: Server, heard: Iterable[Sequence[Message]]) -> None:
    """Tells a server what it missed of all that any server has heard.

    A version is committed when it is staged on every server, so whatever one of them has heard of, all can apply; and
    a worker's gradient is not overwritten before the worker has the weights that it led to.
    """
    for word in missing(server.witness.words, heard):
        server.handle(COORDINATOR, word)


def remains(servers: Sequence[Server]) -> Remains:
    """What is left in a process."""
    chunks = {index: held for server in servers for index, held in server._chunks.items()}
    weights = {index: held.weights.numpy().copy() for index, held in chunks.items()}
    records = [(index, about, value.clone()) for index, held in chunks.items() for about, value in held.state()]
    words = servers[0].witness.words
    state = words[-1].values()["state"] if words else {}
    return Remains((servers[0].generation, servers[0].version), weights, records, state, servers[0].witness.log)


def assemble(layout: ParameterLayout, found: Mapping[int, Remains]) -> Salvage | None:
    """One state from what processes hold, by server; None if a chunk is lost."""
    newest = max(found.values(), key=lambda part: part.position)
    parts = [part for _, part in sorted(found.items()) if part.position == newest.position]
    weights = layout.allocate()
    records: list[Record] = []
    for chunk in layout.chunks:
        holder = next((part for part in parts if chunk.index in part.weights), None)
        if holder is None:
            return None
        layout.chunk_view(weights, chunk.index).copy_(torch.from_numpy(holder.weights[chunk.index].copy()))
        records += [record for record in holder.records if record[0] == chunk.index]
    log = [Commit.from_entry(entry) for entry in newest.log]
    return Salvage(newest.position[1], weights, records, newest.state, log)
