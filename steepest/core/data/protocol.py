"""The Source protocol: training data from which a replica's batches are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

#: Samples that are read together: the size of blocks that come in order, or the sizes of blocks
#: that are shuffled; or `DRAWN`.
Blocks = int | tuple[int, ...]

#: Of samples that the source itself draws for each epoch: they are numbered on from one epoch to the next.
DRAWN = 0


@runtime_checkable
class Source(Protocol):
    """The training data of a replica, from which batches are made.

    A source whose samples are read in blocks has an attribute `blocks`, and one of whose epochs
    only whole steps are taken has `drop_last=True` (see `steepest.core.data.sampler.SamplePlan`). One
    that divides its own samples has a method `divide(replica, replicas)`, called before `open`, and
    is opened again when its division changes, unless its attribute `divides` is False. One that can
    begin a pass in its middle has attributes `begin` and `passes`, see
    `steepest.core.data.streams.StreamSource`. One of which users should know something has it as
    `notice`, logged once by the driver. One with `contents`, arrays or a data set, is told from
    others by them, see `steepest.core.data.fingerprint`. One whose data may change between two epochs has
    `each_epoch=True`: it is opened anew for each, with the shares of that epoch alone. One of a model that seeds all
    random generators where it takes a batch has `model_seeds=True`: they are not kept for it as loading has left them.
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
