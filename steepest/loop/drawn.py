"""Training data of loaders with a sampler of the user's: what it draws for an epoch is dealt out, each draw once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from steepest.core.data.protocol import DRAWN, Blocks, Indices
from steepest.core.data.sampler import step_seed
from steepest.core.data.sources import DatasetSource
from steepest.core.engine.generators import restore, seed_everything, states
from steepest.errors import ConfigurationError

#: A replica's number in seeds, which no replica has.
DRAWS = (1 << 32) - 1
_KEPT = 2  # epochs of which draws are kept: loaders read ahead into the next one


class Drawn(NamedTuple):
    """A batch, and the number of samples in it."""

    batch: Any
    samples: int


class _Keys(list[Any]):
    """What a data set is asked for."""

    def tolist(self) -> list[Any]:
        return list(self)


class DrawnSource:
    """The draws of a sampler, or the batches of a batch sampler, as a source of numbered units.

    In each epoch the sampler is gone through once, with all generators seeded by the job's seed and the epoch: those of
    Python, NumPy and torch, and those that it has as attributes. So every worker knows all draws; unit n of an epoch is
    its n-th draw. `open` yields `Drawn`.

    Args:
        loader: with the sampler.
        seed: of the job.

    Raises:
        ConfigurationError: the sampler has no length, or divides samples itself.
    """

    blocks: Blocks = DRAWN

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.of_batches = loader.batch_size is None
        self._sampler = cast(Any, loader.batch_sampler if self.of_batches else loader.sampler)
        self._seed = seed
        self._inner = DatasetSource(loader.dataset, loader)
        self.drop_last, self.contents = self._inner.drop_last, self._inner.contents
        self._draws: dict[int, list[Any]] = {}
        name = type(self._sampler).__name__
        if isinstance(self._sampler, DistributedSampler):
            raise ConfigurationError(
                f"the DataLoader has a {name}, which divides samples by itself: leave it out; steepest.prepare() deals "
                "them out, to any number of workers (shuffle=True shuffles them)"
            )
        try:
            self.size: int | None = len(self._sampler)
        except TypeError:
            raise ConfigurationError(
                f"the DataLoader has a sampler of its own ({name}) without a length, so that epochs cannot be counted: "
                "give it __len__, the number of its draws in an epoch"
            ) from None
        if not self.size:
            raise ConfigurationError(f"the DataLoader's sampler ({name}) draws nothing")

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Drawn]:
        """Yield a batch for each share of units, which are numbered on from epoch to epoch."""
        counts: deque[int] = deque()

        def chosen() -> Iterator[Any]:
            for share in shares:
                keys = _Keys(key for unit in share.tolist() for key in self._keys_of(unit))
                counts.append(len(keys))
                yield keys

        for batch in self._inner.open(chosen(), prefetch):
            yield Drawn(batch, counts.popleft())

    def _keys_of(self, unit: int) -> list[Any]:
        """Return what the data set is asked for in a unit."""
        assert self.size is not None
        epoch, number = divmod(unit, self.size)
        if epoch not in self._draws:
            if len(self._draws) >= _KEPT:
                del self._draws[next(iter(self._draws))]
            self._draws[epoch] = self._draw(epoch)
        drawn = self._draws[epoch][number]
        return list(drawn) if self.of_batches else [drawn]

    def _draw(self, epoch: int) -> list[Any]:
        """Return all draws of an epoch; generators stay as they are."""
        sampler, before = self._sampler, states()
        seed = step_seed(self._seed, epoch, DRAWS)
        try:
            seed_everything(seed)
            _seed_own(sampler, seed, set())
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            assert self.size is not None
            drawn = list(islice(sampler, self.size + 1))
        finally:
            restore(before)
        if len(drawn) != self.size:
            more = "more" if len(drawn) > self.size else f"only {len(drawn)}"
            raise ConfigurationError(
                f"the DataLoader's sampler ({type(sampler).__name__}) says that it has {self.size} draws in an epoch, "
                f"and has {more} in epoch {epoch}: let it draw as many in each, or count all epochs as one"
            )
        return drawn


def has_own_sampler(loader: DataLoader[Any]) -> bool:
    """Return whether a loader has a sampler, or a batch sampler, of which the library does not know the draws."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    if loader.batch_size is None:
        return loader.batch_sampler is not None
    sampler = loader.sampler
    if type(sampler) is RandomSampler:
        return sampler.replacement or sampler.num_samples != len(cast(Any, loader.dataset))
    return type(sampler) is not SequentialSampler


def _seed_own(value: Any, seed: int, seen: set[int]) -> None:
    """Seed the generators that a sampler, and those in it, have as attributes."""
    if id(value) in seen:
        return
    seen.add(id(value))
    for name, own in list(getattr(value, "__dict__", {}).items()):
        if isinstance(own, torch.Generator):
            own.manual_seed(seed)
        elif isinstance(own, np.random.Generator):
            setattr(value, name, np.random.default_rng(seed))
        elif isinstance(own, np.random.RandomState):
            own.seed(seed & 0xFFFFFFFF)
        elif isinstance(own, random.Random):
            own.seed(seed)
        elif isinstance(own, Sampler):
            _seed_own(own, seed, seen)
