"""Ids of texts: hashes of 63 bits, the same in every process and program."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from steepest.errors import ConfigurationError
from steepest.tables.rows.kernels import Int64s

_KEPT = 1 << 18  # texts whose ids a process remembers: 40 MB or so


def text_ids(texts: Any, hash: str = "blake2b") -> Int64s:
    """Return the ids that a `Table(hash=)` has for texts: int64 from 0 to 2^63 - 1.

    Args:
        texts: an array or nested lists of them, of any shape.
        hash: "blake2b": the first 63 bits of BLAKE2b with a digest of 8 bytes, of the UTF-8.

    Returns:
        An array of the texts' shape.

    Raises:
        ConfigurationError: an unknown hash, or something that is no text.

    Example:
        >>> text_ids(["anna", "bob"])
        array([7503624139547223366, 4213563397267214921])
    """
    hashed = HASHES.get(hash)
    if hashed is None:
        raise ConfigurationError(f"hash={hash!r:.80}: give one of {', '.join(map(repr, HASHES))}")
    array = np.asarray(texts)
    if array.size == 0:
        return np.empty(array.shape, np.int64)
    flat = array.reshape(-1).tolist()
    for each in flat:
        if not isinstance(each, str):
            raise ConfigurationError(
                f"{each!r:.80} is no text: give an array, or lists of equal lengths, of str"
            )
    return np.array([hashed(each) for each in flat], np.int64).reshape(array.shape)


@lru_cache(_KEPT)
def _blake2b(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


#: By the names that checkpoints have.
HASHES: dict[str, Callable[[str], int]] = {"blake2b": _blake2b}
