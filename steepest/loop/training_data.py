"""The training data of a user's own loop, as the loader that `prepare` was given has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from steepest.core.data.protocol import Source
from steepest.core.models.step_size import step_size
from steepest.data.drawn import DrawnSource, as_drawn
from steepest.errors import ConfigurationError
from steepest.loop.streamed import Stream, StreamedSource
from steepest.loop.user_loop import UserLoop, outside


@dataclass(frozen=True)
class TrainingData:
    """Training data.

    Attributes:
        batch_size: samples in a worker's batch; batches, where these are what the data have.
        source: of them.
        stream: of iterable data sets; the source is None if the number of samples in an epoch is unknown.
    """

    batch_size: int
    source: Source | None
    stream: Stream | None = None

    @property
    def size(self) -> int | None:
        """The number of samples in an epoch; None if unknown."""
        return None if self.source is None else self.source.size

    def enter(self, epoch: int) -> None:
        """Note that the loop enters an epoch, by the number that it sees, and has yet to read of it."""
        data = self.source if self.stream is None else self.stream
        if isinstance(data, DrawnSource | Stream):
            data.enter(epoch)


def training_data(loader: DataLoader[Any], loop: UserLoop) -> TrainingData:
    """Return the training data of a loader.

    Raises:
        ConfigurationError: its sampler has no length, or divides samples itself.
    """
    batch_size, whole = loader.batch_size or 1, step_size()
    has_batches = loader.batch_size is None
    if has_batches and whole.samples is not None:
        raise ConfigurationError(
            "global_batch_size= with a loader that has a batch_sampler, or batch_size=None, whose batches have "
            "as many samples as they have: leave global_batch_size out; a step has one batch of each worker"
        )
    if isinstance(loader.dataset, IterableDataset):
        stream = Stream(loader, loop.job.kind.seed, outside)
        if stream.size is None:
            return TrainingData(batch_size, None, stream)
        return TrainingData(batch_size, StreamedSource(stream, whole.of(batch_size)), stream)
    return TrainingData(batch_size, as_drawn(loader, loop.job.kind.seed))
