"""Maps the embedding tables of a checkpoint to those of a job, by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from steepest.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from steepest.tables.rows.dealing import Dealing
    from steepest.tables.rows.row_optimizers import RowOptimizer
    from steepest.tables.rows.state import TableState
    from steepest.tables.rows.table import Table


class Described(NamedTuple):
    """What a manifest says of a table, see `Dealing.description`; its number is its place in its group."""

    name: str
    dim: int
    dtype: str
    optimizer: str
    group: int
    number: int


def described_tables(description: Sequence[Sequence[Any]]) -> dict[str, Described]:
    """Return the tables of a description by name, in order."""
    sizes: dict[int, int] = {}
    described = {}
    for name, dim, dtype, optimizer, group in description:
        number = sizes[group] = sizes.get(group, -1) + 1
        described[name] = Described(name, dim, dtype, optimizer, group, number)
    return described


def require_tables(saved: Sequence[Sequence[Any]], own: Sequence[Sequence[Any]]) -> None:
    """Check that a job's tables can have the rows of a checkpoint's of their names; CheckpointError otherwise."""
    before, after = described_tables(saved), described_tables(own)
    if before and after and not before.keys() & after.keys():
        raise CheckpointError(
            f"its embedding tables are {', '.join(map(repr, before))}, this job's {', '.join(map(repr, after))}: give "
            "one of them at least the name that it had, or the checkpoint's weights alone to set_weights()"
        )
    for name, table in after.items():
        was = before.get(name, table)
        if (was.dim, was.dtype) != (table.dim, table.dtype):
            raise CheckpointError(
                f"its embedding table {name!r} has dimension {was.dim} and computes in {was.dtype}, this job's "
                f"has {table.dim} and {table.dtype}: give the table that dimension and dtype, or another name, "
                "with which it begins without rows"
            )


def require_renames(names: Any) -> None:
    """Check new names of tables by old ones, or None; ConfigurationError otherwise."""
    if names is None:
        return
    known = isinstance(names, Mapping) and all(
        isinstance(name, str) and name for pair in names.items() for name in pair
    )
    if not known or len({*names.values()}) < len(names):
        raise ConfigurationError(
            f'rename_tables={names!r:.200}: give new names of tables by old ones, such as {{"goods": "items"}}, each '
            "once"
        )


def renamed_tables(names: Sequence[str], renames: Mapping[str, str]) -> dict[str, str]:
    """Return the new name of each table of a checkpoint; CheckpointError: it lacks one, or two would have one name."""
    for old, new in renames.items():
        if old not in names and new not in names:
            raise CheckpointError(
                f"it has no embedding table {old!r} to rename {new!r}: it has {', '.join(map(repr, names)) or 'none'}"
            )
    new_names = {name: renames.get(name, name) for name in names}
    for old, new in new_names.items():
        if old != new and (new in names and renames.get(new, new) == new):
            raise CheckpointError(
                f"it has embedding tables {old!r} and {new!r}: the former cannot be renamed {new!r}"
            )
    return new_names


def require_hashes(saved: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Check that ids of texts are hashed as those of a checkpoint were, by table; CheckpointError otherwise.

    Ids that one of the two has made itself may be of any hash.
    """
    for name in sorted(saved.keys() & own.keys()):
        if saved[name] != own[name]:
            raise CheckpointError(
                f"the ids of its embedding table {name!r} are texts hashed by {saved[name]!r}, this job's by "
                f"{own[name]!r}: give Table(hash={saved[name]!r}), or another name, with which it begins without rows"
            )


def changes_of_tables(saved: Sequence[Sequence[Any]], own: Sequence[Sequence[Any]]) -> list[str]:
    """Return in words which tables a job has that a checkpoint has not, and the other way round."""
    before, after = described_tables(saved), described_tables(own)
    new = [name for name in after if name not in before]
    dropped = [name for name in before if name not in after]
    others = [
        f"{name!r} ({before[name].optimizer} before, {table.optimizer} now)"
        for name, table in after.items()
        if name in before and before[name].optimizer != table.optimizer
    ]
    moves = []
    if new:
        moves.append(f"new, without rows yet: {', '.join(map(repr, new))}")
    if dropped:
        moves.append(f"dropped with their rows: {', '.join(map(repr, dropped))}")
    if others:
        moves.append(f"with another optimizer, whose slots begin anew: {', '.join(others)}")
    return moves


def slots_stay(optimizer: str, slots: Any, table: Table) -> bool:
    """Return whether a table's optimizer goes on with the slots (n, k) of rows that had one of the class `optimizer`.

    `SGD` has none, and `SGD(momentum=...)` has some.
    """
    mine = type(table.optimizer).__name__, (table.optimizer.slots(table.dim),)
    return (optimizer, tuple(getattr(slots, "shape", ()))[1:]) == mine


