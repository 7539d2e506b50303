"""The loader that `prepare` gives back for that of the training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

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
