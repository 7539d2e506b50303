"""Which rows go: the least used where a table is full, and old or small ones when that is asked for.

Names are those of DeepRec and TorchRec. All is decided by versions, by the order of pushes and by the clock that
commits say, never by a machine's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from steepest.errors import ConfigurationError
from steepest.tables.rows.blocks import FREE, Blocks
from steepest.tables.rows.kernels import Floats, Int32s, Int64s, inlined, kernel, read_only
from steepest.tables.rows.memory import Reserved
from steepest.tables.rows.state import TableState
from steepest.validation import require_count, require_positive

_LONGEST = 2**30  # updates


@dataclass(frozen=True)
class LRU:
    """A full table loses the row whose last push is longest ago; of several, that of the least id."""


@dataclass(frozen=True)
class LFU:
    """A full table loses the row that was pushed least often; of several, that of the least id.

    Attributes:
        half_life: updates after which a sighting counts half as much, see `steepest.tables.rows.scores`; without it,
            each counts the same for ever.
    """

    half_life: int | None = None

    def __post_init__(self) -> None:
        if (
            self.half_life is not None
            and require_count("LFU(half_life)", self.half_life) > _LONGEST
        ):
            raise ConfigurationError(
                f"LFU(half_life={self.half_life}): give at most {_LONGEST} updates"
            )


@dataclass(frozen=True)
class GlobalStepEvict:
    """`evict` removes rows that no push of the last `steps_to_live` versions has updated."""

    steps_to_live: int

    def __post_init__(self) -> None:
        require_count("GlobalStepEvict(steps_to_live)", self.steps_to_live)


@dataclass(frozen=True)
class L2WeightEvict:
    """`evict` removes rows whose Euclidean norm is below a threshold."""

    l2_weight_threshold: float

    def __post_init__(self) -> None:
        require_positive("L2WeightEvict(l2_weight_threshold)", self.l2_weight_threshold)


Policy = LRU | LFU
Evict = GlobalStepEvict | L2WeightEvict


class Heap(NamedTuple):
    """Rows by their use, the least used first, as kernels take them."""

    keys: Int64s  # (capacity,), a row's use when it was entered
    numbers: Int32s  # (capacity,), of rows
    ids: Int64s  # of all rows, by number; so are uses and written
    uses: npt.NDArray[np.integer]
    written: Int64s


@inlined
def _before(first: int, other: int, heap: Heap) -> bool:
    if heap.keys[first] != heap.keys[other]:
        return bool(heap.keys[first] < heap.keys[other])
    return bool(heap.ids[heap.numbers[first]] < heap.ids[heap.numbers[other]])


@inlined
def _swap(first: int, other: int, heap: Heap) -> None:
    keys, numbers = heap.keys, heap.numbers
    keys[first], keys[other] = keys[other], keys[first]
    numbers[first], numbers[other] = numbers[other], numbers[first]


@inlined
def _sink(size: int, heap: Heap) -> None:
    """Move the first of a heap down to its place."""
    at = 0
    while True:
        least = at
        for child in range(2 * at + 1, min(2 * at + 3, size)):
            if _before(child, least, heap):
                least = child
        if least == at:
            return
        _swap(at, least, heap)
        at = least


@inlined
def _rise(at: int, heap: Heap) -> None:
    """Move an item of a heap up to its place."""
    while at > 0 and _before(at, (at - 1) // 2, heap):
        _swap(at, (at - 1) // 2, heap)
        at = (at - 1) // 2


@kernel
def _enter(fresh: Int32s, size: int, heap: Heap) -> None:
    for at in range(len(fresh)):
        heap.keys[size + at], heap.numbers[size + at] = heap.uses[fresh[at]], fresh[at]
        _rise(size + at, heap)


@kernel
def _take(size: int, version: int, heap: Heap, taken: Int32s) -> int:
    """Take the least used rows that this version has not written; return the heap's size."""
    # A row's key is what its use was when it was entered. Uses only grow, so the least of the heap is the least used
    # row if its key is still right; else it is entered again.
    done, spared = 0, 0
    while done < len(taken):
        number = heap.numbers[0]
        if heap.written[number] == version:  # set aside behind the heap
            size -= 1
            _swap(0, size, heap)
            spared += 1
        elif heap.keys[0] != heap.uses[number]:
            heap.keys[0] = heap.uses[number]
        else:
            taken[done] = number
            done += 1
            size -= 1
            _swap(0, size, heap)
            _swap(size, size + spared, heap)  # what is set aside moves up to the heap's end
        _sink(size, heap)
    for _ in range(spared):
        heap.keys[size] = heap.uses[heap.numbers[size]]
        size += 1
        _rise(size - 1, heap)
    return size


