"""A fingerprint of training data: their arrays, and hashes of a few rows of each.

It distinguishes other data of the same length from those of a checkpoint, and one worker's data from another's in
another order. Only arrays, tensors and lists that a data set has as attributes are read: its samples may be slow to
read, differ each time, or not exist yet. If arrays of two workers differ, samples are read, twice: an array that a data
set fills while samples are read does not show their order.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

log = logging.getLogger(__name__)

#: By name of an array: its dtype, its shape, and a hash of some rows.
Fingerprint = dict[str, tuple[str, tuple[int, ...], str]]

#: By name of an array: a short hash of each of some rows, by the row's number.
RowHashes = dict[str, dict[int, str]]

_ROWS = 32  # of each array, evenly spread
_ELEMENTS = 1024  # of each row
_ARRAYS = 64  # and as many data sets within data sets


def fingerprint(source: Any) -> Fingerprint:
    """Return the fingerprint of a source's data; it takes some milliseconds for data of any size."""
    return described(source)[0]


def described(source: Any) -> tuple[Fingerprint, RowHashes]:
    """Return the fingerprint of a source's data, and the hashes of the rows that it is made of.

    Args:
        source: its attribute `contents` has the arrays or the data set; without it, or without arrays,
            both results are empty.
    """
    fingerprint: Fingerprint = {}
    rows: RowHashes = {}
    try:
        for name, array in islice(_arrays(getattr(source, "contents", None), "", set()), _ARRAYS):
            each = array if isinstance(array, _Samples) else _rows_of(array)
            fingerprint[name] = each.dtype, each.shape, _hash(each.joint.join(each.rows.values()))
            rows[name] = {number: _hash(row)[:8] for number, row in each.rows.items()}
    except Exception as error:  # noqa: BLE001 - data sets and arrays of any library
        log.debug("the fingerprint of the data ends here: %s", error)
    return fingerprint, rows


def unlike_rows(one: RowHashes, other: RowHashes) -> dict[str, list[int]]:
    """Return the compared rows that differ, by array; arrays without any, or in one of the data only, are left out.

    Example:
        >>> unlike_rows({"files": {0: "a", 9: "b"}}, {"files": {0: "a", 9: "c"}})
        {'files': [9]}
    """
    unlike = {
        name: [
            number for number, row in rows.items() if other.get(name, {}).get(number, row) != row
        ]
        for name, rows in one.items()
    }
    return {name: numbers for name, numbers in unlike.items() if numbers}


def sample_hashes(source: Any, length: int, numbers: Sequence[int]) -> list[str] | None:
    """Read some samples of a source's data, and return their hashes.

    None if the data have another length, or a sample cannot be read, does not consist of numbers, texts and arrays, or
    differs when it is read again.
    """
    contents: Any = getattr(source, "contents", None)
    hashes = []
    try:
        if len(contents) != length:
            return None
        for number in numbers:
            first, again = (_samples(1, {0: contents[number]}) for _ in range(2))
            if first is None or first != again:
                return None
            hashes.append(_hash(first.rows[0]))
    except Exception as error:  # noqa: BLE001 - data sets of any library
        log.debug("samples cannot be compared: %s", error)
        return None
    return hashes


def differences(theirs: Mapping[str, Sequence[Any]], mine: Fingerprint) -> list[str]:
    """Return in words how data differ from those of another fingerprint, read from JSON; empty without arrays."""
    if not theirs or not mine:
        return []
    words = []
    for name in sorted(theirs.keys() | mine.keys()):
        if name not in mine or name not in theirs:
            words.append(f"{name} is {'gone' if name in theirs else 'new'}")
            continue
        (dtype, shape, rows), (own_dtype, own_shape, own_rows) = theirs[name], mine[name]
        if (dtype, tuple(shape)) != (own_dtype, own_shape):
            was, now = f"{dtype} of shape {tuple(shape)}", f"{own_dtype} of shape {own_shape}"
            words.append(f"{name} was {was} and is {now}")
        elif rows != own_rows:
            words.append(f"{name} has other values")
    return words


