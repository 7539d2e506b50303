"""Small tables that every worker holds like its dense weights, instead of servers by row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.rows.first_values import FirstValues
from steepest.tables.rows.hashing import salt_of
from steepest.tables.rows.kernels import Floats, Int32s, kernel
from steepest.tables.rows.table import Table

#: The bytes of values up to which the tables of a model are replicated by themselves, smallest first.
REPLICATED_BYTES = 2 << 20
#: The mark of a row that a batch had, in place of the first element of its gradient if all of that is 0. Sums and
#: means over workers keep it, and add nothing to another worker's gradient; `take_touched` takes it out.
TOUCHED = 1e-30
_MOST_MARK = 1e-26  # a sum of marks is no more; a gradient that is no more is 0


def replicated(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return the tables of a model that workers hold: those that say so, and small ones, see `REPLICATED_BYTES`."""
    found, left = set[str](), REPLICATED_BYTES
    tables = tuple(tables)
    by_size = sorted(tables, key=lambda table: (_bytes_of(table), table.name))
    for table in by_size:
        if table.replicate is True:
            found.add(table.name)
        elif table.replicate is None and not table.needs_servers and _bytes_of(table) <= left:
            left -= _bytes_of(table)
            found.add(table.name)
    return tuple(table for table in tables if table.name in found)


def _bytes_of(table: Table) -> int:
    return (table.num_embeddings or 0) * table.dim * np.dtype(table.form.dtype).itemsize


def first_values(table: Table, seed: int) -> Floats:
    """Return the values with which all rows of a table begin, (num_embeddings, dim), as servers make them."""
    count = table.num_embeddings
    assert count is not None
    ids = np.arange(count, dtype=np.int64)
    return FirstValues([table], [salt_of(table.name, seed)]).of_rows(np.zeros(count, np.int32), ids)


@kernel
def take_touched(
    values: Floats, slots: Floats, gradients: Floats, numbers: Int32s, rows: Floats, mine: Floats
) -> int:
    """Copy the rows whose gradient is not all zeros, in a table of (n, dim) values; return how many there are.

    Their numbers, (n,), values with slots, (n, dim + k), and gradients without marks are written to the beginnings of
    the last three.
    """
    count, dim = 0, values.shape[1]
    for row in range(len(gradients)):
        gradient = gradients[row]
        for column in range(dim):
            if gradient[column] != 0.0:  # NaN, too
                numbers[count] = row
                for each in range(dim):
                    mine[count, each] = gradient[each]
                    rows[count, each] = values[row, each]
                if abs(gradient[0]) <= _MOST_MARK:
                    mine[count, 0] = 0.0
                for each in range(slots.shape[1]):
                    rows[count, dim + each] = slots[row, each]
                count += 1
                break
    return count


@kernel
def put_back(numbers: Int32s, rows: Floats, values: Floats, slots: Floats) -> None:
    """Write the rows copied by `take_touched` back to their places."""
    dim = values.shape[1]
    for at in range(len(numbers)):
        row = numbers[at]
        for each in range(dim):
            values[row, each] = rows[at, each]
        for each in range(slots.shape[1]):
            slots[row, each] = rows[at, dim + each]


def require_range(table: Table, ids: Any) -> None:
    """Check that ids are of a table with `num_embeddings`; ConfigurationError names it, and one that is not."""
    count = table.num_embeddings
    if count is not None and ids.size and int(ids.max()) >= count:
        raise ConfigurationError(
            f"ids of table {table.name!r} hold {int(ids.max())}: it has num_embeddings={count}, so give ids from 0 to "
            f"{count - 1}, or leave num_embeddings out, for ids of any size"
        )
