"""Compiling all kernels before they are needed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

import numpy as np

from steepest.tables.rows.gradients import RowGradients, weighted
from steepest.tables.rows.hashing import Distinct, add_up, are_distinct
from steepest.tables.rows.pooling import Bags
from steepest.tables.rows.push_form import Chance, GroupForm
from steepest.tables.rows.shard import TableShard
from steepest.tables.rows.spread import Spread
from steepest.tables.rows.table import Table, groups
from steepest.tables.rows.tiered_rows import TieredRows


def compile_kernels(tables: Iterable[Table]) -> None:
    """Compile all that some tables' shards and modules will run, so that no step waits for it.

    A process calls it once, before it joins a job. The machine code is kept on disk where it can be.
    """
    _compile(tuple(tables))


@lru_cache(maxsize=8)
def _compile(tables: tuple[Table, ...]) -> None:
    for group in groups(tables):
        shard = TableShard(
            replace(
                table,
                capacity=None,
                pinned=(),
                eviction=None,
                directory=None,
                memory_rows=None,
                memory_bytes=None,
            )
            for table in group
        )
        numbers = np.arange(len(group), dtype=np.int32)
        cut, form = shard.cut()[1], group[0].form
        for version in (1, 2):
            gradients = np.ones((len(group), shard.dim), shard.dtype)
            shard.push(numbers, np.full(len(group), version), gradients, version)
            shard.pull(numbers, numbers)
            sent = np.empty((len(group), form.sent_bytes), np.uint8)
            shard.pull_sent(numbers, np.full(len(group), version, np.int64), sent)
            form.received(sent.reshape(-1))
            pushed = RowGradients(
                numbers, np.full(len(group), version, np.int64), gradients, numbers + 1
            )
            GroupForm(group, 0).as_sent(pushed, Chance(0, version))
        cut.take(1)
        shard.evict(2)
        shard.end_lives(2)
        shard.load([shard.export()], 2)
        for table in group:
            _compile_eviction(table)
        if group[0].directory is not None:
            _compile_disk(group[0])
        _compile_modules(shard.dtype)


def _compile_eviction(table: Table) -> None:
    """Evict a row of a full table."""
    if table.eviction is not None:
        plain = replace(table, admission=None, capacity=1, pinned=())
        shard = TableShard([replace(plain, directory=None, memory_rows=None, memory_bytes=None)])
        for version in (1, 2):
            gradient = np.ones((1, table.dim), shard.dtype)
            shard.push([0], [version], gradient, version)
        shard.load([shard.export()], 2)


def _compile_disk(table: Table) -> None:
    """Write rows to a disk, and read them back."""
    form, count = table.form, 1000
    with tempfile.TemporaryDirectory() as folder:
        rows = TieredRows(form, np.zeros(1, np.int64), count, folder, 1, segment=64)
        numbers, of = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
        keys = of, numbers.astype(np.int64)
        values, slots = (np.zeros((count, each), form.dtype) for each in (form.dim, form.slots))
        rows.memory.require(count)
        for _ in range(2):
            rows.enter(numbers, keys, values, slots)
            rows.update(table.optimizer, numbers, keys, values, 1, None)
            rows.gather(numbers, values)
        for reading in rows.read_ahead(numbers):
            reading.result()
        rows.release(numbers)


def _compile_modules(dtype: str) -> None:
    """Do what a worker does with the ids of a batch, and with rows."""
    one = np.zeros(1, np.int32)
    rows = np.ones((1, 1), dtype)
    spread = Spread.evenly(1, 2)
    keys = Distinct(one, one, spread)
    are_distinct(keys.tables, keys.ids, np.ones(2, np.bool_), spread)
    add_up(rows, keys.inverse, 1)
    add_up(rows.astype(np.float64), keys.inverse, 1)
    part = RowGradients(keys.tables, keys.ids, rows, keys.counts)
    weighted([part, part], [0.5, 0.5])
    bags = Bags(keys.inverse, np.array([0, 1]), np.ones(1, dtype), False)
    bags.pool(rows)
    bags.row_gradients(rows, 1)
    bags.weight_gradients(rows, rows)
