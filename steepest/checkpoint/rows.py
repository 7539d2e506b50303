"""The rows of embedding tables in checkpoints: dealt into shards, and joined with what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from steepest.checkpoint.row_values import wide
from steepest.checkpoint.table_moves import TableMoves, moved_rows
from steepest.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.dealing import Dealing
    from steepest.tables.state import TableState

#: With which names of tables' shards begin, and no parameter's name.
TABLES = "tables/"
#: Of each shard its arrays: those of `TableState`; "updates", the version; "since", in an increment.
_Shards = dict[int, dict[str, torch.Tensor]]
_NO_ARRAYS = ("updates", "since", "life", "seed", "clock")


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


def dealt(
    state: Mapping[str, torch.Tensor], saved: Sequence[Sequence[Any]], dealing: Dealing | None
) -> dict[str, torch.Tensor]:
    """Return optimizer state ("parameter/key") with rows in the shards of a job, however many there were.

    Rows of tables that the job has not are left out; tables that it has beside begin without rows, and
    those of another optimizer with its first slots.

    Args:
        state: of a checkpoint.
        saved: the description of its tables, see `Dealing.description`.
        dealing: of the job's tables; None if it has none.

    Raises:
        CheckpointError: the rows make no sense, or a table has more of them than its capacity.
    """
    found = {name: value for name, value in state.items() if not name.startswith(TABLES)}
    shards = by_shard(state)
    if dealing is None or not shards:
        return found
    moves = TableMoves(saved, dealing)
    each, rest = divmod(len(shards), moves.groups or len(shards) + 1)
    if rest or sorted(shards) != list(range(len(shards))):
        raise CheckpointError(
            f"it has the shards {sorted(shards)} of {moves.groups} groups of tables"
        )
    newest = max((part["updates"] for part in shards.values()), key=int)
    for group in range(len(dealing.groups)):
        same = moves.same(group)
        parts = [] if same is None else [shards[same * each + at] for at in range(each)]
        if same is not None and not all(moves.slots_stay(group, same, part) for part in parts):
            parts = []
        kept = {"updates": newest, "seed": shards[0]["seed"]}
        if parts:
            kept = {key: parts[0][key] for key in ("updates", "seed")}
        if clocks := [part["clock"] for part in shards.values() if "clock" in part]:
            kept["clock"] = max(clocks, key=int)
        in_place = len(parts) == dealing.num_shards and _are_in_place(dealing, group, parts)
        states: list[TableState] = []
        if not in_place:
            try:
                states = [state_of_arrays(part) for part in parts] or _moved(
                    shards, each, moves, dealing, group
                )
            except ConfigurationError as error:
                raise CheckpointError(f"embedding tables: {error}") from error
        for shard in range(dealing.num_shards):
            at = group * dealing.num_shards + shard
            own = parts[shard] if in_place else _part_of(dealing, at, states) | kept
            found |= {f"{TABLES}{at}/{key}": value for key, value in own.items()}
    return found


def _are_in_place(
    dealing: Dealing, group: int, parts: Sequence[Mapping[str, torch.Tensor]]
) -> bool:
    """Return whether each shard of a group, given by its arrays, already has its own rows alone; copies none."""
    # CheckpointError: a table has more rows than its capacity.
    for shard, arrays in enumerate(parts):
        own = dealing.make(dealing.first + group * dealing.num_shards + shard)
        try:
            if not own.holds_all_of(state_of_arrays(arrays)):
                return False
        except ConfigurationError as error:
            raise CheckpointError(f"embedding tables: {error}") from error
    return True


def _moved(
    shards: _Shards, each: int, moves: TableMoves, dealing: Dealing, group: int
) -> list[TableState]:
    """Return the rows of a group of tables, from those of all groups in which they were before."""
    optimizer = dealing.groups[group][0].optimizer
    no_rows = dealing.make(dealing.first + group * dealing.num_shards).export()
    found = [replace(no_rows, counters={})]
    for old, numbers in moves.numbers(group).items():
        for at in range(old * each, (old + 1) * each):
            begun = None if moves.slots_stay(group, old, shards[at]) else optimizer
            found.append(moved_rows(state_of_arrays(shards[at]), numbers, begun))
    return found


def resumed(state: Mapping[str, torch.Tensor], now: int) -> dict[str, torch.Tensor]:
    """Return optimizer state ("parameter/key") whose rows' lives go on now, in seconds since the epoch.

    The time since its last update is no part of any row's time to live.
    """
    found = dict(state)
    for shard, arrays in by_shard(state).items():
        if "clock" in arrays and (pause := now - int(arrays["clock"])) > 0:
            found[f"{TABLES}{shard}/clock"] = torch.tensor([now])
            if (until := arrays.get("until")) is not None:
                found[f"{TABLES}{shard}/until"] = torch.where(until > 0, until + pause, until)
    return found


def unpushed(
    states: Mapping[int, Mapping[str, torch.Tensor]],
    saved: Sequence[Sequence[Any]],
    dealing: Dealing | None,
) -> dict[int, dict[str, torch.Tensor]]:
    """Return by worker the gradients of rows that were not pushed, for a job's tables; else as `dealt`."""
    if dealing is None or not states:
        return {}
    if [list(each) for each in saved] == dealing.description():
        return {worker: dict(state) for worker, state in states.items()}
    moves = TableMoves(saved, dealing)
    return {worker: moves.unpushed(state) for worker, state in states.items()}


