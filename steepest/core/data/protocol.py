"""The Source protocol: training data from which a replica's batches are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

#: Samples that are read together: the size of blocks that come in order, or the sizes of shuffled
#: blocks; or `DRAWN`.
Blocks = int | tuple[int, ...]

#: For samples that the source itself draws for each epoch: their numbers continue from one epoch to the next.
DRAWN = 0


@runtime_checkable
class Source(Protocol):
    """The training data of a replica, from which batches are made.

    A source may have these attributes, too:

    - `blocks`: its samples are read in blocks; `drop_last=True`: its epochs have only whole steps (see
      `steepest.core.data.sampler.SamplePlan`).
    - `divide(replica, replicas)`: it divides its own samples. The method is called before `open`, and the source is
      opened again when its division changes, unless its attribute `divides` is False.
    - `begin` and `passes`: it can begin a pass in its middle, see `steepest.core.data.streams.StreamSource`.
    - `notice`: a text for users, logged once by the driver.
    - `contents`: arrays or a data set that identify the data, see `steepest.core.data.fingerprint`.
    - `offsets`: by partition, the window of a log that the data are, see `steepest.core.data.offset_stream`.
    - `each_epoch=True`: its data may change between two epochs. It is opened anew for each, with only its shares.
    - `model_seeds=True`: its model seeds all random generators when it takes a batch, so that they are not kept.
    """

    @property
    def size(self) -> int | None:
        """The number of samples, or None for a stream that chooses its batches itself."""

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Any]:
        """Yield one batch for each array of sample indices, in order.

        Args:
            shares: (n,) int64 sample indices of each batch.
            prefetch: whether shares may be taken ahead of the batches that are asked for.
        """