class TableMoves:
    """Where the rows of each group of a job's tables were in a checkpoint.

    Args:
        saved: the checkpoint's description of its tables, see `Dealing.description`.
        dealing: of the job's tables.

    Attributes:
        groups: how many the checkpoint has.
    """

    def __init__(self, saved: Sequence[Sequence[Any]], dealing: Dealing) -> None:
        self._dealing = dealing
        self._before = described_tables(saved)
        self._after = described_tables(dealing.description())
        self.groups = len({table.group for table in self._before.values()})

    def same(self, group: int) -> int | None:
        """Return which group of the checkpoint has the tables of a group as they are; None for none."""
        here = [table for table in self._after.values() if table.group == group]
        was = self._before.get(here[0].name)
        if was is None:
            return None
        there = [table for table in self._before.values() if table.group == was.group]
        same = [table[:4] for table in there] == [table[:4] for table in here]
        return was.group if same else None

    def numbers(self, group: int) -> dict[int, dict[int, int]]:
        """Map each group of the checkpoint to its tables that `group` has: their numbers there to those here."""
        found: dict[int, dict[int, int]] = {}
        for name, table in self._after.items():
            if table.group == group and (was := self._before.get(name)) is not None:
                found.setdefault(was.group, {})[was.number] = table.number
        return found

    def tables_in(self, old: int) -> int:
        """Return the number of tables of a group of the checkpoint."""
        return sum(table.group == old for table in self._before.values())

    def moved(self, piece: TableState, old: int, group: int) -> TableState:
        """Return the rows that a group has of a piece of a group of the checkpoint, with the group's numbers of tables.

        Their slots are the optimizer's first ones if it cannot go on with those that they had.
        """
        before = next(table for table in self._before.values() if table.group == old)
        first = self._dealing.groups[group][0]
        stay = slots_stay(before.optimizer, piece.slots, first)
        if stay and self.same(group) == old:
            return piece
        return moved_rows(piece, self.numbers(group)[old], None if stay else first.optimizer)

    def unpushed(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return gradients of rows that a worker has not pushed, see `DelayedRows.state`, for the job's groups."""
        from steepest.tables.rows.gradients import WITH_LIVES, RowGradients, added

        before = {table.group: table for table in self._before.values()}
        found: dict[str, torch.Tensor] = {}
        try:
            gradients = {}
            for name in state.keys() - {"weights"}:
                old, lives = int(name.removesuffix(WITH_LIVES)), name.endswith(WITH_LIVES)
                form = before[old].dim, before[old].dtype
                packed = state[name].clone().numpy()
                gradients[old] = RowGradients.unpack(packed, *form, lives=lives)
            for group in range(len(self._dealing.groups)):
                parts = [
                    _moved_gradients(gradients[old], numbers)
                    for old, numbers in self.numbers(group).items()
                    if old in gradients
                ]
                if any(map(len, parts)):
                    total = added(parts)
                    lives = total.lives is not None
                    name = f"{group}{WITH_LIVES if lives else ''}"
                    found[name] = torch.from_numpy(total.pack(lives=lives))
        except (ConfigurationError, LookupError, ValueError) as error:
            raise CheckpointError(
                f"the gradients of rows that a worker had not pushed make no sense: {error}"
            ) from error
        return {"weights": state["weights"], **found} if found else {}


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


def moved_rows(
    state: TableState, numbers: Mapping[int, int], optimizer: RowOptimizer | None
) -> TableState:
    """Return the rows, counts and counters of some tables of a state, with other numbers of tables.

    Args:
        state: of all tables of its group.
        numbers: those that the tables get, by those that they have.
        optimizer: whose first slots rows get; None to keep those that they have.
    """
    to = _renumbering(numbers)
    moved = state.only(_among(state.tables, to) >= 0, _among(state.counted_tables, to) >= 0)
    slots = moved.slots
    if optimizer is not None:
        first = np.array(optimizer.first_slots(state.values.shape[1]), state.values.dtype)
        slots = np.tile(first, (len(moved.ids), 1))
    return replace(
        moved,
        tables=_among(moved.tables, to),
        counted_tables=_among(moved.counted_tables, to),
        removed_tables=moved.removed_tables[:0],
        removed_ids=moved.removed_ids[:0],
        slots=slots,
        counters={numbers[of]: kept for of, kept in state.counters.items() if of in numbers},
    )


def _moved_gradients(gradients: Any, numbers: Mapping[int, int]) -> Any:
    to = _among(gradients.tables, _renumbering(numbers))
    return replace(gradients, tables=to).taken(to >= 0)


def _renumbering(numbers: Mapping[int, int]) -> Any:
    """Return (m,) int32: by old number the new one, or -1."""
    to = np.full(max(numbers, default=0) + 1, -1, np.int32)
    for old, new in numbers.items():
        to[old] = new
    return to


def _among(tables: Any, to: Any) -> Any:
    """Return the new numbers of tables (n,), -1 for those that are left out."""
    known = (tables >= 0) & (tables < len(to))
    return np.where(known, to[np.where(known, tables, 0)], -1).astype(np.int32)
