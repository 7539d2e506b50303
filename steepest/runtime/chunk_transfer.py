"""Chunks of ended servers, handed over to their successors, in place if possible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from steepest.core.engine.optimizer_records import state_fields, state_tensor
from steepest.core.engine.server import Server
from steepest.core.tensors.free_memory import free_bytes, warn_if_short
from steepest.core.tensors.memory import fill
from steepest.core.tensors.shared_memory import allocate

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ChunkState:
    """A chunk on its way to another process."""

    weights: Bytes  # its bytes
    # its optimizer's state, see `ServerChunk.state`: description and bytes of each tensor
    records: list[tuple[dict[str, Any], Bytes]]


class RetainedChunks:
    """The chunks, of one layout, of a process' servers that have ended and handle no more messages."""

    def __init__(self, servers: Sequence[Server] = ()) -> None:
        self._chunks = {index: held for server in servers for index, held in server.chunks.items()}
        self._vector = servers[0].vector if servers else None

    def vector(self, nbytes: int) -> torch.Tensor:
        """Return a flat vector for the next servers: the one in which the kept chunks lie, if it has `nbytes`."""
        if self._vector is None or self._vector.numel() != nbytes or not self._vector.is_cpu:
            warn_if_short(
                nbytes,
                "memory for the weights of the servers in this process",
                "give fewer servers or workers on this host",
                free_bytes(),
            )
            self._vector = allocate(nbytes)
        return self._vector

    def give(self, chunks: Iterable[int]) -> dict[int, ChunkState]:
        """Return the state of some chunks, for servers in another process."""
        return {index: self._state(index) for index in chunks}

    def _state(self, index: int) -> ChunkState:
        held = self._chunks[index]
        records = []
        for description, value in held.state():
            fields, payload = state_fields(description, value)
            records.append(
                (fields, np.empty(0, dtype=np.uint8) if payload is None else payload.numpy())
            )
        return ChunkState(held.weights.cpu().numpy(), records)

    def hand_over(self, servers: Iterable[Server], states: Mapping[int, ChunkState]) -> None:
        """Give servers of the same layout their chunks.

        Chunks come from `states`; those that are not there are kept here, and are copied or stay
        where they are. A chunk that is kept here although it is in `states` is of an attempt that
        failed half-way.

        Args:
            servers: the next ones.
            states: of chunks of other processes.
        """
        taken = set[int]()  # as they are: copies on several servers of a process are not one
        for server in servers:
            for index, held in server.chunks.items():
                if (new := states.get(index)) is not None:
                    records = [
                        (description, _tensor(description, payload))
                        for description, payload in new.records
                    ]
                    fill(held.weights, new.weights)
                else:
                    own = self._chunks[index]
                    if own.weights.data_ptr() != held.weights.data_ptr():
                        held.weights.copy_(own.weights)
                    if index not in taken and held.take_from(own):
                        taken.add(index)
                        continue
                    records = own.state()
                held.clear_state()
                for description, value in records:
                    held.load_state(description, value)
                held.end_state()


def _tensor(description: dict[str, Any], payload: Bytes) -> torch.Tensor:
    return state_tensor(description, torch.from_numpy(payload.copy()) if payload.size else None)
