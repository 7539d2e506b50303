"""Deals tables into shards; each shard is a chunk of a job's layout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.rows.hashing import deal
from steepest.tables.rows.kernels import Int32s, Int64s
from steepest.tables.rows.push_form import GroupForm, PushForm
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import Table, groups, spread_of

#: Places of keys among others.
Where = slice | Int64s


@dataclass(frozen=True)
class Dealing:
    """Tables in groups, and the chunks that are the groups' shards.

    The number of shards does not depend on the number of servers, so that which rows a capacity
    keeps does not, either.
    """

    tables: tuple[Table, ...]
    num_shards: int  # of each group
    seed: int  # of first values and of admissions by chance
    first: int  # the chunk that is shard 0 of group 0; the others follow, group by group

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields alone: arrays that were pickled are writable, which kernels are not compiled for."""
        return {known.name: getattr(self, known.name) for known in fields(self)}

    @cached_property
    def groups(self) -> list[tuple[Table, ...]]:
        """Tables of the same dimension, dtype and optimizer, whose rows travel together."""
        return groups(self.tables)

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        return {
            table.name: (number, at)
            for number, group in enumerate(self.groups)
            for at, table in enumerate(group)
        }

    def place(self, table: Table) -> tuple[int, int]:
        """Return the number of a table's group, and the table's number in it; ConfigurationError: no such table."""
        group, number = self._places.get(table.name, (-1, -1))
        if group < 0 or self.groups[group][number] != table:
            known = ", ".join(map(repr, self._places)) or "none"
            raise ConfigurationError(
                f"table {table.name!r} is not among those that there are rows of, {known}: modules "
                "with tables must be part of the module when the job begins"
            )
        return group, number

    def chunk(self, group: int, shard: int) -> int:
        """Return the index of the chunk that is a shard of a group."""
        return self.first + group * self.num_shards + shard

    @property
    def chunks(self) -> range:
        """The indices of all chunks that are shards."""
        return range(self.first, self.first + len(self.groups) * self.num_shards)

    def group_of(self, chunk: int) -> int:
        """Return the group that a chunk is a shard of."""
        return (chunk - self.first) // self.num_shards

    def shard_of(self, chunk: int) -> int:
        """Return which shard of its group a chunk is."""
        return (chunk - self.first) % self.num_shards

    def description(self) -> list[list[str | int]]:
        """Return, for checkpoints, each table's name, dimension, dtype, optimizer and number of its group.

        The dtype is that in which pushes compute: rows may lie in another one after a restore.
        """
        return [
            [table.name, table.dim, table.form.dtype, type(table.optimizer).__name__, number]
            for number, group in enumerate(self.groups)
            for table in group
        ]

    def hashes(self) -> dict[str, str]:
        """Return, for checkpoints, the hash of each table whose ids are texts, by name."""
        tables = [table for group in self.groups for table in group]
        return {table.name: table.hash for table in tables if table.hash is not None}

    def name(self, chunk: int) -> str:
        """Return the name of the shard that is a chunk, as messages and errors have it."""
        return f"tables/{chunk - self.first}"

    def make(self, chunk: int, seed: int | None = None) -> TableShard:
        """Return the shard, without rows, that is a chunk.

        Args:
            seed: of the job in which its rows began, or this one's.
        """
        group, shard = divmod(chunk - self.first, self.num_shards)
        seed = self.seed if seed is None else seed
        return TableShard(self.groups[group], shard=shard, num_shards=self.num_shards, seed=seed)

    @cached_property
    def push_form(self) -> PushForm:
        """How gradients of rows of all groups travel as one push."""
        return PushForm([GroupForm(group, self.seed) for group in self.groups])

    @cached_property
    def spreads(self) -> list[Spread]:
        """By group, how its keys are spread over its shards."""
        return [spread_of(group, self.num_shards) for group in self.groups]

    def deal(self, group: int, tables: Int32s, ids: Int64s) -> tuple[Int64s | None, Int64s]:
        """Return `steepest.tables.rows.hashing.deal` of the keys of one group."""
        return deal(tables, ids, self.spreads[group])

    def parts(self, group: int, tables: Int32s, ids: Int64s, owners: Int64s) -> dict[int, Where]:
        """Return where the keys (n,) of one group are that belong to each owner of shards, by ascending shard.

        Args:
            owners: (shards,), of each shard its owner.
        """
        order, begins = self.deal(group, tables, ids)
        alone = int(owners[0])
        if (owners == alone).all():
            whole = slice(0, len(ids)) if order is None else order
            return {alone: whole} if len(ids) else {}
        places: dict[int, list[Int64s]] = {}
        for shard in np.flatnonzero(np.diff(begins)):
            part = np.arange(begins[shard], begins[shard + 1])
            places.setdefault(int(owners[shard]), []).append(part if order is None else order[part])
        return {owner: np.concatenate(places[owner]) for owner in sorted(places)}
