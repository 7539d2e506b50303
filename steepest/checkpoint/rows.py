"""The rows of embedding tables in checkpoints: dealt into shards, and joined with what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from steepest.checkpoint.saved_rows import TABLES
from steepest.checkpoint.table_moves import TableMoves
from steepest.errors import CheckpointError

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing
    from steepest.tables.state import TableState

#: Of each shard its arrays: those of `TableState`; "updates", the version; "since", in an increment.
_Shards = dict[int, dict[str, torch.Tensor]]


def unpushed(
    states: Mapping[int, Mapping[str, torch.Tensor]],
    saved: Sequence[Sequence[Any]],
    dealing: Dealing | None,
) -> dict[int, dict[str, torch.Tensor]]:
    """Return by worker the gradients of rows that were not pushed, for the tables that a job has."""
    if dealing is None or not states:
        return {}
    if [list(each) for each in saved] == dealing.description():
        return {worker: dict(state) for worker, state in states.items()}
    moves = TableMoves(saved, dealing)
    return {worker: moves.unpushed(state) for worker, state in states.items()}


def by_shard(state: Mapping[str, torch.Tensor]) -> _Shards:
    """Return the arrays of each shard by key; CheckpointError: a name has no shard's number."""
    shards: _Shards = {}
    for name, value in state.items():
        if name.startswith(TABLES):
            number, _, key = name.removeprefix(TABLES).partition("/")
            if not number.isdecimal():
                raise CheckpointError(f"it has {name!r:.80}, which is of no shard of tables")
            shards.setdefault(int(number), {})[key] = value
    return shards


def arrays_of_state(state: TableState) -> dict[str, torch.Tensor]:
    """Return a shard's rows as tensors by key."""
    return {key: torch.from_numpy(array) for key, array in state.arrays().items()}
