"""One embedding table, read from a job's servers for serving while workers train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from steepest.checkpoint.replicated_tables import replicated_tables
from steepest.core.engine.shared_state import SharedState
from steepest.errors import ConfigurationError
from steepest.runtime.cluster import Cluster
from steepest.runtime.state.row_read import ArrivedRows
from steepest.tables.files.exported_table import ExportedTable, since_cursor
from steepest.tables.files.row_values import wide
from steepest.tables.job.job_tables import dealing_of
from steepest.tables.job.row_messages import RowsToRead

if TYPE_CHECKING:
    from steepest.tables.rows.dealing import Dealing
    from steepest.tables.rows.table import Table


def table_of(cluster: Cluster, name: str) -> tuple[Dealing, Table]:
    """Return the job's dealing of tables, and the table of a name; ConfigurationError: there is none."""
    dealing, held = dealing_of(cluster.job), _held(cluster)
    tables = () if dealing is None else dealing.tables
    table = next((each for each in tables if each.name == name), None)
    if name in held:
        raise ConfigurationError(
            f"every worker holds all rows of the embedding table {name!r}: they are {held[name][0]!r} of weights(), "
            "and of set_weights(); with Table(replicate=False) they are on servers"
        )
    if dealing is None or table is None:
        known = ", ".join(map(repr, [*(each.name for each in tables), *held])) or "none"
        raise ConfigurationError(f"there is no embedding table {name!r}: there are {known}")
    return dealing, table


def _held(cluster: Cluster) -> dict[str, tuple[str, Table]]:
    return replicated_tables(cluster.job.description.optimizer_spec)


def export_table(
    cluster: Cluster,
    name: str,
    since: ExportedTable | str | None,
    weights: Callable[[], tuple[dict[str, torch.Tensor], int]],
) -> ExportedTable:
    """Return a table's rows at one version, see `DistributedSGD.export_table`.

    `weights` returns the job's weights, replicated tables among them, and their step.
    """
    if name in (held := _held(cluster)):
        values, step = weights()
        rows = values[held[name][0]]
        return ExportedTable(name, torch.arange(len(rows)), rows, version=step)
    if since is not None and not isinstance(since, ExportedTable):
        since = since_cursor(since)
    dealing, table = table_of(cluster, name)
    if since is not None and since.name != name:
        raise ConfigurationError(f"since= is an export of table {since.name!r}, not of {name!r}")
    group, number = dealing.place(table)
    chunks = [dealing.chunk(group, shard) for shard in range(dealing.num_shards)]

    def read(bases: Sequence[Sequence[int]]) -> ArrivedRows:
        options = RowsToRead(number, [(chunk, life, count) for chunk, life, count in bases])
        future = cluster.on_router(
            lambda: cluster.client.read("opaque", chunks=chunks, options=options)
        )
        shared: SharedState = cluster.wait(future, f"the rows of table {name!r}")
        return ArrivedRows.of(cluster.job.description.layout, shared.records)

    place = [list(each) for each in since.place] if since is not None else []
    bases = [each for each in place if each[0] in chunks]
    checkpoint = read(bases)
    covered = {chunk for chunk in chunks if checkpoint.marks[chunk - dealing.first].since != -1}
    if bases and covered != set(chunks):  # of some shards it is not known what has changed
        checkpoint, covered = (read([]) if covered else checkpoint), set()
    return joined_rows(table, checkpoint, place if covered else None)


def joined_rows(table: Table, found: ArrivedRows, base: list[list[int]] | None) -> ExportedTable:
    """Return the rows of a table's shards as one, in order of ids; for `base` see `ExportedTable.base`."""
    from steepest.tables.rows.first_values import (
        constant_without_rows,  # needs what only tables need
    )

    arrays = found.part()

    def all_of(key: str) -> torch.Tensor:
        names = [name for name in arrays if name.endswith(f"/{key}")]
        return torch.cat([torch.from_numpy(wide(arrays[name])) for name in names])

    ids, order = all_of("ids").sort()
    removed, _ = all_of("removed_ids").sort()
    values, version = all_of("values")[order], max(mark.updates for mark in found.marks.values())
    unknown = constant_without_rows(table)
    place = [list(each) for each in found.place]
    return ExportedTable(table.name, ids, values, removed, version, place, base, unknown)
