"""Clicks in any number: ids by a power law, numbers, and labels drawn from a hidden model.

    python -m benchmarks.clicks        # samples per second, distinct ids, the greatest possible AUC

A sample is a pure function of (seed, its number): any process makes any part of the data, in any
order, and no file is shared. An id is 63 bits of a hash, so no vocabulary is known in advance. Of
each feature the id of rank k or higher has the probability k^(-1 / POWER): a power law of exponent
1 + 1 / POWER, 1.2 as in `benchmarks.embedding`. Ids beyond rank 2^53, 1 in 1,550, occur only once.

In the hidden model each id has an effect, the effects of features 0 and 1, 2 and 3, ... also
multiply, and each number has a weight. A model that has learned all of it orders samples by their
`logits`. No other order has a greater AUC but by luck: `auc(logits, labels)` is the upper bound.

Ids and numbers are made of integers, products and one division: the same bits on every machine.
So are labels, but where a uniform number is within the last bit of the C library's exponential
function.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from steepest.tables.rows.hashing import GAMMA, Distinct, mix, salt_of
from steepest.tables.rows.kernels import Floats, Int64s, inlined, kernel, read_only

FEATURES, NUMBERS, POWER = 26, 13, 5
EFFECT, PRODUCT, WEIGHT, BIAS = 0.2, 0.15, 0.2, -1.5  # of the hidden model's logits
_1, _11, _16 = np.uint64(1), np.uint64(11), np.uint64(16)
_LOW = np.uint64(0xFFFF)
_TOP = np.uint64(1 << 63)
_EFFECTS, _WEIGHTS = np.uint64(0xA0761D6478BD642F), np.uint64(0xE7037ED1A0B428DB)
_LARGEST = 2.0**53


class Samples(NamedTuple):
    """n samples.

    Attributes:
        ids: (n, FEATURES) int64, not negative; of different features they are different.
        numbers: (n, NUMBERS) float32, of mean 0 and deviation 1.
        labels: (n,) float32, 0 or 1.
        logits: (n,) float64 of the hidden model; not to be trained with.
    """

    ids: Int64s
    numbers: Floats
    labels: Floats
    logits: Floats


class Clicks:
    """Clicks from a seed, also as `data=` of `TorchModel`: batches are ids, numbers, labels.

    Args:
        size: samples in an epoch.
        seed: of ids, numbers, labels, and of the hidden model.
        begin: the number of the epoch's first sample: test data begins where training data ends.
    """

    def __init__(self, size: int, seed: int = 0, begin: int = 0) -> None:
        self.size: int | None = size
        self._begin = begin
        self._salts = np.array([salt_of("samples", seed), salt_of("ids", seed)], np.uint64)

    def samples(self, begin: int, end: int) -> Samples:
        """Return the samples numbered from `begin` to `end` - 1, whatever this object's are."""
        return self._samples(np.arange(begin, end, dtype=np.int64))

    def open(
        self, shares: Iterable[Int64s], prefetch: bool = True
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the ids, numbers and labels of each share's samples."""
        for share in shares:
            ids, numbers, labels, _ = self._samples(self._begin + share)
            yield torch.from_numpy(ids), torch.from_numpy(numbers), torch.from_numpy(labels)

    def id_of(self, feature: int, rank: int) -> int:
        """Return the id of a rank below 2^53; rank 1 is the most frequent."""
        return int(_id(np.uint64(rank), np.uint64(feature), self._salts[1]))

    def _samples(self, which: Int64s) -> Samples:
        count = len(which)
        made = Samples(
            np.empty((count, FEATURES), np.int64),
            np.empty((count, NUMBERS), np.float32),
            np.empty(count, np.float32),
            np.empty(count, np.float64),
        )
        _fill(read_only(which, np.int64), self._salts[0], self._salts[1], *made)
        return made


@inlined
def _unit(value: np.uint64) -> float:
    """Return a number between 0 and 1, neither included, for 64 random bits."""
    return (np.float64(value >> _11) + 0.5) * 2.0**-53


@inlined
def _bell(value: np.uint64) -> float:
    """Return the sum of four uniform numbers, of mean 0 and deviation 1, for 64 random bits."""
    total = 0.0
    for _ in range(4):
        total += np.float64(value & _LOW)
        value >>= _16
    return (total * (1.0 / 65535.0) - 2.0) * 1.7320508075688772


@inlined
def _id(rank: np.uint64, feature: np.uint64, salt: np.uint64) -> np.int64:
    return np.int64(mix(rank ^ mix(salt + feature * GAMMA)) >> _1)


@kernel
def _fill(
    which: Int64s,
    of_samples: np.uint64,
    of_ids: np.uint64,
    ids: Int64s,
    numbers: Floats,
    labels: Floats,
    logits: Floats,
) -> None:
    weights = np.empty(numbers.shape[1])
    for column in range(len(weights)):
        weights[column] = WEIGHT * _bell(mix(of_ids ^ (_WEIGHTS + np.uint64(column))))
    for at in range(len(which)):
        counter = mix(np.uint64(which[at]) ^ of_samples)
        logit, before = BIAS, 0.0
        for feature in range(ids.shape[1]):
            counter += GAMMA
            drawn = mix(counter)
            uniform = _unit(drawn)
            power = uniform
            for _ in range(POWER - 1):
                power *= uniform
            rank = 1.0 / power
            known = np.uint64(rank) if rank < _LARGEST else drawn | _TOP
            ids[at, feature] = _id(known, np.uint64(feature), of_ids)
            effect = _bell(mix(np.uint64(ids[at, feature]) ^ _EFFECTS))
            logit += EFFECT * effect
            if feature % 2 == 1:
                logit += PRODUCT * before * effect
            before = effect
        for column in range(numbers.shape[1]):
            counter += GAMMA
            number = _bell(mix(counter))
            numbers[at, column] = number
            logit += weights[column] * number
        counter += GAMMA
        logits[at] = logit
        labels[at] = 1.0 if _unit(mix(counter)) < 1.0 / (1.0 + np.exp(-logit)) else 0.0


def auc(scores: Floats, labels: Floats) -> float:
    """Return the probability that a sample of label 1 has a higher score than one of label 0.

    Ties count half.
    """
    values, ranks = np.unique(scores, return_inverse=True)
    positive = np.bincount(ranks, labels, len(values))
    negative = np.bincount(ranks, 1 - labels, len(values))
    below = np.cumsum(negative) - negative / 2
    return float((positive * below).sum() / positive.sum() / negative.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=4096)
    count, batch = (options := parser.parse_args()).samples, options.batch
    clicks = Clicks(count)
    clicks.samples(0, 1)  # compiles
    begin = time.perf_counter()
    parts = [clicks.samples(at, min(at + batch, count)) for at in range(0, count, batch)]
    seconds = time.perf_counter() - begin
    labels, logits = (np.concatenate([part[at] for part in parts]) for at in (2, 3))
    first = np.concatenate([part.ids[:, 0] for part in parts])
    distinct = len(Distinct(np.zeros(count, np.int32), first).ids)
    print(
        f"{count:,} samples, {count / seconds:,.0f} a second in batches of {batch:,}; "
        f"{distinct:,} distinct ids of feature 0; {labels.mean():.1%} clicks; "
        f"the greatest AUC {auc(logits, labels):.4f}"
    )


if __name__ == "__main__":
    main()
