"""Descriptions of single ids of an embedding table by its servers, for debugging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steepest.core.engine.shared_state import SharedState
from steepest.errors import ConfigurationError
from steepest.runtime.cluster import Cluster
from steepest.runtime.state.row_read import ArrivedRows
from steepest.runtime.state.table_export import table_of


@dataclass(frozen=True, eq=False)
class RowDescription:
    """The description of an id of a table at one version.

    Attributes:
        id: the id.
        has_row: whether it has a row.
        values: (dim,), of its row, or those that the job uses for an id without one.
        slots: (k,), the numbers that the table's optimizer keeps beside a row; None without a row.
        sightings: how often the id was in a pushed batch, since its row was made, that batch included;
            of an id without a row, how often an exact filter has seen it.
        written: the number of the update that wrote the row last; None without a row.
        version: the number of updates so far.
    """

    id: int
    has_row: bool
    values: torch.Tensor
    slots: torch.Tensor | None
    sightings: int
    written: int | None
    version: int


def describe_rows(cluster: Cluster, name: str, ids: Sequence[int]) -> list[RowDescription]:
    """Return the descriptions of ids, see `DistributedSGD.describe_rows`."""
    import numpy as np

    from steepest.tables.files.row_pieces import of_shard, state_of  # need what only tables need
    from steepest.tables.rows.checks import require_ids
    from steepest.tables.rows.first_values import values_without_rows
    from steepest.tables.rows.hashing import shard_of

    dealing, table = table_of(cluster, name)
    checked = require_ids(f"ids of table {name!r}", ids)
    if checked.ndim != 1:
        raise ConfigurationError(
            f"ids of table {name!r} of shape {checked.shape}: give a list of ids"
        )
    group, number = dealing.place(table)
    shards = shard_of(np.full(len(checked), number, np.int32), checked, dealing.spreads[group])
    chunks = [dealing.chunk(group, int(shard)) for shard in np.unique(shards)]
    if not chunks:
        return []
    future = cluster.on_router(lambda: cluster.client.read("opaque", chunks=chunks))
    read: SharedState = cluster.wait(future, f"what is known of rows of table {name!r}")
    arrived = ArrivedRows.of(cluster.job.description.layout, read.records)
    arrays, marks, descriptions = arrived.part(), arrived.marks, []
    for each, shard in zip(checked.tolist(), shards.tolist(), strict=True):
        saved = dealing.chunk(group, shard) - dealing.first
        rows, version = state_of(of_shard(arrays, saved)), marks[saved].updates
        at = np.flatnonzero((rows.ids == each) & (rows.tables == number))
        if len(at):
            one = int(at[0])
            values, slots = torch.tensor(rows.values[one]), torch.tensor(rows.slots[one])
            known = int(rows.sightings[one]), int(rows.written[one])
            descriptions.append(RowDescription(each, True, values, slots, *known, version))
            continue
        counted = rows.counted[(rows.counted_ids == each) & (rows.counted_tables == number)]
        answered = values_without_rows(table, np.array([each]), marks[saved].seed)
        values = torch.from_numpy(answered)[0]
        descriptions.append(
            RowDescription(each, False, values, None, int(counted.sum()), None, version)
        )
    return descriptions
