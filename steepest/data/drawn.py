"""Training data of loaders with a user's sampler: its draws for an epoch are dealt out, each once."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
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

from steepest.core.data.protocol import DRAWN, Blocks, Indices, Source
from steepest.core.data.sampler import step_seed
from steepest.core.data.sources import DatasetSource, as_source
from steepest.data.passes import DataPass, runs
from steepest.errors import ConfigurationError

#: A replica's number in seeds, which no replica has.
DRAWS = (1 << 32) - 1
_KEPT = 2  # epochs of which draws are kept: loaders read ahead into the next one
_AT_A_TIME = 1 << 16  # draws


class Drawn(NamedTuple):
    """A batch, and the number of samples in it."""

    batch: Any
    samples: int


class DrawnSource:
    """The draws of a sampler, or the batches of a batch sampler, as a source of numbered units.

    In each epoch the sampler is gone through once, with all generators seeded by the job's seed and the epoch:
    those of Python, NumPy and torch, and those that it has as attributes. So every worker knows all draws; unit n
    of an epoch is its n-th draw. `open` yields `Drawn`. Of an epoch that has very many draws, the next ones are
    drawn when they are needed: ``RandomSampler(data, replacement=True, num_samples=10**10)`` is how some loops have
    one epoch for ever.

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
        self._is_told = False  # of epochs, by `enter`; else when draws begin
        self._inner = DatasetSource(loader.dataset, loader)
        self.drop_last, self.contents = self._inner.drop_last, self._inner.contents
        self._epochs: dict[int, DataPass] = {}
        name = type(self._sampler).__name__
        if isinstance(self._sampler, DistributedSampler):
            raise ConfigurationError(
                f"the DataLoader has a {name}, which divides samples by itself: leave it out; steepest deals them "
                "out, to any number of workers (shuffle=True shuffles them)"
            )
        try:
            self.size: int | None = len(self._sampler)
        except TypeError:
            raise ConfigurationError(
                f"the DataLoader has a sampler of its own ({name}) without a length, so that epochs cannot be counted: "
                "give it __len__, the number of its draws in an epoch"
            ) from None
        if not self.size:
            raise ConfigurationError(
                f"the DataLoader's sampler ({name}) draws nothing: let it draw a sample at least"
            )

    def enter(self, epoch: int) -> None:
        """Call the sampler's `set_epoch`, if it has one, with the epoch that the loop enters."""
        self._is_told = True
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Drawn]:
        """Yield a batch for each share of units, which are numbered on from epoch to epoch."""
        counts: deque[int] = deque()

        def chosen() -> Iterator[list[Any]]:
            for share in shares:
                drawn = [one for run in runs(share, self.size or 1) for one in self._draws(*run)]
                if self.of_batches:
                    drawn = [key for batch in drawn for key in batch]
                counts.append(len(drawn))
                yield drawn

        for batch in self._inner.batches(chosen(), prefetch):
            yield Drawn(batch, counts.popleft())

    def samples_in(self, units: Indices) -> int:
        """Return how many samples there are in units, which are numbered on from epoch to epoch."""
        drawn = [one for run in runs(units, self.size or 1) for one in self._draws(*run)]
        return sum(map(len, drawn)) if self.of_batches else len(drawn)

    def _draws(self, epoch: int, begin: int, end: int) -> list[Any]:
        """Return the draws from `begin` up to `end` of an epoch."""
        if epoch not in self._epochs:
            # a sampler is in one epoch at a time
            self._epochs = {n: each for n, each in self._epochs.items() if each.ended}
            if len(self._epochs) >= _KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._begun(epoch)
        return self._epochs[epoch].read(begin, end)

    def _begun(self, epoch: int) -> DataPass:
        """Return an epoch's draws."""
        sampler, seed = self._sampler, step_seed(self._seed, epoch, DRAWS)

        def begin() -> Iterator[Any]:
            _seed_own(sampler, seed, set())
            if not self._is_told and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return iter(sampler)

        def wrong(what: str) -> str:
            return (
                f"the DataLoader's sampler ({type(sampler).__name__}) says that it has {self.size} draws in an epoch, "
                f"and has {what} in epoch {epoch}: let it draw as many in each, or count all epochs as one"
            )

        return DataPass(begin, seed, self.size, wrong, ahead=_AT_A_TIME, keeps=_AT_A_TIME)


def as_drawn(loader: DataLoader[Any], seed: int) -> Source:
    """Return the data of a loader as a source whose samples come as the loader draws them.

    They are shuffled anew in each epoch (``shuffle=True``), come in the data set's order, or are what the loader's
    own sampler draws; then the source yields `Drawn`.

    Args:
        loader: with a batch size, unless it has a batch sampler of its own.
        seed: of the job.

    Raises:
        ConfigurationError: its sampler has no length, or divides samples itself; the data are empty.
    """
    if has_own_sampler(loader):
        return DrawnSource(loader, seed)
    source, _ = as_source(loader, None)
    if type(loader.sampler) is SequentialSampler and not hasattr(source, "blocks"):
        vars(source)["blocks"] = 1
    return source


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
