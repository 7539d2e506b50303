"""Iterable data sets of users' own loops: each worker reads all of one, and takes its samples by number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from steepest.core.data.protocol import DRAWN, Blocks, Indices
from steepest.core.data.sampler import even_share, step_seed
from steepest.core.models.losses import samples_of
from steepest.data.drawn import DRAWS, Drawn
from steepest.data.passes import DataPass, runs
from steepest.loop.cursor import Cursor, LoopPlace

_KEPT_STEPS = 2  # of which samples are kept: a step may be dealt out once more


class Stream:
    """The samples of a loader's iterable data set, by their numbers in each pass.

    A pass begins with all generators seeded by the job's seed and its number, see `steepest.data.passes`.

    Args:
        loader: whose data set yields samples; or batches, each of which counts as one, where it has no batch size.
        seed: of the job.
        outside: has the data set see no worker of a run.

    Attributes:
        size: the number of samples in each pass; None where the data set does not say it.
        keeps: how many samples are kept, for those that want them again.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        seed: int,
        outside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.batch_size, self.drop_last = loader.batch_size or 1, loader.drop_last
        self.contents = self._dataset = cast(Any, loader.dataset)
        self.of_batches = loader.batch_size is None
        self._loader = loader
        self._seed, self._outside = seed, outside
        self.size: int | None = None
        if hasattr(self._dataset, "__len__"):
            with contextlib.suppress(TypeError, NotImplementedError):
                self.size = len(self._dataset)
        self._number, self._pass = -1, self._begun(-1)
        self.keeps = 0

    def enter(self, epoch: int) -> None:
        """Tell the data set the epoch that the loop enters, if it has a method for that; its pass has yet to begin."""
        self._number = -1
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)

    def read(self, number: int, begin: int, end: int) -> list[Any]:
        """Return the samples from `begin` up to `end` of a pass; fewer at its end."""
        if number != self._number:
            self._number, self._pass = number, self._begun(number)
        self._pass.keeps = self.keeps
        return self._pass.read(begin, end)

    def _begun(self, number: int) -> DataPass:
        """Return a pass by its number."""

        def wrong(what: str) -> str:
            return (
                f"the iterable data set ({type(self._dataset).__name__}) says that it has {self.size} samples, and "
                f"yields {what} in pass {number}: let __len__ return what __iter__ yields to a reader that is alone, "
                "or leave __len__ out"
            )

        seed = step_seed(self._seed, number, DRAWS)
        return DataPass(lambda: iter(self._dataset), seed, self.size, wrong, outside=self._outside)

    def batch_of(self, samples: list[Any]) -> Drawn:
        """Return samples as the loader's batch."""
        if not self.of_batches:
            return Drawn(self._loader.collate_fn(samples), len(samples))
        batch = cast(Any, self._loader.collate_fn)(samples[0])
        if isinstance(batch, torch.Tensor):
            return Drawn(batch, len(batch) if batch.dim() else 1)
        return Drawn(batch, samples_of(batch, None, weighed=True))


class StreamedSource:
    """An iterable data set that says its length as a source of numbered samples; see `steepest.data.drawn`.

    Args:
        stream: the data set.
        whole: samples of a step.
    """

    blocks: Blocks = DRAWN

    def __init__(self, stream: Stream, whole: int) -> None:
        self.size, self.drop_last, self._stream = stream.size, stream.drop_last, stream
        self.contents, self.of_batches = stream.contents, stream.of_batches
        stream.keeps = _KEPT_STEPS * whole

    def open(self, shares: Iterable[Indices], prefetch: bool = True) -> Iterator[Drawn]:
        """Yield a batch for each share."""
        for share in shares:
            parts = [self._stream.read(*run) for run in runs(share, self.size or 1)]
            samples = [sample for part in parts for sample in part]
            yield self._stream.batch_of(samples)


class StreamCursor(Cursor):
    """The place of a loop over an iterable data set of unknown length: all workers see where it ends."""

    has_loader = True

    def __init__(self, stream: Stream, seed: int, whole: int | None = None) -> None:
        super().__init__(None, stream.batch_size, seed, whole)
        self._stream, self.deals_evenly = stream, not stream.of_batches
        self._opened_at = (
            0  # samples of the pass before the first batch of the present sum of gradients
        )
        self._read_number = 0  # the number of the last batch that was read
        # samples of the pass before the next batch, and before the present one
        self._offset = self._before = 0

    def state(self, *, amid_sum: bool) -> dict[str, Any]:
        """Return the place, see `Cursor.state`."""
        here = {"offset": self._offset, "offset_before": self._before, "opened_at": self._opened_at}
        return {**super().state(amid_sum=amid_sum), **here}

    def load(self, state: Mapping[str, Any], size: int) -> bool:
        """Go to where another loop is, see `Cursor.load`."""
        is_whole = super().load(state, size)
        place, self._before = LoopPlace(*state["place"]), state["offset_before"]
        self._offset = self._before if place.inside else state["offset"]
        if self.place.batch == LoopPlace(*state["opened"]).batch - 1:
            self._offset = state["opened_at"]
        return is_whole

    def forget_before(self) -> None:
        """Note that no gradients of batches before are part of a later step."""
        super().forget_before()
        self._opened_at = self._before if self._read_number == self.place.batch else self._offset

    def batches_before(self, size: int) -> int:
        """Return how many batches of the pass there are before the next one."""
        return self._offset // self.whole_batch(size)

    def begin_pass(self, size: int) -> bool:
        """Begin a pass over the loader, see `Cursor.begin_pass`."""
        before = self.place.passed
        goes_on = super().begin_pass(size)
        if self.place.passed != before:
            self._offset = 0
        return goes_on

    def _rest(self, size: int) -> list[Any]:
        """Return the samples of the next batch of all workers."""
        whole = self.whole_batch(size)
        self._stream.keeps = _KEPT_STEPS * whole
        samples = self._stream.read(self.place.passed - 1, self._offset, self._offset + whole)
        return [] if self._stream.drop_last and len(samples) < whole else samples

    def _has_more(self, size: int) -> bool:
        return bool(self._rest(size))

    def batch_before(self, rank: int, size: int) -> Any:
        """Return a batch of the worker's in a pass that is over: one that it sees does not count."""
        rest = self._rest(size)
        begin, end = even_share(len(rest), rank, size)
        return self._stream.batch_of(rest[begin:end] or rest[:1])

    def next_batch(self, rank: int, size: int) -> Any:
        """Return a worker's batch, see `Cursor.next_batch`."""
        rest = self._rest(size)
        begin, end = even_share(len(rest), rank, size)
        batch, samples = self._stream.batch_of(rest[begin:end] or rest[:1])
        self.samples, self.whole = samples if end > begin else 0, len(rest)
        self.samples_of_all = self.whole if self.deals_evenly else 0
        self._before, self._offset = self._offset, self._offset + len(rest)
        self._read_number = self.place.batch
        self.is_at_last = not self._has_more(size)
        return batch

    def load_ahead(self, rank: int, size: int, seed: Callable[[int], None]) -> None:
        """Do nothing: samples are read ahead, to see whether there are any."""
