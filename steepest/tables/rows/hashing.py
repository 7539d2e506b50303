"""Hashes of ids: where a row is kept, and which ids of a batch are the same."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from steepest.tables.rows.kernels import Int32s, Int64s, inlined, kernel, read_only
from steepest.tables.rows.spread import Spread

Bools = npt.NDArray[np.bool_]
#: SplitMix64's increment: 2^64 divided by the golden ratio, odd.
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SHARD_SALT = np.uint64(0xD1B54A32D192ED03)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)


@inlined
def mix(value: np.uint64) -> np.uint64:
    """Return 64 bits each of which depends on all bits of a value: SplitMix64's finalizer.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014. It is a bijection.
    """
    value = (value ^ (value >> _30)) * _FIRST
    value = (value ^ (value >> _27)) * _SECOND
    mixed: np.uint64 = value ^ (value >> _31)
    return mixed


def salt_of(name: str, seed: int) -> int:
    """Return 64 bits for a table: the same on every machine, another for each name and seed."""
    text = f"{seed}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@inlined
def _shard(hashed: np.uint64, table: np.int32, spread: Spread) -> np.int64:
    """Return the shard of a key."""
    part = np.int64(((hashed >> _32) * np.uint64(spread.parts[table])) >> _32)
    shard: np.int64 = (np.int64(spread.firsts[table]) + part) % spread.num_shards
    return shard


@kernel
def _shards(tables: Int32s, ids: Int64s, spread: Spread, shards: Int32s) -> None:
    for at in range(len(ids)):
        table = tables[at]
        hashed = mix(np.uint64(ids[at]) ^ (_SHARD_SALT * np.uint64(table + 1)))
        shards[at] = np.int32(_shard(hashed, table, spread))


def shard_of(tables: Int32s, ids: Int64s, spread: Spread) -> Int32s:
    """Return the shard that holds each key: table numbers (n,), and non-negative ids (n,)."""
    shards = np.empty(len(ids), np.int32)
    keys = read_only(tables, np.int32), read_only(ids, np.int64)
    _shards(*keys, spread, shards)
    return shards


@kernel
def _are_distinct(
    tables: Int32s, ids: Int64s, shards: Bools, spread: Spread, slots: Int32s
) -> bool:
    mask = np.uint64(len(slots) - 1)
    slots[:] = 0
    for at in range(len(ids)):
        table, key = tables[at], ids[at]
        if key < 0 or table < 0 or table >= len(spread.firsts):
            return False
        hashed = mix(np.uint64(key) ^ (_SHARD_SALT * np.uint64(table + 1)))
        if not shards[_shard(hashed, table, spread)]:
            return False
        slot = hashed & mask
        while slots[slot]:
            other = slots[slot] - 1
            if ids[other] == key and tables[other] == table:
                return False
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = at + 1
    return True


def are_distinct(tables: Int32s, ids: Int64s, shards: Bools, spread: Spread) -> bool:
    """Return whether keys (n,) are distinct, and all of shards of a spread where `shards` (shards,) is true."""
    slots = np.empty(1 << max(3, (2 * len(ids) - 1).bit_length()), np.int32)
    keys = read_only(tables, np.int32), read_only(ids, np.int64)
    return bool(_are_distinct(*keys, shards, spread, slots))


@kernel
def _deal(shards: Int32s, begins: Int64s, order: Int64s) -> bool:
    """Count the keys of each shard, and sort them; return whether they were in order already."""
    ascending = True
    for at in range(len(shards)):
        begins[shards[at] + 1] += 1
        if at and shards[at] < shards[at - 1]:
            ascending = False
    for shard in range(1, len(begins)):
        begins[shard] += begins[shard - 1]
    if not ascending:
        places = begins.copy()
        for at in range(len(shards)):
            order[places[shards[at]]] = at
            places[shards[at]] += 1
    return ascending


def deal(tables: Int32s, ids: Int64s, spread: Spread) -> tuple[Int64s | None, Int64s]:
    """Return an order of keys (n,) that groups them by shard, or None if they are in such an order."""
    # And where each begins. (n,), places in `tables` and `ids`, ascending within a shard; (shards + 1,), the place in
    # it at which each shard begins, and n.
    shards = shard_of(tables, ids, spread)
    begins, order = np.zeros(spread.num_shards + 1, np.int64), np.empty(len(ids), np.int64)
    return (None if _deal(shards, begins, order) else order), begins


@kernel
def _distinct(
    tables: Int32s,
    ids: Int64s,
    slots: Int32s,
    first: Int32s,
    counts: Int32s,
    inverse: Int32s,
) -> int:
    mask = np.uint64(len(slots) - 1)
    slots[:] = 0
    distinct = 0
    for at in range(len(ids)):
        table, key = tables[at], ids[at]
        slot = (mix(np.uint64(key) ^ (GAMMA * np.uint64(table)))) & mask
        while True:
            other = slots[slot] - 1
            if other < 0:
                slots[slot] = distinct + 1
                first[distinct], counts[distinct] = at, 1
                inverse[at] = distinct
                distinct += 1
                break
            if ids[first[other]] == key and tables[first[other]] == table:
                counts[other] += 1
                inverse[at] = other
                break
            slot = (slot + np.uint64(1)) & mask
    return distinct


class Distinct:
    """The distinct (table, id) of a batch, by ascending shard, in order of first sight within one."""

    def __init__(
        self,
        tables: npt.NDArray[np.integer],
        ids: npt.NDArray[np.integer],
        spread: Spread | None = None,
    ) -> None:
        """Find the distinct keys of a batch, (n,) each; without a spread all keys are of one shard."""
        of, keys = read_only(tables, np.int32), read_only(ids, np.int64)
        size = len(keys)
        slots = np.empty(1 << max(3, (2 * size - 1).bit_length()), np.int32)
        first, counts = np.empty(size, np.int32), np.empty(size, np.int32)
        # (n,), of each (table, id) of the batch its place in `tables` and `ids`
        self.inverse = np.empty(size, np.int32)
        groups = _distinct(of, keys, slots, first, counts, self.inverse)
        self.tables: Int32s = of[first[:groups]]  # this and ids: (m,)
        self.ids: Int64s = keys[first[:groups]]
        self.counts = counts[:groups]  # (m,), how often each occurs in the batch
        if spread is not None and spread.num_shards > 1:
            order, _ = deal(self.tables, self.ids, spread)
            if order is not None:
                self._reorder(order)

    def _reorder(self, order: Int64s) -> None:
        places = np.empty(len(order), np.int32)
        places[order] = np.arange(len(order), dtype=np.int32)
        self.inverse = places[self.inverse]
        self.tables, self.ids = self.tables[order], self.ids[order]
        self.counts = self.counts[order]


@kernel
def _add_up(
    rows: npt.NDArray[np.floating], inverse: Int32s, sums: npt.NDArray[np.floating]
) -> None:
    for at in range(len(inverse)):
        target = sums[inverse[at]]
        row = rows[at]
        for column in range(len(row)):
            target[column] += row[column]


def add_up(rows: npt.NDArray[np.floating], inverse: Int32s, count: int) -> npt.NDArray[np.floating]:
    """Return the sums (count, dim) of rows (n, dim) with the same number (n,), added in their order."""
    sums = np.zeros((count, rows.shape[1]), rows.dtype)
    _add_up(read_only(rows, rows.dtype), read_only(inverse, np.int32), sums)
    return sums
