"""A fingerprint of training data: what arrays they have, and a hash of a few rows of each.

It tells other data of the same length from those with which a checkpoint was written. Nothing is
asked of a data set but the arrays, tensors and lists that it has as attributes: its samples may cost
much to read, differ each time they are read, or not yet be there.
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

_ROWS = 32  # of each array, evenly spread
_ELEMENTS = 1024  # of each row
_ARRAYS = 64  # and as many data sets within data sets


def fingerprint(source: Any) -> Fingerprint:
    """Return the fingerprint of a source's data; it takes some milliseconds, however many they are."""
    # source: its attribute `contents` has the arrays or the data set; without one the fingerprint is empty, as that of
    # data without arrays.
    found: Fingerprint = {}
    try:
        for name, array in islice(_arrays(getattr(source, "contents", None), "", set()), _ARRAYS):
            found[name] = _of_array(array)
    except Exception as error:  # noqa: BLE001 - data sets and arrays of any library
        log.debug("the fingerprint of the data ends here: %s", error)
    return found


def differences(theirs: Mapping[str, Sequence[Any]], mine: Fingerprint) -> list[str]:
    """Return in words how data differ from those of another fingerprint, as JSON has it; none without arrays."""
    if not theirs or not mine:
        return []
    found = []
    for name in sorted(theirs.keys() | mine.keys()):
        if name not in mine or name not in theirs:
            found.append(f"{name} is {'gone' if name in theirs else 'new'}")
            continue
        (dtype, shape, rows), (own_dtype, own_shape, own_rows) = theirs[name], mine[name]
        if (dtype, tuple(shape)) != (own_dtype, own_shape):
            was, now = f"{dtype} of shape {tuple(shape)}", f"{own_dtype} of shape {own_shape}"
            found.append(f"{name} was {was} and is {now}")
        elif rows != own_rows:
            found.append(f"{name} has other values")
    return found


def _arrays(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, array) of what data are made of; `name`: of the value, "" for the whole."""
    # seen: the ids of data sets that were looked at; at most `_ARRAYS` of them are.
    if isinstance(value, (np.ndarray, torch.Tensor)):
        yield name or "the array", value
    elif isinstance(value, tuple) and any(isinstance(v, (np.ndarray, torch.Tensor)) for v in value):
        for index, part in enumerate(value):
            yield from _arrays(part, f"{name or 'column'} {index}", seen)
    elif isinstance(value, (list, tuple)):
        if (parts := _some_samples(value)) is not None:
            yield name or "the list", _Samples(len(value), parts)
    elif not isinstance(value, type) and id(value) not in seen and len(seen) < _ARRAYS:
        seen.add(id(value))
        for key, part in getattr(value, "__dict__", {}).items():
            yield from _arrays(part, f"{name}.{key}" if name else key, seen)


class _Samples(NamedTuple):
    """A list of samples: its length, and some of them as bytes."""

    length: int
    parts: bytes


def _some_samples(samples: Sequence[Any]) -> bytes | None:
    """Return some samples of a list as bytes; None if they are not made of numbers, texts, arrays."""
    leaves = [list(islice(_leaves(samples[index]), _ELEMENTS)) for index in _spread(len(samples))]
    if not leaves or any(None in each for each in leaves):
        return None
    return b";".join(b",".join(leaf or b"" for leaf in each) for each in leaves)


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


def _of_array(array: Any) -> tuple[str, tuple[int, ...], str]:
    """Return the dtype, the shape and a hash of some rows of an array, or of samples."""
    if isinstance(array, _Samples):
        return "list", (array.length,), hashlib.sha256(array.parts).hexdigest()[:16]
    digest = hashlib.sha256()
    for row in (array[i] for i in _spread(len(array))) if array.ndim else (array,):
        digest.update(_row_bytes(row))
    dtype = str(array.dtype).removeprefix("torch.")
    return dtype, tuple(map(int, array.shape)), digest.hexdigest()[:16]


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
