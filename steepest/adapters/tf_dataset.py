"""A `tf.data.Dataset` as a source: every element in exactly one step per epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from steepest.core.data.protocol import Blocks, Indices
from steepest.errors import ConfigurationError

_READ = 1024  # elements that are read together where they are not shuffled
_PASSED = ("prefetch", "repeat", "options")


class TensorFlowDataset:
    """A `tf.data.Dataset` of known length, divided exactly among workers.

    At its end, ``.shuffle``, ``.batch``, ``.repeat`` and ``.prefetch`` in any order are taken as
    settings, and done by the library: it shuffles within blocks of the buffer's size, anew in each
    epoch, divides batches among workers, and repeats as long as it trains. What stands before them
    gives the samples, which must be the same ones in the same order in each process and pass. Each
    worker reads all of it once per epoch, in order, and keeps the last two blocks; after a restore,
    and for samples that another worker returned, it reads from the beginning to there (``.skip``).

    Args:
        dataset: of tensors; where TensorFlow does not know its length,
            ``.apply(tf.data.experimental.assert_cardinality(n))`` tells it.

    Attributes:
        size: number of elements.
        blocks: how many are shuffled together; 1 where the data set is not shuffled.
        batch_size: that of ``.batch``, or None.
        drop_last: whether it was called with ``drop_remainder=True``.

    Raises:
        ConfigurationError: a length that is unknown, infinite or 0; a shuffle without seed, a map
            that is not deterministic or a batch before the end; ragged or sparse elements.
    """

    def __init__(self, dataset: Any) -> None:
        self.batch_size: int | None = None
        self.drop_last = False
        buffer = 1
        while True:
            kind = _kind(dataset)
            if kind in ("batch", "parallelbatch") and self.batch_size is None:
                self.batch_size = int(dataset._batch_size)
                self.drop_last = bool(dataset._drop_remainder)
            elif kind == "shuffle":
                buffer = max(buffer, int(dataset._buffer_size))
            elif kind not in _PASSED:
                break
            dataset = dataset._input_dataset
        _check(dataset)
        self._dataset = dataset
        self.size: int | None = _length(dataset)
        self.blocks: Blocks = min(buffer, self.size)
        self._read_size = self.blocks if self.blocks > 1 else _READ
        self._kept: dict[int, list[Any]] = {}
        self._reader: tuple[int, Iterator[Any]] | None = None  # number of the next block

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Yield the elements of each share, stacked as arrays in the data set's structure."""
        import tensorflow as tf

        for share in shares:
            blocks = share // self._read_size
            runs = np.split(np.arange(len(share)), np.flatnonzero(np.diff(blocks)) + 1)
            parts = [
                [leaf[share[run] % self._read_size] for leaf in self._block(int(blocks[run[0]]))]
                for run in runs
            ]
            leaves = [np.concatenate(part) for part in zip(*parts, strict=True)]
            yield tf.nest.pack_sequence_as(self._dataset.element_spec, leaves)

    def _block(self, number: int) -> list[Any]:
        """Return the leaves of a block of elements, each an array; the last two are kept.

        Raises:
            ConfigurationError: the data set ends before the block.
        """
        import tensorflow as tf

        if number not in self._kept:
            at, blocks = self._reader or (-1, iter(()))
            self._reader = None  # an iterator that raises is exhausted
            begin = number * self._read_size
            if at != number:
                rest = self._dataset.skip(begin) if begin else self._dataset
                blocks = iter(rest.batch(self._read_size))
            block = next(blocks, None)
            leaves = [leaf.numpy() for leaf in tf.nest.flatten(block)] if block is not None else []
            assert self.size is not None
            wanted = min(self._read_size, self.size - begin)
            if not leaves or len(leaves[0]) < wanted:
                raise ConfigurationError(
                    f"the data set ended before element {begin + wanted}, its cardinality is "
                    f"{self.size}: assert_cardinality() must tell how many it has"
                )
            if len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._reader = (number + 1, blocks)
            self._kept[number] = leaves
        return self._kept[number]


def _kind(dataset: Any) -> str:
    """Return the name of a transformation, such as "batch"."""
    return type(dataset).__name__.strip("_").removesuffix("V2").removesuffix("Dataset").lower()


def _length(dataset: Any) -> int:
    """Return the number of a data set's elements; ConfigurationError: it is unknown, infinite or 0."""
    length = int(dataset.cardinality())
    if length == -2:
        raise ConfigurationError(
            "TensorFlow does not know the data set's length, without which samples cannot be "
            "divided: tell it with .apply(tf.data.experimental.assert_cardinality(n)) before "
            ".shuffle and .batch"
        )
    if length < 1:
        what = "has no elements" if length == 0 else "is infinite"
        raise ConfigurationError(
            f"the data set {what}: give one pass over the samples, epochs are counted by fit()"
        )
    return length


def _check(dataset: Any) -> None:
    """Check that a data set gives the same samples in the same order in each process and pass.

    Raises:
        ConfigurationError: it does not, or its elements are batches, ragged or sparse.
    """
    import tensorflow as tf

    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            raise ConfigurationError(
                f"the data set has elements of {type(spec).__name__}: give dense tensors of one "
                "shape, padded in .map() if need be"
            )
    todo = [dataset]
    while todo:
        one = todo.pop()
        kind = _kind(one)
        if "batch" in kind and "unbatch" not in kind:
            raise ConfigurationError(
                f"a .{kind.removeprefix('parallel')}() stands before the data set's end, so that "
                "its elements are batches: call .batch() after .map(), or pad in .map() instead of "
                ".padded_batch()"
            )
        fixed = getattr(one, "_reshuffle_each_iteration", None) is False
        if kind == "shuffle" and not (fixed and _seeded(one)):
            raise ConfigurationError(
                "a .shuffle() stands before the data set's end, and gives another order in each "
                "process: call it last, or with seed= and reshuffle_each_iteration=False"
            )
        if str(getattr(one, "_deterministic", None)).lower() == "false":
            raise ConfigurationError(
                f"a .{kind.removeprefix('parallel')}(deterministic=False) gives another order in "
                "each pass: leave deterministic out"
            )
        if kind not in ("unbatch", "flatmap"):
            todo += one._inputs()


def _seeded(shuffle: Any) -> bool:
    """Return whether a shuffle was given a seed."""
    return bool(int(shuffle._seed) or int(shuffle._seed2))
