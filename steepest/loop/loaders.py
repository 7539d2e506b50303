"""The loaders that `prepare` gives back for those of the training data and of evaluations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from steepest.core.data.sampler import even_share
from steepest.core.data.sources import DatasetSource
from steepest.errors import ConfigurationError
from steepest.loop.cursor import Pass
from steepest.loop.user_loop import UserLoop


class PreparedLoader:
    """A loader in the place of one that was given to `prepare`, which has, and is given, all other attributes.

    A pickled one is that loader itself.

    Args:
        loader: that one.
    """

    def __init__(self, loader: DataLoader[Any], **own: Any) -> None:
        vars(self).update(own, loader=loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __reduce__(self) -> Any:
        return _itself, (self.loader,)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)


class TrainingLoader(PreparedLoader):
    """The loader of the training data: its batches are this worker's of the present epoch.

    Args:
        loader: that was given to `prepare`.
        loop: of the worker's function.
        samples: of an epoch; None if unknown.
        whole: samples of a batch of all workers.
    """

    loader: DataLoader[Any]
    _loop: UserLoop
    _samples: int | None
    _whole: int

    def __init__(
        self, loader: DataLoader[Any], loop: UserLoop, samples: int | None, whole: int
    ) -> None:
        super().__init__(loader, _loop=loop, _samples=samples, _whole=whole)

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches of a pass; of the first pass, those that are left."""
        return _Batches(self._loop)

    def __len__(self) -> int:
        """Return the number of the job's steps in an epoch."""
        whole = self._whole
        if self._samples is None:
            raise TypeError(
                "the loader has an iterable data set without __len__, whose number of batches is unknown"
            )
        return self._samples // whole if self.loader.drop_last else -(-self._samples // whole)


class _Batches(Iterator[Any]):
    """A worker's batches of one pass over the loader."""

    def __init__(self, loop: UserLoop) -> None:
        self._loop, self._pass = loop, Pass()

    def __next__(self) -> Any:
        return self._loop.next_batch(self._pass)


class EvaluationLoader(PreparedLoader):
    """A loader for evaluations in the loop: each pass deals its samples out, each to one worker.

    The n-th batches of all workers are the n-th of one loader with as many times the batch size; all workers have
    as many batches, none of which is empty: what is left behind the last whole ones is a batch of its own if it
    has a sample for each worker, and lengthens the last one otherwise. With ``shuffle=True`` each pass has an
    order of its own, by the job's seed and the place of the loop.

    Args:
        loader: that was given to `prepare`.
        loop: of the worker's function.

    Raises:
        ConfigurationError: its data have no length, or its own sampler does not tell its samples.
    """

    loader: DataLoader[Any]
    _loop: UserLoop
    _source: DatasetSource
    # the place of the last pass, see `UserLoop.place_number`, and passes there before
    _passes: tuple[int, int]

    def __init__(self, loader: DataLoader[Any], loop: UserLoop) -> None:
        _indices_of(loader)
        source = DatasetSource(loader.dataset, loader)
        super().__init__(loader, _loop=loop, _source=source, _passes=(0, 0))

    def _batches(self, count: int, size: int) -> list[tuple[int, int]]:
        """Return the ranges of the batches of all workers together, of so many samples."""
        whole = (self.loader.batch_size or 1) * size
        if count < size:
            raise ConfigurationError(
                f"a loader of {count} samples for evaluations by {size} workers: leave it out of steepest.prepare(), "
                "so that each worker reads all of it"
            )
        left = count % whole
        begins = list(range(0, count - left, whole))
        if self.loader.drop_last:
            return [(begin, begin + whole) for begin in begins]
        if left >= size:
            begins.append(count - left)
        return list(zip(begins, [*begins[1:], count], strict=True))

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches of a pass."""
        loop, size = self._loop, self._loop.job.size
        order: list[list[int]] = [[] for _ in range(size)]
        indices = _indices_of(self.loader)  # the data set may have grown
        ranges = self._batches(len(indices), size)
        places = self._places(len(indices))
        shares = [
            [even_share(end - begin, rank, size) for rank in range(size)] for begin, end in ranges
        ]
        mine = [
            indices[
                places[begin + share[loop.job.rank][0] : begin + share[loop.job.rank][1]]
            ].tolist()
            for (begin, _), share in zip(ranges, shares, strict=True)
        ]
        loop.gatherer.order = order
        for (begin, _), share, batch in zip(
            ranges, shares, self._source.batches(mine), strict=True
        ):
            for rank, (first, last) in enumerate(share):
                order[rank].extend(places[begin + first : begin + last].tolist())
            yield loop.on_device(batch)

    def _places(self, count: int) -> Any:
        """Return the samples of a pass in their order, which is the same on all workers."""
        if isinstance(self.loader.sampler, SequentialSampler):
            return np.arange(count)
        place, (last, before) = self._loop.place_number, self._passes
        nth = before + 1 if place == last else 0
        vars(self)["_passes"] = place, nth
        return np.random.default_rng([self._loop.job.kind.seed, place, nth]).permutation(count)

    def __len__(self) -> int:
        """Return the number of batches of each worker."""
        return len(self._batches(len(_indices_of(self.loader)), self._loop.job.size))


def _itself(loader: DataLoader[Any]) -> DataLoader[Any]:
    return loader


def _indices_of(loader: DataLoader[Any]) -> Any:
    """Return the numbers of the samples of a loader for evaluations."""
    out = "or leave it out of steepest.prepare(), so that each worker reads all of it"
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        raise ConfigurationError(
            "steepest.prepare() was given a further loader over data without a length: give one over a map-style "
            f"dataset, {out}"
        )
    sampler: Any = loader.sampler
    named = getattr(sampler, "indices", None)  # of a SubsetRandomSampler
    whole = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement
    )
    if loader.batch_size is None or not (whole or isinstance(named, Sequence)):
        raise ConfigurationError(
            f"steepest.prepare() was given a further loader with a sampler of its own ({type(sampler).__name__}): "
            f"leave sampler= and batch_sampler= out, {out}"
        )
    return np.asarray(named) if not whole else np.arange(len(loader.dataset))
