"""Records of a log with partitions and offsets, such as Kafka's, as a numbered stream."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from steepest.core.data.sources import IndexedStream
from steepest.errors import ConfigurationError


class OffsetStream(IndexedStream):
    """A window of a log: of each partition the records from one offset to another.

    Partitions take turns, record by record, until each has ended. Checkpoints have the window beside the place in it,
    see `steepest.next_offsets`.

    Args:
        read: ``read(partition, offset)`` returns an iterable of the partition's records from that offset on, one for
            each offset, the same ones whenever it is called, in any process.
        offsets: by partition, its first offset, and the one behind its last.
        block, collate_fn: as of `IndexedStream`.

    Attributes:
        offsets: the window, by the partitions' names.

    Raises:
        ConfigurationError: `offsets` is no such mapping, or has no records; later, in a step: a partition ends before
            its last offset.

    Example:
        >>> log = {"a": [10, 11, 12], "b": [20, 21]}
        >>> stream = OffsetStream(lambda name, at: log[name][at:], {"a": (0, 3), "b": (1, 2)}, block=1)
        >>> next(stream.open([np.arange(4)]))
        tensor([10, 21, 11, 12])
    """

    def __init__(
        self,
        read: Callable[[Any, int], Iterable[Any]],
        offsets: Mapping[Any, tuple[int, int]],
        block: int = 1024,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        if not callable(read):
            raise ConfigurationError(
                f"read is a {type(read).__name__}: give a function of a partition and an offset"
            )
        self._read_from, self._window = read, checked_offsets(offsets)
        self._counts = np.array([end - begin for begin, end in self._window.values()], np.int64)
        if not self._counts.sum():
            raise ConfigurationError(
                f"offsets={offsets!r:.200}: no partition has a record; wait until one has"
            )
        super().__init__(self._from, int(self._counts.sum()), block, collate_fn)
        self.offsets = {str(partition): at for partition, at in self._window.items()}
        names = "\n".join(self.offsets).encode()
        # by which workers and checkpoints tell windows apart, see `steepest.core.data.fingerprint`
        self.contents = np.array(list(self._window.values())), np.frombuffer(names, np.uint8)

    def _from(self, start: int) -> Iterator[Any]:
        """Yield the records from the one with number `start` on."""
        turn = self._turn_of(start)
        left = start - int(np.minimum(self._counts, turn).sum())  # of the turn, that stand before
        readers: dict[Hashable, Iterator[Any]] = {}
        for at in range(turn, int(self._counts.max())):
            for (partition, (begin, end)), count in zip(
                self._window.items(), self._counts, strict=True
            ):
                if at >= count:
                    continue
                if left:
                    left -= 1
                    continue
                if partition not in readers:
                    readers[partition] = iter(self._read_from(partition, begin + at))
                try:
                    record = next(readers[partition])
                except StopIteration:
                    raise ConfigurationError(
                        f"partition {partition!r} ended before offset {begin + at}, its window is from {begin} to "
                        f"{end}: let read(partition, offset) yield a record for each offset"
                    ) from None
                yield record

    def _turn_of(self, start: int) -> int:
        """Return the last turn before which at most so many records stand."""
        low, high = 0, int(self._counts.max())
        while low < high:
            middle = (low + high + 1) // 2
            if int(np.minimum(self._counts, middle).sum()) <= start:
                low = middle
            else:
                high = middle - 1
        return low


def checked_offsets(offsets: Any) -> dict[Any, tuple[int, int]]:
    """Return the window of each partition; ConfigurationError: it is none, or two names are alike."""
    if not isinstance(offsets, Mapping):
        raise ConfigurationError(
            f"offsets is a {type(offsets).__name__}: give a dict of partitions and (first, last + 1)"
        )
    windows = {}
    for partition, window in offsets.items():
        begin, end = window if isinstance(window, (tuple, list)) and len(window) == 2 else (-1, -1)
        if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
            raise ConfigurationError(
                f"offsets of partition {partition!r} are {window!r:.80}: give its first offset, and the one behind its "
                "last"
            )
        windows[partition] = begin, end
    if len({str(partition) for partition in windows}) < len(windows):
        raise ConfigurationError(
            f"two partitions of {list(windows)!r:.200} read alike: give other names"
        )
    return windows
