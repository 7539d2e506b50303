"""Gradients of rows, and the keys of rows, as they travel: arrays one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.checks import require_keys
from steepest.tables.rows.hashing import Bools, Distinct, add_up, are_distinct, shard_of
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, kernel, read_only
from steepest.tables.rows.spread import Spread

Bytes = npt.NDArray[np.uint8]
#: Returns memory of so many bytes, with anything in it.
Empty = Callable[[int], Bytes]
#: Behind the name of gradients that were packed with lives.
WITH_LIVES = "+lives"
_ALIGNED = 8  # bytes at a multiple of which arrays of numbers begin
_KEY_BYTES = 12  # an id, and a table number
_ITEM_BYTES = {"float32": 4, "float64": 8}  # of the dtypes in which pushes compute


def _new(nbytes: int) -> Bytes:
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True)
class RowGradients:
    """Gradients of distinct rows."""

    tables: Int32s  # (n,), table numbers in their group
    ids: Int64s
    gradients: Floats  # (n, dim), of the tables' dtype
    sightings: Int32s  # (n,), how often each id was in the batch
    # (n,), for how many seconds rows stay from now, by the features that had them; 0 for as long as their table
    # says; None for that with all
    lives: Int32s | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.ids)

    def pack(self, empty: Empty = _new, *, lives: bool = False) -> Bytes:
        """Return ids, gradients, table numbers and sightings as bytes, in memory that `empty` makes.

        Args:
            lives: whether they follow.
        """
        count, width = len(self), self.gradients.itemsize * self.gradients.shape[1]
        packed = empty(count * (16 + 4 * lives + width))
        self.write_to(packed, lives=lives)
        return packed

    def write_to(self, packed: Bytes, *, lives: bool = False) -> None:
        """Write what `pack` returns to memory of that size."""
        count, width = len(self), self.gradients.itemsize * self.gradients.shape[1]
        middle, end = 8 * count, (8 + width) * count
        packed[:middle].view(np.int64)[:] = self.ids
        packed[middle:end].view(self.gradients.dtype)[:] = self.gradients.reshape(-1)
        if count:
            numbers = packed[end:].view(np.int32).reshape(-1, count)
            numbers[0], numbers[1] = self.tables, self.sightings
            if lives:
                numbers[2] = self._lives()

    @classmethod
    def unpack(cls, packed: Bytes, dim: int, dtype: str, *, lives: bool = False) -> RowGradients:
        """Return what `pack` packed, as views; ConfigurationError: it is of another size."""
        width = _ITEM_BYTES[dtype] * dim
        count, rest = divmod(len(packed), 16 + 4 * lives + width)
        if rest:
            require_rows(len(packed), width_of(dim, dtype, lives=lives))
        begin, end = 8 * count, (8 + width) * count
        numbers = (
            packed[end:].view(np.int32).reshape(-1, count) if count else np.empty((3, 0), np.int32)
        )
        return cls(
            numbers[0],
            packed[:begin].view(np.int64),
            packed[begin:end].view(dtype).reshape(count, dim),
            numbers[1],
            numbers[2] if lives else None,
        )

    def _lives(self) -> Int32s:
        return np.zeros(len(self), np.int32) if self.lives is None else self.lives

    def require(self, names: Sequence[str], shards: Bools, spread: Spread) -> None:
        """Check that rows are distinct, of shards where `shards` (shards,) is true; ConfigurationError otherwise."""
        if self.lives is not None and len(self) and self.lives.min() < 0:
            raise ConfigurationError(f"lives hold {self.lives.min()}: give seconds, at least 0")
        fine = are_distinct(self.tables, self.ids, shards, spread)
        if fine and (not len(self) or self.sightings.min() > 0):
            return
        require_keys(self.tables, self.ids, names)
        if len(self) and self.sightings.min() < 1:
            raise ConfigurationError(f"sightings hold {self.sightings.min()}: give at least 1")
        others = np.flatnonzero(~shards[shard_of(self.tables, self.ids, spread)])
        if len(others):
            held = ", ".join(map(str, np.flatnonzero(shards)))
            raise ConfigurationError(
                f"id {self.ids[others[0]]} is of another one of {spread.num_shards} shards than {held}"
            )
        counts = Distinct(self.tables, self.ids).counts
        if len(counts) < len(self):
            raise ConfigurationError(f"of {len(self)} ids only {len(counts)} are distinct")

    def taken(self, which: Any) -> RowGradients:
        """Return some of the rows, by an index of NumPy's."""
        lives = None if self.lives is None else self.lives[which]
        if isinstance(which, np.ndarray) and which.dtype == np.int64:
            gradients = self.gradients.take(which, 0)  # a quarter of an index's time
        else:
            gradients = self.gradients[which]
        return RowGradients(
            self.tables[which], self.ids[which], gradients, self.sightings[which], lives
        )

    def times(self, factor: float) -> RowGradients:
        """Return the gradients times a factor."""
        if factor == 1.0:
            return self
        with np.errstate(over="ignore", invalid="ignore"):  # a check for infinity follows
            return replace(self, gradients=self.gradients * self.gradients.dtype.type(factor))


