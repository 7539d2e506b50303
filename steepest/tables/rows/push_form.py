"""How the gradients of rows of several groups of tables travel as one push, perhaps in fewer bytes.

`Table.gradient_dtype` has gradients rounded by chance as rows in fewer bytes are (`steepest.tables.rows.row_formats`):
the mean over many pushes is right, no sender keeps what was cut off, and nothing of it is lost with one. Chance is a
function of (seed, table's name, worker, version, id, column) alone, so that a push made again has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.rows.gradients import Bytes, Empty, RowGradients, aligned, width_of
from steepest.tables.rows.hashing import salt_of
from steepest.tables.rows.kernels import Int64s
from steepest.tables.rows.row_formats import RowFormat, as_words
from steepest.tables.rows.table import Table


class Chance(NamedTuple):
    """By whose chance gradients are rounded: the worker's that pushes, and the version that it has."""

    worker: int
    version: int


class GroupForm:
    """How the gradients of one group of tables travel.

    Args:
        tables: of the group.
        seed: of the job.

    Attributes:
        row_bytes: bytes of the gradient of a row, with its id.
    """

    def __init__(self, tables: Sequence[Table], seed: int) -> None:
        one = tables[0]
        self._dim, self._dtype = one.dim, one.form.dtype
        self._lives = any(table.life for table in tables)
        self._names, self._seed = [table.name for table in tables], seed
        # of the values; None where they travel as they are
        self._packed: RowFormat | None = None
        self.row_bytes = width_of(one.dim, self._dtype, lives=self._lives)
        if one.gradient_dtype is not None:
            self._packed = RowFormat(one.dim, 0, one.gradient_dtype)
            self.row_bytes = 16 + 4 * self._lives + self._packed.sent_bytes
        self._salts: dict[int, Int64s] = {}  # by worker

    def nbytes(self, rows: int) -> int:
        """Return the bytes of so many rows, with those up to the next group."""
        return aligned(rows * self.row_bytes)

    def write(self, part: RowGradients, packed: Bytes, chance: Chance) -> None:
        """Write gradients to memory of `nbytes`."""
        count, size = len(part), len(part) * self.row_bytes
        packed[size:] = 0
        if self._packed is None:
            part.write_to(packed[:size], lives=self._lives)
        elif count:
            packed[: 8 * count].view(np.int64)[:] = part.ids
            end = count * (16 + 4 * self._lives)
            numbers = packed[8 * count : end].view(np.int32).reshape(-1, count)
            numbers[0], numbers[1] = part.tables, part.sightings
            if self._lives:
                numbers[2] = 0 if part.lives is None else part.lives
            words = packed[end:size].view(np.uint16).reshape(count, -1)
            words[:] = 0  # of an odd number of octets one is not written
            every, keys = np.arange(count, dtype=np.int32), (part.tables, part.ids)
            salts = self._salts_of(chance.worker)
            self._packed.pack(
                part.gradients, every, keys, salts, max(chance.version, 0), as_words(words)
            )

    def read(self, packed: Bytes, count: int) -> RowGradients:
        """Return the gradients of so many rows, as views where they travel as they are."""
        size = count * self.row_bytes
        if self._packed is None or not count:
            rows = packed[: size if self._packed is None else 0]
            return RowGradients.unpack(rows, self._dim, self._dtype, lives=self._lives)
        end = count * (16 + 4 * self._lives)
        numbers = packed[8 * count : end].view(np.int32).reshape(-1, count)
        ids, values = packed[: 8 * count].view(np.int64), self._packed.received(packed[end:size])
        lives = numbers[2] if self._lives else None
        return RowGradients(numbers[0], ids, values, numbers[1], lives)

    def as_sent(self, part: RowGradients, chance: Chance) -> RowGradients:
        """Return gradients as they are after they have travelled."""
        if self._packed is None:
            return part
        packed = np.empty(self.nbytes(len(part)), np.uint8)
        self.write(part, packed, chance)
        return self.read(packed, len(part))

    def _salts_of(self, worker: int) -> Int64s:
        """Return by table what makes the chances of a worker others than those of rows and other workers."""
        if worker not in self._salts:
            salts = [salt_of(f"gradients of {worker}/{name}", self._seed) for name in self._names]
            self._salts[worker] = np.array(salts, np.uint64).view(np.int64)
        return self._salts[worker]


class PushForm:
    """Packs the gradients of groups of tables: the number of rows of each, then each group's.

    Args:
        groups: in the order of their numbers.
    """

    def __init__(self, groups: Sequence[GroupForm]) -> None:
        self._groups = tuple(groups)
        self._head = 8 * len(self._groups)

    def pack(self, gradients: Sequence[RowGradients | None], empty: Empty, chance: Chance) -> Bytes:
        """Return the gradients of each group as bytes, in memory that `empty` makes."""
        counts = [0 if part is None else len(part) for part in gradients]
        sizes = [form.nbytes(count) for form, count in zip(self._groups, counts, strict=True)]
        packed = empty(self._head + sum(sizes))
        packed[: self._head].view(np.int64)[:] = counts
        begin = self._head
        for form, part, size in zip(self._groups, gradients, sizes, strict=True):
            if part is not None:
                form.write(part, packed[begin : begin + size], chance)
            begin += size
        return packed

    def fits(self, size: int) -> bool:
        """Return whether gradients may have so many bytes."""
        return size > self._head and size == aligned(size)

    def unpack(self, packed: Bytes) -> list[RowGradients]:
        """Return the gradients of each group; ConfigurationError: the bytes are of another size."""
        counts = packed[: self._head].view(np.int64).tolist()
        sizes = [
            form.nbytes(count) if 0 <= count <= len(packed) else -1
            for form, count in zip(self._groups, counts, strict=True)
        ]
        if min(sizes) < 0 or self._head + sum(sizes) != len(packed):
            raise ConfigurationError(f"{len(packed)} bytes for {counts} rows of groups of tables")
        found, begin = [], self._head
        for form, count, size in zip(self._groups, counts, sizes, strict=True):
            found.append(form.read(packed[begin : begin + size], count))
            begin += size
        return found
