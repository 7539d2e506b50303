"""The rows of embedding tables in checkpoints: dealt into shards, and joined with what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from steepest.checkpoint.row_values import wide
from steepest.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing
    from steepest.tables.state import TableState

#: With which names of tables' shards begin, and no parameter's name.
TABLES = "tables/"
#: Of each shard its arrays: those of `TableState`; "updates", the version; "since", in an increment.
_Shards = dict[int, dict[str, torch.Tensor]]
_NO_ARRAYS = ("updates", "since", "life", "seed")


def together(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return arrays of which parts are in several mappings, one after the other; empties the mappings."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        while part:
            name, value = part.popitem()
            pieces.setdefault(name, []).append(value)
    found = {}
    for name in list(pieces):
        values = pieces.pop(name)
        found[name] = values[0] if len(values) == 1 else torch.cat(values)
    return found


def dealt(state: Mapping[str, torch.Tensor], dealing: Dealing | None) -> dict[str, torch.Tensor]:
    """Return optimizer state ("parameter/key") with rows in the shards of a job, however many there were."""
    # CheckpointError: the rows make no sense, or a table has more of them than its capacity.
    if dealing is None:
        return dict(state)
    shards = _by_shard(state)
    groups = len(dealing.groups)
    if not shards or len(shards) % groups or sorted(shards) != list(range(len(shards))):
        raise CheckpointError(f"it has the shards {sorted(shards)} of {groups} groups of tables")
    each = len(shards) // groups
    found = {name: value for name, value in state.items() if not name.startswith(TABLES)}
    for at in range(groups * dealing.num_shards):
        group, shard = divmod(at, dealing.num_shards)
        parts = [shards[group * each + part] for part in range(each)]
        if each == dealing.num_shards:
            own = parts[shard]
            _part_of(dealing, at, [own])
        else:
            kept = {key: parts[0][key] for key in ("updates", "seed")}
            own = _part_of(dealing, at, parts) | kept
        found |= {f"{TABLES}{at}/{key}": value for key, value in own.items()}
    return found


def _part_of(
    dealing: Dealing, at: int, parts: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return the arrays of one shard, from those of all shards before."""
    # CheckpointError: they make no sense, or a table has more rows than its capacity.
    try:
        state = dealing.make(dealing.first + at).part_of([_state(part) for part in parts])
    except ConfigurationError as error:
        raise CheckpointError(f"embedding tables: {error}") from error
    return _arrays(state)


def increased(
    base: Mapping[str, torch.Tensor], increment: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return an increment's optimizer state, with the rows that have not changed since its base, which is whole."""
    # Both by "parameter/key". CheckpointError: the increment is not one of this base.
    from steepest.tables import state

    before, after = _by_shard(base), _by_shard(increment)
    found = dict(increment)
    for shard, changes in after.items():
        if "since" not in changes:
            continue
        earlier = before.get(shard, {})
        if not torch.equal(earlier.get("updates", torch.empty(0)), changes["since"]):
            raise CheckpointError(f"its rows of {TABLES}{shard} are not changes of these rows")
        try:
            whole = _arrays(state.increased(_state(earlier), _state(changes)))
        except ConfigurationError as error:
            raise CheckpointError(f"{TABLES}{shard}: {error}") from error
        found |= {f"{TABLES}{shard}/{key}": value for key, value in whole.items()}
        del found[f"{TABLES}{shard}/since"]
    return found


def _by_shard(state: Mapping[str, torch.Tensor]) -> _Shards:
    """Return the arrays of each shard; CheckpointError: a name is that of no shard."""
    shards: _Shards = {}
    for name, value in state.items():
        if name.startswith(TABLES):
            number, _, key = name.removeprefix(TABLES).partition("/")
            if not number.isdecimal():
                raise CheckpointError(f"it has {name!r:.80}, which is of no shard of tables")
            shards.setdefault(int(number), {})[key] = value
    return shards


def _state(arrays: Mapping[str, torch.Tensor]) -> TableState:
    from steepest.tables.state import TableState

    known = {key: wide(value) for key, value in arrays.items() if key not in _NO_ARRAYS}
    return TableState.of_arrays(known)


def _arrays(state: TableState) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(array) for key, array in state.arrays().items()}