def added(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the sum of gradients of rows, each row once, in order of first sight; added in the order of the parts.

    So the same parts make the same bits.
    """
    if len(parts) == 1:
        return parts[0]
    every = _joined(parts)
    if _are_of_other_tables(parts):
        return every
    keys = Distinct(every.tables, every.ids)
    count = len(keys.ids)
    gradients = add_up(every.gradients, keys.inverse, count)
    sightings = every.sightings.astype(np.float64)[:, None]
    seen = add_up(sightings, keys.inverse, count)[:, 0].clip(max=2**31 - 1).astype(np.int32)
    lives = None if every.lives is None else longest(every.lives, keys.inverse, count)
    return RowGradients(keys.tables, keys.ids, gradients, seen, lives)


def _joined(parts: Sequence[RowGradients]) -> RowGradients:
    """Return the rows of all parts, one part after the other."""
    lives = None
    if any(part.lives is not None for part in parts):
        lives = np.concatenate([part._lives() for part in parts])
    return RowGradients(
        np.concatenate([part.tables for part in parts]),
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.gradients for part in parts]),
        np.concatenate([part.sightings for part in parts]),
        lives,
    )


def _are_of_other_tables(parts: Sequence[RowGradients]) -> bool:
    """Return whether no table is in two parts, as the range of their numbers shows: then all rows are distinct."""
    ranges = sorted((part.tables.min(), part.tables.max()) for part in parts if len(part))
    return all(before[1] < after[0] for before, after in pairwise(ranges))


@kernel
def _add_part(
    rows: Floats, factor: float, sightings: Int32s, inverse: Int32s, sums: Floats, seen: Int64s
) -> None:
    """Add rows times a factor, and their sightings, to those with the same number."""
    for at in range(len(inverse)):
        number = inverse[at]
        seen[number] += sightings[at]
        for column in range(rows.shape[1]):
            sums[number, column] += rows[at, column] * factor


def weighted(parts: Sequence[RowGradients], factors: Sequence[float]) -> RowGradients:
    """Return what `added` returns of parts, each times a factor, to the bit."""
    if len(parts) == 1:
        return parts[0].times(factors[0])
    tables = np.concatenate([part.tables for part in parts])
    keys = Distinct(tables, np.concatenate([part.ids for part in parts]))
    count, one, begin = len(keys.ids), parts[0].gradients, 0
    sums, seen = np.zeros((count, one.shape[1]), one.dtype), np.zeros(count, np.int64)
    inverse = read_only(keys.inverse, np.int32)
    for part, factor in zip(parts, factors, strict=True):
        rows, own = read_only(part.gradients, one.dtype), read_only(part.sightings, np.int32)
        end = begin + len(own)
        _add_part(rows, one.dtype.type(factor), own, inverse[begin:end], sums, seen)
        begin = end
    lives = None
    if any(part.lives is not None for part in parts):
        lives = longest(np.concatenate([part._lives() for part in parts]), keys.inverse, count)
    clipped = np.minimum(seen, 2**31 - 1).astype(np.int32)
    return RowGradients(keys.tables, keys.ids, sums, clipped, lives)


def longest(lives: Int32s, inverse: Int32s, count: int) -> Int32s:
    """Return the greatest of the seconds (n,) that have the same number (n,), for `count` numbers."""
    totals = np.zeros(count, np.int32)
    np.maximum.at(totals, inverse, lives)
    return totals


def width_of(dim: int, dtype: str, *, lives: bool) -> int:
    """Return the size in bytes of a row's gradient in a message, with its id and counts."""
    return 16 + 4 * lives + np.dtype(dtype).itemsize * dim


def pack_keys(keys: Sequence[tuple[Int32s, Int64s]], empty: Empty = _new) -> Bytes:
    """Return the keys of rows as bytes, all ids, then all table numbers, in memory that `empty` makes."""
    return _joined_bytes([*(ids for _, ids in keys), *(tables for tables, _ in keys)], empty)


def aligned(nbytes: int) -> int:
    """Return bytes up to a multiple of those of the widest number."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _joined_bytes(parts: Sequence[npt.NDArray[Any]], empty: Empty) -> Bytes:
    packed = empty(sum(part.nbytes for part in parts))
    return np.concatenate([_as_bytes(part) for part in parts], out=packed)


def unpack_keys(packed: Bytes) -> tuple[Int32s, Int64s]:
    """Return (table numbers, ids) that `pack_keys` packed, as views; ConfigurationError: they are of another size."""
    count = require_rows(len(packed), _KEY_BYTES)
    return packed[8 * count :].view(np.int32), packed[: 8 * count].view(np.int64)


def require_rows(size: int, width: int) -> int:
    """Return the number of rows of `width` bytes in `size` bytes; ConfigurationError: it is not whole."""
    count, rest = divmod(size, width)
    if rest:
        raise ConfigurationError(f"{size} bytes for rows of {width} bytes each")
    return count


def _as_bytes(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
