"""Where the batches of a model have the ids that it looks up, as found in the batches before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from steepest.tables.modules.keyed_jagged import KeyedJagged, by_feature
from steepest.tables.rows.kernels import Int32s, Int64s

_MOST_TRIES = 8  # batches in which the ids of a look-up are searched for
_MOST_LEAVES = 512  # of a batch that are searched
_MOST_COLUMNS = 256  # of a tensor of ids that are each tried by itself

#: The steps from a batch to ids in it: indices and keys, and at last perhaps a `_Column`.
Path = tuple[Any, ...]


class _Column(NamedTuple):
    """The ids of one column: the last dimension of a tensor at a number."""

    number: int


class IdPlace(NamedTuple):
    """Where a batch has the ids of one look-up."""

    group: int  # of tables
    parts: tuple[tuple[int, Path], ...]  # one after another, each of a table of the group
    training: bool  # whether gradients of the rows are pushed

    def ids(self, batch: Any) -> tuple[Int32s, Int64s] | None:
        """Return the table numbers and ids of the look-up in a batch, (n,) each; None if it does not have them."""
        pieces = []
        for table, path in self.parts:
            ids = _at(path, batch)
            if ids is None or (len(ids) and ids.min() < 0):
                return None
            pieces.append((np.full(len(ids), table, np.int32), ids))
        tables, ids = (np.concatenate(each) for each in zip(*pieces, strict=True))
        return tables, ids


class IdPlaces:
    """Where a model's batches have the ids of its look-ups, in the order in which a forward pass makes them.

    A look-up's ids are searched for in the batch of that pass: in tuples, lists, dicts, tensors, columns of tensors.
    A place that is found is used for later batches until one lacks the ids there; then it is searched for anew.

    Attributes:
        known: the place of each look-up; None if unknown.
    """

    def __init__(self) -> None:
        self.known: list[IdPlace | None] = []
        self._tries: list[int] = []

    def any(self) -> bool:
        """Return whether some place is known."""
        return any(place is not None for place in self.known)

    def is_sought(self, at: int) -> bool:
        """Return whether the place of a look-up is to be found."""
        return at >= len(self.known) or (self.known[at] is None and self._tries[at] < _MOST_TRIES)

    def is_given_up(self) -> bool:
        """Return whether the search for the place of some look-up was given up."""
        return any(
            place is None and tries >= _MOST_TRIES
            for place, tries in zip(self.known, self._tries, strict=True)
        )

    def find(self, at: int, group: int, tables: Int32s, ids: Int64s, batch: Any) -> None:
        """Search a batch for the ids (n,) of a look-up of it."""
        while len(self.known) <= at:
            self.known.append(None)
            self._tries.append(0)
        self._tries[at] += 1
        parts = _parts(tables, ids, batch)
        self.known[at] = None if parts is None else IdPlace(group, parts, True)

    def note(self, at: int, *, training: bool, was_right: bool) -> None:
        """Note whether gradients of a look-up's rows are pushed, and whether its known place was right."""
        if at < len(self.known) and (place := self.known[at]) is not None:
            self.known[at] = place._replace(training=training) if was_right else None

    def end(self, lookups: int) -> None:
        """Note how many look-ups a forward pass has made: later ones are none."""
        del self.known[lookups:], self._tries[lookups:]


def _parts(tables: Int32s, ids: Int64s, batch: Any) -> tuple[tuple[int, Path], ...] | None:
    """Return the parts of a batch of which ids are joined; None if they are not, an empty result for no ids."""
    if not len(ids):
        return None
    leaves = [(path, leaf) for path, leaf in _leaves(batch, ()) if len(leaf)]
    parts: list[tuple[int, Path]] = []
    begin = 0
    while begin < len(ids):
        for path, leaf in leaves:
            end = begin + len(leaf)
            fits = end <= len(ids) and leaf[0] == ids[begin] and leaf[-1] == ids[end - 1]
            if fits and tables[begin] == tables[end - 1] and np.array_equal(leaf, ids[begin:end]):
                parts.append((int(tables[begin]), path))
                begin = end
                break
        else:
            return None
    return tuple(parts)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Int64s]]:
    """Yield the integers in a batch, (n,) each, with their paths, whole tensors before their columns."""
    left = _MOST_LEAVES
    for leaf in _each(value, path):
        yield leaf
        left -= 1
        if not left:
            return


def _each(value: Any, path: Path) -> Iterator[tuple[Path, Int64s]]:
    ids = _flat(value)
    if ids is not None:
        yield path, ids
        if (columns := _columns(value)) is not None and columns <= _MOST_COLUMNS:
            for number in range(columns):
                if (column := _flat(value, number)) is not None:
                    yield (*path, _Column(number)), column
        return
    for key, part in _inside(value):
        yield from _each(part, (*path, key))


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a container with their keys."""
    # first, since asking for the protocol below takes 100 microseconds
    if isinstance(value, tuple | list):
        yield from enumerate(value)
    elif isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, KeyedJagged):
        yield from by_feature(value)[0].items()


def _columns(value: Any) -> int | None:
    """Return the size of the last dimension of a tensor or array of several; None for others."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return None
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 1:
        return int(value.shape[-1])
    return None


def _flat(value: Any, column: int | None = None) -> Int64s | None:
    """Return the integers of a tensor, array or list of lists, or of one column of it, as (n,); None for others."""
    array: npt.NDArray[Any]
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
            return None
        array = (value.values() if value.is_nested else value).detach().cpu().numpy()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        array = value
    elif _is_rows(value):
        array = np.array([one for row in value for one in row], np.int64)
    else:
        return None
    flat: Int64s = (array if column is None else array[..., column]).reshape(-1)
    return flat.astype(np.int64, copy=False)


def _is_rows(value: Any) -> bool:
    """Return whether a value is a list of lists of integers, of which the first ones are looked at."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(row, list) for row in value)
        and all(isinstance(one, int) for row in value[:1] for one in row)
    )


def _at(path: Path, batch: Any) -> Int64s | None:
    """Return the ids at a path, (n,); None if the batch has none there."""
    for key in path:
        if isinstance(key, _Column):
            columns = _columns(batch)
            return None if columns is None or key.number >= columns else _flat(batch, key.number)
        batch = dict(_inside(batch)).get(key)
    return _flat(batch)


#: What a batch is searched in for ids: the batch, or what a user's function makes of it.
Searched = Callable[[], Any]
