"""Streams of batches, and iterable data sets that are divided among replicas by position."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

from steepest.errors import ConfigurationError


class StreamSource:
    """An iterable of batches as a source; begun again when it ends.

    An epoch visits no fixed set of samples, and a restored run begins the stream again, because
    only the iterable knows which samples it gives. `IndexedStream` has none of these limits.

    Args:
        batches: can be iterated over several times.
        divided: the data set that `batches` reads, if it is divided among replicas.

    Attributes:
        notice: what users should know of it.
    """

    size: int | None = None

    def __init__(self, batches: Iterable[Any], divided: DividedDataset | None = None) -> None:
        self._batches = batches
        self._divided = divided
        kind = type(batches if divided is None else divided.dataset).__name__
        how = (
            "samples are divided among replicas by position"
            if divided is not None
            else "samples are not divided among replicas"
        )
        self.notice = (
            f"training data is a {kind} that chooses its own samples: {how}, epochs are not exact "
            "and a restored run starts the stream anew; an IndexedStream has none of these limits"
        )

    def divide(self, replica: int, replicas: int) -> None:
        """Take a replica's part of the samples from the next pass on.

        Args:
            replica: index of the replica among all of the job.
            replicas: their number.
        """
        if self._divided is not None:
            self._divided.replica, self._divided.replicas = replica, replicas

    def open(self, shares: Iterable[Any], prefetch: bool = True) -> Iterator[Any]:
        """Yield the iterable's own batches without end; `shares` is not used.

        Raises:
            ConfigurationError: it yields nothing.
        """
        while True:
            empty = True
            for batch in self._batches:
                empty = False
                yield batch
            if empty:
                raise ConfigurationError(
                    "the stream of batches is empty: give an iterable that can be begun again, and "
                    "that has samples for each replica"
                )


class DividedDataset(IterableDataset[Any]):
    """An iterable data set of which each replica, and each process of its DataLoader, takes a part.

    Of each `block` times as many samples as there are parts, the first part takes the first `block`
    samples, and so on; each reads all of the data set for that. A data set (or `worker_init_fn`)
    that asks `torch.utils.data.get_worker_info` which part it has to give is told that of the
    replica and the process together, and all that it gives is taken.

    Args:
        dataset: the user's.
        block: consecutive samples that one part takes: those of a batch.

    Attributes:
        dataset: as given.
        replica, replicas: the replica that takes its part, and how many there are.
    """

    def __init__(self, dataset: IterableDataset[Any], block: int) -> None:
        self.dataset = dataset
        self.replica, self.replicas = 0, 1
        self._block = block
        self._info: _PartInfo | None = None

    def __iter__(self) -> Iterator[Any]:
        info = self._begin()
        if info.parts == 1:
            yield from self.dataset
            return
        with _told(info):
            samples = iter(self.dataset)
        for number in count():
            with _told(info):
                taken = list(islice(samples, 1))
            if not taken:
                return
            if info.asked or number // self._block % info.parts == info.part:
                yield taken[0]

    def initialise(self, user: Callable[[int], None], number: int) -> None:
        """Call a user's `worker_init_fn` in a process of the DataLoader."""
        with _told(self._begin()):
            user(number)

    def _begin(self) -> _PartInfo:
        real = torch_worker.get_worker_info()
        if self._info is None or real is None:
            self._info = _PartInfo(real, self)
        return self._info


class _PartInfo:
    """What `torch.utils.data.get_worker_info` returns to a data set that is divided."""

    def __init__(self, real: Any, divided: DividedDataset) -> None:
        processes, process = (1, 0) if real is None else (real.num_workers, real.id)
        self.part = divided.replica * processes + process
        self.parts = divided.replicas * processes
        self.dataset = divided.dataset
        self.seed = 0 if real is None else real.seed
        self.asked = False

    @property
    def id(self) -> int:
        self.asked = True
        return self.part

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self.parts


@contextlib.contextmanager
def _told(info: _PartInfo) -> Iterator[None]:
    """Have `torch.utils.data.get_worker_info` return another object."""
    before = torch_worker._worker_info
    torch_worker._worker_info = info  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_worker._worker_info = before


class _Initialise:
    """A `worker_init_fn` that tells the user's which part the process has."""

    def __init__(self, user: Callable[[int], None]) -> None:
        self._user = user

    def __call__(self, number: int) -> None:
        info = torch_worker.get_worker_info()
        assert info is not None
        cast(DividedDataset, info.dataset).initialise(self._user, number)


def divided_stream(loader: DataLoader[Any]) -> StreamSource:
    """Return a loader's iterable data set as a source that is divided among replicas."""
    dataset = cast("IterableDataset[Any]", loader.dataset)
    divided, user = DividedDataset(dataset, loader.batch_size or 1), loader.worker_init_fn
    again = DataLoader(
        divided,
        batch_size=loader.batch_size,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        timeout=loader.timeout,
        worker_init_fn=None if user is None else _Initialise(user),
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
    return StreamSource(again, divided)
