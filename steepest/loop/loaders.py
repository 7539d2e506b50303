"""The loaders that `prepare` gives back: that of training, and those whose samples are shared out over the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Subset

from steepest.data.sampler import even_share
from steepest.errors import ConfigurationError
from steepest.loop.session import Session


class TrainingLoader:
    """The loader of the training data: its batches are this worker's of the present epoch.

    Whatever else is asked of it is that of the loader that was given to `prepare`.

    Args:
        loader: that one.
        session: of the worker.
        steps: returns the number of steps of an epoch.
    """

    def __init__(self, loader: DataLoader[Any], session: Session, samples: int, whole: int) -> None:
        self.loader = loader
        self._session = session
        self._samples, self._whole = samples, whole

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches of the present epoch; at the beginning those that are left of it."""
        while True:
            try:
                batch = self._session.next_batch()
            except StopIteration:
                return
            yield batch

    def __len__(self) -> int:
        """Return the number of the job's steps in an epoch."""
        whole = self._whole
        return self._samples // whole if self.loader.drop_last else -(-self._samples // whole)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


class SharedLoader:
    """A loader of other data, such as those of a validation: each worker reads a part of the samples, in order.

    Args:
        loader: that was given to `prepare`.
        session: of the worker.

    Raises:
        ConfigurationError: its data have no length.
    """

    def __init__(self, loader: DataLoader[Any], session: Session) -> None:
        if isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
            raise ConfigurationError(
                "steepest.prepare() was given a second loader whose data have no length, or that makes no batches: its "
                "samples cannot be shared out over the workers; leave it out, and each worker reads all of it"
            )
        self.loader = loader
        self._session = session

    def _part(self) -> DataLoader[Any]:
        loader, session = self.loader, self._session
        dataset: Any = loader.dataset
        return DataLoader(
            Subset(dataset, range(*even_share(len(dataset), session.rank, session.size))),
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
        )

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this worker's part."""
        return iter(self._part())

    def __len__(self) -> int:
        """Return the number of batches of this worker's part."""
        return len(self._part())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)