def _arrays(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays that data are made of, each with its name.

    Args:
        value: the data, or a part of them.
        name: of the part, "" for the whole.
        seen: ids of the data sets that were visited, at most `_ARRAYS`.
    """
    if isinstance(value, (np.ndarray, torch.Tensor)):
        yield name or "the array", value
    elif isinstance(value, tuple) and any(isinstance(v, (np.ndarray, torch.Tensor)) for v in value):
        for index, part in enumerate(value):
            yield from _arrays(part, f"{name or 'column'} {index}", seen)
    elif isinstance(value, (list, tuple)):
        if (samples := _some_samples(value)) is not None:
            yield name or "the list", samples
        else:  # data sets, perhaps
            for index, part in enumerate(islice(value, _ARRAYS)):
                yield from _arrays(part, f"{name} {index}".strip(), seen)
    elif hasattr(value, "iloc") and hasattr(value, "to_numpy"):  # a table of pandas
        rows = {i: np.asarray(value.iloc[i]).reshape(-1).tolist() for i in _spread(len(value))}
        if (samples := _samples(len(value), rows)) is not None:
            yield name or "the table", samples
    elif not isinstance(value, type) and id(value) not in seen and len(seen) < _ARRAYS:
        seen.add(id(value))
        for key, part in getattr(value, "__dict__", {}).items():
            yield from _arrays(part, f"{name}.{key}" if name else key, seen)


class _Samples(NamedTuple):
    """Some rows of an array, or samples of a list, as bytes by their numbers."""

    dtype: str
    shape: tuple[int, ...]
    rows: dict[int, bytes]
    joint: bytes  # between two of them


def _some_samples(samples: Sequence[Any]) -> _Samples | None:
    """Return some samples of a list; None if they are not made of numbers, texts, arrays."""
    return _samples(len(samples), {index: samples[index] for index in _spread(len(samples))})


def _samples(length: int, some: Mapping[int, Any]) -> _Samples | None:
    leaves = {index: list(islice(_leaves(each), _ELEMENTS)) for index, each in some.items()}
    if not leaves or any(None in each for each in leaves.values()):
        return None
    rows = {index: b",".join(leaf or b"" for leaf in each) for index, each in leaves.items()}
    return _Samples("list", (length,), rows, b";")


def _leaves(value: Any) -> Iterator[bytes | None]:
    """Yield the parts of a sample as bytes, None for one that is no number, text or array."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        yield _row_bytes(value)
    elif isinstance(value, str):
        yield value.rpartition("/")[2].encode()  # files may lie in another directory by now
    elif isinstance(value, (bool, int, float, bytes, np.generic, type(None))):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield None


def _rows_of(array: Any) -> _Samples:
    """Return some rows of an array."""
    some = {i: array[i] for i in _spread(len(array))} if array.ndim else {0: array}
    rows = {index: _row_bytes(row) for index, row in some.items()}
    dtype = str(array.dtype).removeprefix("torch.")
    return _Samples(dtype, tuple(map(int, array.shape)), rows, b"")


def _hash(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()[:16]


def _row_bytes(row: Any) -> bytes:
    """Return the first elements of a row of an array as bytes."""
    if isinstance(row, torch.Tensor):
        flat = row.detach().reshape(-1)[:_ELEMENTS].cpu().contiguous()
        return flat.view(torch.uint8).numpy().tobytes()
    flat_row = np.asarray(row).reshape(-1)[:_ELEMENTS]
    if flat_row.dtype.hasobject:  # whose bytes are addresses
        return repr([value for value in flat_row if isinstance(value, (str, int, float))]).encode()
    return flat_row.tobytes()


def _spread(length: int) -> list[int]:
    """Return some indices below a length, evenly spread, with the first and the last."""
    count = min(length, _ROWS)
    return [i * (length - 1) // max(count - 1, 1) for i in range(count)]