class Use:
    """The rows of one full table by use: exact LRU or LFU, in 12 bytes a row.

    A push touches what it adds and evicts.
    """

    def __init__(self, policy: Policy, capacity: int) -> None:
        """Begin with none of at most `capacity` rows."""
        self._policy = policy
        self._keys, self._numbers = Reserved(capacity, np.int64), Reserved(capacity, np.int32)
        self._size = 0

    def of_state(self, rows: Blocks | TableState) -> npt.NDArray[np.integer]:
        """Return by what rows are compared: those with the least go first, of equal ones the least id."""
        if isinstance(self._policy, LRU):
            return rows.written
        if self._policy.half_life is None:
            return rows.sightings
        assert rows.scores is not None
        return rows.scores

    def present(self, blocks: Blocks) -> tuple[Int32s, npt.NDArray[np.integer]]:
        """Return the numbers of the rows, and by what they are compared."""
        numbers = self._numbers.array[: self._size].copy()
        return numbers, self.of_state(blocks)[numbers]

    def _heap(self, blocks: Blocks) -> Heap:
        uses = self.of_state(blocks)
        return Heap(self._keys.array, self._numbers.array, blocks.ids, uses, blocks.written)

    def enter(self, numbers: Int32s, blocks: Blocks) -> None:
        """Take in new rows."""
        _enter(read_only(numbers, np.int32), self._size, self._heap(blocks))
        self._size += len(numbers)

    def take(self, count: int, version: int, blocks: Blocks) -> Int32s:
        """Return the `count` least used rows that were not written at `version`, and forget them."""
        taken = np.empty(count, np.int32)
        self._size = _take(self._size, version, self._heap(blocks), taken)
        return taken

    def forget_free(self, blocks: Blocks) -> None:
        """Forget the rows that are not in use any more."""
        numbers = self._numbers.array[: self._size].copy()
        self._size = 0
        self.enter(numbers[blocks.written[numbers] != FREE], blocks)


@kernel
def _worn(
    version: int,
    dim: int,
    ages: Int64s,
    norms: npt.NDArray[np.float64],
    rows: Floats,
    tables: npt.NDArray[np.int16],
    written: Int64s,
    why: npt.NDArray[np.int8],
) -> None:
    """Say of each row whether it is too old (1), too small (2), or stays (0)."""
    for number in range(len(why)):
        table = tables[number]
        why[number] = 0
        if written[number] == FREE:
            continue
        if 0 < ages[table] < version - written[number]:
            why[number] = 1
        elif norms[table] > 0:
            total = 0.0
            for column in range(dim):
                total += np.float64(rows[number, column]) * np.float64(rows[number, column])
            if np.sqrt(total) < norms[table]:
                why[number] = 2


def worn(evict: Sequence[tuple[Evict, ...]], version: int, blocks: Blocks) -> npt.NDArray[np.int8]:
    """Return of each row up to `blocks.top` whether it is too old (1) at `version`, too small (2), or stays (0)."""
    ages, norms = np.zeros(len(evict), np.int64), np.zeros(len(evict))
    for table, ways in enumerate(evict):
        for way in ways:
            if isinstance(way, GlobalStepEvict):
                ages[table] = way.steps_to_live
            else:
                norms[table] = way.l2_weight_threshold
    why = np.empty(blocks.top, np.int8)
    for begin, rows in blocks.store.in_turns(blocks.top):
        of = slice(begin, begin + len(rows))
        known = blocks.tables[of], blocks.written[of]
        _worn(version, blocks.dim, ages, norms, rows, *known, why[of])
    return why
