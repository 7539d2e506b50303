"""How the gradients of rows of several groups of tables travel as one push."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.gradients import Bytes, Empty, RowGradients, aligned, width_of


class GroupForm(NamedTuple):
    """How one group's gradients travel, see `RowGradients.pack`."""

    dim: int
    dtype: str
    lives: bool

    def nbytes(self, rows: int) -> int:
        """Return the bytes of so many rows, with those up to the next group."""
        return aligned(rows * width_of(self.dim, self.dtype, lives=self.lives))


class PushForm:
    """Packs the gradients of groups of tables: the number of rows of each, then each group's.

    Args:
        groups: in the order of their numbers.
    """

    def __init__(self, groups: Sequence[GroupForm]) -> None:
        self._groups = tuple(groups)
        self._head = 8 * len(self._groups)

    def pack(self, gradients: Sequence[RowGradients | None], empty: Empty) -> Bytes:
        """Return the gradients of each group as bytes, in memory that `empty` makes."""
        counts = [0 if part is None else len(part) for part in gradients]
        sizes = [form.nbytes(count) for form, count in zip(self._groups, counts, strict=True)]
        packed = empty(self._head + sum(sizes))
        packed[: self._head].view(np.int64)[:] = counts
        begin = self._head
        for form, part, size in zip(self._groups, gradients, sizes, strict=True):
            if part is not None:
                width = width_of(form.dim, form.dtype, lives=form.lives)
                end = begin + len(part) * width
                part.write_to(packed[begin:end], lives=form.lives)
                packed[end : begin + size] = 0
            begin += size
        return packed

    def fits(self, size: int) -> bool:
        """Return whether gradients may have so many bytes."""
        return size > self._head and size == aligned(size)

    def unpack(self, packed: Bytes) -> list[RowGradients]:
        """Return the gradients of each group, as views; ConfigurationError: the bytes are of another size."""
        counts = packed[: self._head].view(np.int64).tolist()
        sizes = [
            form.nbytes(count) if 0 <= count <= len(packed) else -1
            for form, count in zip(self._groups, counts, strict=True)
        ]
        if min(sizes) < 0 or self._head + sum(sizes) != len(packed):
            raise ConfigurationError(f"{len(packed)} bytes for {counts} rows of groups of tables")
        found, begin = [], self._head
        for (dim, dtype, lives), count, size in zip(self._groups, counts, sizes, strict=True):
            end = begin + count * width_of(dim, dtype, lives=lives)
            found.append(RowGradients.unpack(packed[begin:end], dim, dtype, lives=lives))
            begin += size
        return found
