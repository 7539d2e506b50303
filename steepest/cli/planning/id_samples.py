"""Samples of the ids that tables are asked for: from arrays, from files, or from a model as it trains."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steepest.cli.planning.evictions import Evictions, EvictionTrial, is_tried
from steepest.data.storage.files import open_file
from steepest.errors import ConfigurationError
from steepest.tables.rows.checks import require_ids
from steepest.tables.rows.table import Table

_SUFFIXES = (".npz", ".npy", ".txt")
#: What NumPy raises of a file that is damaged, or says that it is larger than memory.
_NO_ARRAYS = (
    OSError,
    ValueError,
    OverflowError,
    EOFError,
    MemoryError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)
_FOLDED = 1 << 22  # keys, of which equal ones are put together
#: Ids without batches are taken for so many batches, or for more of them with so many look-ups each.
_BATCHES, _BATCH = 200, 1024


@dataclass(frozen=True)
class IdSample:
    """The look-ups of a table in a sample, in two halves.

    Attributes:
        table: the table.
        first, second: (n,), int64, how often each of n distinct ids was in each half.
        batch_rows: mean number of distinct ids of a batch; None of a sample without batches.
        evictions: what the table's settings remove; None of a table that only grows.
    """

    table: Table
    first: Any
    second: Any
    batch_rows: float | None = None
    evictions: Evictions | None = None

    @property
    def counts(self) -> Any:
        """How often each id was seen, (n,)."""
        return self.first + self.second


class IdCounter:
    """Counts the ids of one table, those of even and odd batches apart."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._trial = EvictionTrial(table) if is_tried(table) else None
        self._ids: list[Any] = []
        self._counts: list[Any] = []
        self._waiting = 0
        self._seen = 0  # distinct ids of each batch, added up

    def add(self, ids: Any, counts: Any, half: int) -> None:
        """Count distinct ids of a batch, shape (n,); `counts` tells how often each occurs in it."""
        both = np.zeros((len(ids), 2), np.int64)
        both[:, half] = counts
        self._ids.append(np.asarray(ids, np.int64))
        self._counts.append(both)
        self._waiting += len(ids)
        self._seen += len(ids)
        if self._trial is not None:
            self._trial.push(ids, counts)
        if self._waiting > _FOLDED:
            self._fold()

    def _fold(self) -> None:
        ids, inverse = np.unique(np.concatenate(self._ids), return_inverse=True)
        counts = np.zeros((len(ids), 2), np.int64)
        np.add.at(counts, inverse, np.concatenate(self._counts))
        self._ids, self._counts, self._waiting = [ids], [counts], 0

    def sample(self, batches: int | None) -> IdSample:
        """Return the counts as a sample of a number of batches; None if the data have no batches."""
        if not self._ids:
            self.add(np.zeros(0, np.int64), np.zeros(0, np.int64), 0)
        self._fold()
        (ids,), (both,) = self._ids, self._counts
        evictions = None if self._trial is None else self._trial.end(ids, both.sum(1))
        mean = self._seen / batches if batches else None
        return IdSample(self._table, both[:, 0], both[:, 1], mean, evictions)


def sample_of(table: Table, ids: Any) -> IdSample:
    """Return the sample of ids from an array of any shape, or from an iterable of arrays, each a batch."""
    counter, number = IdCounter(table), -1
    has_batches = True
    if isinstance(ids, np.ndarray) or hasattr(ids, "__array__") or _is_flat(ids):
        flat = require_ids(f"ids of table {table.name!r}", ids).reshape(-1)
        size = min(max(len(flat) // _BATCHES, 1), _BATCH, max((table.capacity or _BATCH) // 2, 1))
        batches: Iterable[Any] = np.split(flat, range(size, len(flat), size))
        has_batches = False
    else:
        batches = ids
    for number, batch in enumerate(batches):
        checked = require_ids(f"ids of table {table.name!r}", batch).reshape(-1)
        counter.add(*np.unique(checked, return_counts=True), number % 2)
    return counter.sample(number + 1 if has_batches else None)


def _is_flat(ids: Any) -> bool:
    return isinstance(ids, (list, tuple)) and all(isinstance(each, int) for each in ids)


def samples_in(path: Path, describe: Mapping[str, Any]) -> list[IdSample]:
    """Return the samples in a file, by the names of its arrays, or its own.

    Args:
        path: .npz with an array of ids for each table; .npy; or .txt with integers.
        describe: arguments of `Table` for all of them.

    Raises:
        ConfigurationError: it cannot be read, or holds no ids.
    """
    try:
        with open_file(path) as file:
            if path.suffix == ".npz":
                with np.load(file, allow_pickle=False) as archive:
                    arrays = {name: archive[name] for name in archive.files}
            elif path.suffix == ".npy":
                arrays = {path.stem: np.load(file, allow_pickle=False)}
            else:
                words = file.read().decode().replace(",", " ").split()
                arrays = {path.stem: np.array(words, np.int64)}
    except _NO_ARRAYS as error:
        raise ConfigurationError(
            f"{path} holds no ids: {error}; give .npz with an array of integers for each table, .npy, or .txt"
        ) from None
    return [sample_of(Table(name, **describe), ids) for name, ids in arrays.items()]


def is_sample(path: Path) -> bool:
    """Return whether a path names a file of ids, by its suffix."""
    return path.suffix in _SUFFIXES


class CountingRows:
    """A source of rows that counts the ids of training batches, see `RowSource`."""

    def __init__(self, source: Any, tables: Iterable[Table]) -> None:
        self._source = source
        known = list(tables)
        self._names = {source.place(table): table.name for table in known}
        self.counters = {table.name: IdCounter(table) for table in known}
        self.batch = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def push(
        self, group: int, tables: Any, ids: Any, gradients: Any, sightings: Any, lives: Any = None
    ) -> None:
        """Count ids, and pass their gradients on."""
        for number in np.unique(tables):
            mine = tables == number
            counter = self.counters[self._names[group, int(number)]]
            counter.add(ids[mine], sightings[mine], self.batch % 2)
        self._source.push(group, tables, ids, gradients, sightings, lives)
