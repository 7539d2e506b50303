"""The values of ids that have no row: those with which rows begin, and those that are answered meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from steepest.tables.rows.gradients import Bytes
from steepest.tables.rows.hashing import salt_of
from steepest.tables.rows.initial import Beginning, Constant, Initial, Zeros
from steepest.tables.rows.kernels import Floats, Int32s, Int64s
from steepest.tables.rows.row_formats import RowFormat
from steepest.tables.rows.table import Table


class FirstValues:
    """The values of ids without rows of a group of tables, whose `salt_of` are `salts`."""

    def __init__(self, tables: Sequence[Table], salts: Sequence[int]) -> None:
        self._form: RowFormat = tables[0].form
        self._salts: Int64s = np.array(salts, np.uint64).view(np.int64)
        self._beginning = Beginning([table.initial for table in tables], salts)
        # by whether a push follows: then a table may make rows of all of them
        self._unknown = [
            Beginning([_values_of_unknown(table, training) for table in tables], salts)
            for training in (False, True)
        ]

    def of_rows(self, tables: Int32s, ids: Int64s) -> Floats:
        """Return the values with which rows begin, (n, dim), in the dtype in which pushes compute."""
        return self._filled(self._beginning, tables, ids)

    def sent(self, tables: Int32s, ids: Int64s, training: bool) -> Bytes:
        """Return the values of ids without rows as they travel, (n, `RowFormat.sent_bytes`).

        Args:
            training: whether a push of these ids follows.
        """
        values = self._filled(self._unknown[training], tables, ids)
        if self._form.is_packed:
            return self._form.packed_values(values, (tables, ids), self._salts)
        return values.view(np.uint8)

    def _filled(self, beginning: Beginning, tables: Int32s, ids: Int64s) -> Floats:
        values = np.empty((len(ids), self._form.dim), self._form.dtype)
        beginning.fill(tables, ids, np.arange(len(ids)), values)
        return values


def values_without_rows(table: Table, ids: Int64s, seed: int) -> Floats:
    """Return what servers of a job with a seed answer outside of training for ids without rows, (n, dim)."""
    first = FirstValues([table], [salt_of(table.name, seed)])
    return table.form.received(first.sent(np.zeros(len(ids), np.int32), ids, training=False))


def constant_without_rows(table: Table) -> float:
    """Return the value that all ids without rows have; 0 where each has random ones of its own."""
    if not isinstance(table.default or table.initial, (Constant, Zeros)):
        return 0.0
    return float(values_without_rows(table, np.zeros(1, np.int64), 0)[0, 0])


def _values_of_unknown(table: Table, training: bool) -> Initial:
    """Return how the values of ids without rows are made; `training` where a push of them follows."""
    makes_rows = training and table.trainable and table.admission is None
    return table.initial if table.default is None or makes_rows else table.default