def _part_of(dealing: Dealing, at: int, states: Sequence[TableState]) -> dict[str, torch.Tensor]:
    """Return the arrays of one shard, from the states of all shards before."""
    # CheckpointError: they make no sense, or a table has more rows than its capacity.
    try:
        state = dealing.make(dealing.first + at).part_of(states)
    except ConfigurationError as error:
        raise CheckpointError(f"embedding tables: {error}") from error
    return arrays_of_state(state)


def increased(
    base: Mapping[str, torch.Tensor], increment: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return an increment's optimizer state, completed with the unchanged rows of its whole base.

    Both by "parameter/key".

    Raises:
        CheckpointError: the increment is not one of this base.
    """
    from steepest.tables import state

    before, after = by_shard(base), by_shard(increment)
    found = dict(increment)
    for shard, changes in after.items():
        if "since" not in changes:
            continue
        earlier = before.get(shard, {})
        if not torch.equal(earlier.get("updates", torch.empty(0)), changes["since"]):
            raise CheckpointError(f"its rows of {TABLES}{shard} are not changes of these rows")
        try:
            whole = arrays_of_state(
                state.increased(state_of_arrays(earlier), state_of_arrays(changes))
            )
        except ConfigurationError as error:
            raise CheckpointError(f"{TABLES}{shard}: {error}") from error
        found |= {f"{TABLES}{shard}/{key}": value for key, value in whole.items()}
        del found[f"{TABLES}{shard}/since"]
    return found


def by_shard(state: Mapping[str, torch.Tensor]) -> _Shards:
    """Return the arrays of each shard; CheckpointError: a name is that of no shard."""
    shards: _Shards = {}
    for name, value in state.items():
        if name.startswith(TABLES):
            number, _, key = name.removeprefix(TABLES).partition("/")
            if not number.isdecimal():
                raise CheckpointError(f"it has {name!r:.80}, which is of no shard of tables")
            shards.setdefault(int(number), {})[key] = value
    return shards


def state_of_arrays(arrays: Mapping[str, torch.Tensor]) -> TableState:
    """Return a shard's rows; ConfigurationError: the arrays make no sense."""
    from steepest.tables.state import TableState

    known = {key: wide(value) for key, value in arrays.items() if key not in _NO_ARRAYS}
    return TableState.of_arrays(known)


def arrays_of_state(state: TableState) -> dict[str, torch.Tensor]:
    """Return a shard's rows as `state_of_arrays` takes them."""
    return {key: torch.from_numpy(array) for key, array in state.arrays().items()}
