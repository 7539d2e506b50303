"""Sources of batches: arrays, data sets, DataLoaders, numbered streams, and streams of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from steepest.core.data.protocol import Blocks, Indices, Source
from steepest.core.data.streams import StreamSource, divided_stream
from steepest.errors import ConfigurationError
from steepest.validation import require_count


class ArraySource:
    """Arrays or tensors of one length, as a source; a batch is the tuple of their rows.

    Args:
        arrays: each (N, ...), NumPy or torch.

    Raises:
        ConfigurationError: a scalar, different lengths, or no samples.

    Example:
        >>> import numpy as np
        >>> source = ArraySource((np.arange(4.0), np.arange(4)))
        >>> next(source.open([np.array([2, 0])]))
        (array([2., 0.]), array([2, 0]))
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        if any(array.ndim == 0 for array in arrays):
            raise ConfigurationError(
                "one of the data arrays is a scalar, and a scalar has no samples"
            )
        lengths = [len(array) for array in arrays]
        if not lengths or min(lengths) != max(lengths) or min(lengths) == 0:
            raise ConfigurationError(
                f"data arrays have lengths {lengths}: give one or more of one length above 0"
            )
        self.contents = self._arrays = tuple(arrays)
        self.size: int | None = lengths[0]

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Yield a tuple of rows for each share."""
        tensors = any(isinstance(array, torch.Tensor) for array in self._arrays)
        for share in shares:
            if tensors:
                index = torch.from_numpy(share)
                yield tuple(
                    a[index] if isinstance(a, torch.Tensor) else a[share] for a in self._arrays
                )
            else:
                yield tuple(array[share] for array in self._arrays)


class DatasetSource:
    """A map-style data set as a source, with a DataLoader's worker processes and `collate_fn` if one was given.

    The set has `__len__`, `__getitem__`, possibly `__getitems__`.

    Raises:
        ConfigurationError: it is empty.
    """

    def __init__(self, dataset: Any, loader: DataLoader[Any] | None = None) -> None:
        self.size: int | None = len(dataset)
        if not self.size:
            raise ConfigurationError("the dataset is empty: give at least one sample")
        self.drop_last = loader is not None and loader.drop_last
        self.contents = self._dataset = dataset
        self._loader = loader
        self._keys = _Keys()
        self._persistent: DataLoader[Any] | None = None  # with processes that stay

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Return an iterator of collated batches, prefetched by the loader's worker processes if it has any.

        Raises:
            ConfigurationError: the length of the data set has changed.
        """
        if (length := len(self._dataset)) != self.size:
            raise ConfigurationError(
                f"the data set ({type(self._dataset).__name__}) had {self.size} samples when training began, and has "
                f"{length} now: keep its length. To train on samples that come later, give the loader a sampler that "
                "draws equally many in each epoch, such as RandomSampler(data, replacement=True, num_samples=1000)"
            )
        return self.batches(map(np.ndarray.tolist, shares), prefetch)

    def batches(self, keys: Iterable[Sequence[Any]], prefetch: bool = True) -> Iterator[Any]:
        """Yield a collated batch of the samples of each list of keys, see `open`."""
        loader = self._loader
        if loader is not None and loader.num_workers and prefetch:
            self._keys.lists = keys
            again = self._processes(loader) if self._persistent is None else self._persistent
            yield from again
            return
        collate = default_collate if loader is None else loader.collate_fn
        many = getattr(self._dataset, "__getitems__", None)
        for each in keys:
            yield collate(many(each) if many is not None else [self._dataset[i] for i in each])

    def _processes(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader with the same worker processes as the user's."""
        generator = torch.Generator()  # from which the loader seeds its processes
        generator.set_state(torch.get_rng_state())
        processes = DataLoader(
            self._dataset,
            batch_sampler=cast(Any, self._keys),
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
        if loader.persistent_workers:
            self._persistent = processes
        return processes


class _Keys:
    """The keys of batches, list by list, as a sampler of batches."""

    def __init__(self) -> None:
        self.lists: Iterable[Sequence[Any]] = ()

    def __iter__(self) -> Iterator[Sequence[Any]]:
        return iter(self.lists)


class IndexedStream:
    """A stream of numbered samples that can begin anywhere: divided, visited and resumed exactly.

    Blocks of samples come in the stream's order in each epoch; within a block they are shuffled
    anew. Every worker reads each block that holds samples of its own, in order, keeps the last two
    in memory, and collates only its own samples. It begins the stream again (`make`) for a new
    epoch, after a restore, for samples that another worker returned, and if it has no samples in
    the next block. So with blocks of at least a step's samples, and any number of workers, each
    worker reads all of the stream, once per epoch; with blocks much smaller than its share it reads
    little more than its own samples, but seeks in each step.

    Args:
        make: ``make(start)`` returns an iterable of samples from number `start` on (0 <= start <
            length), the same ones in the same order whenever it is called, in any process.
        length: number of samples in all.
        block: number of samples that are shuffled together; 1 leaves the stream's order as it is.
        collate_fn: makes a batch of a list of samples; by default torch's. Slow work (decoding) and
            random work (augmentation) belongs here.

    Raises:
        ConfigurationError: `make` cannot be called, `length` or `block` is no positive number;
            later, in a step: the stream ends before `length`.

    Example:
        >>> stream = IndexedStream(lambda start: range(start, 6), length=6, block=3)
        >>> next(stream.open([np.array([5, 3])]))
        tensor([5, 3])
    """

    def __init__(
        self,
        make: Callable[[int], Iterable[Any]],
        length: int,
        block: int = 1024,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if not callable(make):
            raise ConfigurationError(
                f"make is a {type(make).__name__}: give a function of the first sample's number"
            )
        length, block = require_count("length", length), require_count("block", block)
        self.size: int | None = length
        self.blocks: Blocks = block
        self._make, self._length, self._block, self._collate = make, length, block, collate_fn
        self._kept: dict[int, list[Any]] = {}
        self._reader: tuple[int, Iterator[Any]] | None = None  # number of the next sample

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Yield a collated batch for each share; quick if shares come in the plan's order."""
        for share in shares:
            yield self._collate(
                [self._read(i // self._block)[i % self._block] for i in share.tolist()]
            )

    def _read(self, block: int) -> list[Any]:
        if block not in self._kept:
            begin = block * self._block
            end = min(begin + self._block, self._length)
            at, stream = self._reader or (-1, iter(()))
            self._reader = None  # an iterator that raises is exhausted
            if at != begin:
                stream = iter(self._make(begin))
            if (
                len(self._kept) > 1
            ):  # two are kept: replicas' shares may lie on both sides of a border
                del self._kept[next(iter(self._kept))]
            samples = list(islice(stream, end - begin))
            if len(samples) < end - begin:
                raise ConfigurationError(
                    f"the stream ended before sample {begin + len(samples)}, its length is "
                    f"{self._length}: give the "
                    "number of samples that make(0) yields, and let make(start) begin at sample "
                    "start"
                )
            self._reader = (end, stream)
            self._kept[block] = samples
        return self._kept[block]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": {}, "_reader": None}  # these belong to this process


def as_source(data: Any, batch_size: int | None) -> tuple[Source, int]:
    """Return a user's training data as a source, and the batch size.

    Args:
        data: an array or tensor, a tuple of them (or a list, if they cannot be samples), a map-style
            dataset, a DataLoader, an IndexedStream or any other `Source`, an IterableDataset of
            samples, or an iterable of batches.
        batch_size: samples per replica and step; may be None with a DataLoader that has one, and
            with streams that yield whole batches.

    Raises:
        ConfigurationError: no batch size, or another one than the DataLoader's; a DataLoader with a
            sampler of its own, empty data, columns that are no arrays, a list of arrays that may be
            samples or columns.
    """
    batched = batch_size is not None
    loader_source = _from_loader(data) if isinstance(data, DataLoader) else None
    batch_size = batch_size_of(data, batch_size)
    source = data if isinstance(data, Source) and callable(data.open) else None
    streams = isinstance(data, IterableDataset) or not (
        hasattr(data, "__len__") or hasattr(data, "__getitem__")
    )
    if (
        batch_size is None
        and source is None
        and (streams or isinstance(loader_source, StreamSource))
    ):
        batch_size = 1  # a stream's batches have the size that they have
    batch_size = require_count("batch_size", batch_size)
    if (source := source or loader_source) is not None:
        return source, batch_size
    if isinstance(data, (str, bytes)) or type(data).__module__.split(".")[0] == "pandas":
        raise ConfigurationError(
            f"data is a {type(data).__name__}, which has no samples: give arrays, such as "
            "table[['a', 'b']].to_numpy(), or a data set that reads the file"
        )
    if isinstance(data, Mapping):
        raise ConfigurationError(
            f"data is a {type(data).__name__}: give a data set whose samples are dicts, or a tuple "
            "of arrays"
        )
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return ArraySource((data,)), batch_size
    if isinstance(data, (tuple, list)) and _are_columns(data):
        return ArraySource(data), batch_size
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        if not hasattr(data, "__iter__"):
            raise ConfigurationError(
                f"data is a {type(data).__name__}: give arrays, a map-style dataset, a DataLoader "
                "or an iterable"
            )
        if isinstance(data, IterableDataset):  # given a batch size it yields samples
            size, collate = (batch_size, None) if batched else (None, _as_it_is)
            loader = DataLoader(data, batch_size=size, collate_fn=collate)
            return divided_stream(loader), batch_size
        return StreamSource(lambda: data, data), batch_size
    if not hasattr(data, "__len__"):
        raise ConfigurationError(f"the dataset {type(data).__name__} has no length: add __len__")
    return DatasetSource(data), batch_size


def _are_columns(data: Sequence[Any]) -> bool:
    """Return whether the parts of a tuple or list are columns, whose rows are samples.

    Raises:
        ConfigurationError: a tuple of arrays and others, or of lists; a list of arrays that may also be samples, or
            cannot be columns.
    """
    arrays = [isinstance(part, (np.ndarray, torch.Tensor)) for part in data]
    kind = f"data is a {type(data).__name__} of {len(data)}"
    if type(data) is tuple:
        others = [part for part in data if not isinstance(part, (np.ndarray, torch.Tensor))]
        others = others if any(arrays) else [part for part in data if isinstance(part, list)]
        if others:
            raise ConfigurationError(
                f"{kind}, one of which is a {type(others[0]).__name__}: a tuple has columns, each "
                "an array or tensor with a row per sample; convert it with torch.as_tensor(), or "
                "give a list of samples"
            )
    if not data or not all(arrays):
        _check_samples(kind, data)
        return False
    if isinstance(data, list):
        lengths = [len(array) if array.ndim else 0 for array in data]
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"{kind} arrays of lengths {str(lengths[:8])[1:-1]}, which cannot be columns: give "
                "DataLoader(data, batch_size=..., collate_fn=...) if they are samples, whose "
                "collate_fn makes a batch of several"
            )
        if len({(array.ndim, array.dtype) for array in data}) == 1:
            raise ConfigurationError(
                f"{kind} arrays of {data[0].ndim} dimensions, which may be samples or columns: give "
                "DataLoader(data, batch_size=...) if they are samples, tuple(data) if they are "
                "columns with a row per sample"
            )
    return True


def _check_samples(kind: str, samples: Sequence[Any]) -> None:
    """Check that samples in a tuple or list hold no lists of numbers; else ConfigurationError.

    From lists of equal length torch's collation makes a list of their first numbers, one of their second ones, ...
    """
    first = samples[0] if samples else None
    parts = list(first.values()) if isinstance(first, Mapping) else first
    if _are_numbers(first, list) or (
        isinstance(parts, (list, tuple)) and any(_are_numbers(part, list, tuple) for part in parts)
    ):
        raise ConfigurationError(
            f"{kind} whose first sample has a list of numbers, which batches take apart into columns: give arrays or "
            "tensors with a row per sample, as (torch.as_tensor(inputs), torch.as_tensor(targets)), or samples of "
            "tensors"
        )


def _are_numbers(value: Any, *kinds: type) -> bool:
    """Return whether a value is a container, of one of `kinds`, of plain numbers or of such containers."""
    if not (type(value) in kinds and value):
        return False
    inner = value[0]
    return isinstance(inner, (int, float)) or _are_numbers(inner, list, tuple)


def _as_it_is(batch: Any) -> Any:
    return batch


def _from_loader(loader: DataLoader[Any]) -> Source:
    if isinstance(loader.dataset, IterableDataset):
        return divided_stream(loader)
    sampler = loader.sampler
    own: object = sampler if type(sampler) not in (SequentialSampler, RandomSampler) else None
    if loader.batch_size is None:
        if loader.batch_sampler is None:
            raise ConfigurationError(
                "the DataLoader has batch_size=None and makes no batches: give it a batch size"
            )
        own = loader.batch_sampler
    if own is not None:
        raise ConfigurationError(
            f"the DataLoader has a sampler of its own ({type(own).__name__}): steepest divides and "
            "shuffles the "
            "samples itself, so that each is seen once per epoch on any number of workers; leave "
            "sampler= and batch_sampler= out"
        )
    if isinstance(sampler, RandomSampler) and (
        sampler.replacement or sampler.num_samples != len(cast(Any, loader.dataset))
    ):
        raise ConfigurationError(
            "the DataLoader samples with replacement or a part only: leave its sampler= out"
        )
    return DatasetSource(loader.dataset, loader)


def batch_size_of(data: Any, batch_size: int | None) -> int | None:
    """Return `batch_size`, or else that of a DataLoader; None if there is neither.

    Raises:
        ConfigurationError: there are both, and they differ.
    """
    own = data.batch_size if isinstance(data, DataLoader) else None
    if own is not None and batch_size is not None and batch_size != own:
        raise ConfigurationError(
            f"batch_size={batch_size!r} beside a DataLoader with batch_size={own}: give the DataLoader "
            "the one that is meant, and leave the other out"
        )
    return own if batch_size is None else batch_size
